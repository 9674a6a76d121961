"""Disks that read slowly, or not at all."""

from __future__ import annotations

import time
from typing import Any


class Throttled:
    """A disk that delivers a record every ``seconds`` seconds, and stops after ``count`` records."""

    def __init__(self, own: Any, seconds: float, count: int = 1 << 30) -> None:
        self.own, self.seconds, self.count, self.free, self.begun = own, seconds, count, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def begin_load(self, *args: Any) -> Any:
        began = max(self.free, time.monotonic())
        self.begun += 1
        if self.begun > self.count:
            return SlowLoad(self.own.begin_load(*args), began + 1e9, self.seconds)
        self.free = began + self.seconds
        return SlowLoad(self.own.begin_load(*args), began, self.seconds)


class SlowLoad:
    def __init__(self, own: Any, began: float, seconds: float) -> None:
        self.own, self.began, self.seconds = own, began, seconds
        self.end, self.give_up = own.end, own.give_up

    @property
    def progress(self) -> float:
        return min(max(0.0, (time.monotonic() - self.began) / self.seconds), 1.0)

    @property
    def is_over(self) -> bool:
        return self.progress == 1.0 and self.own.is_over

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.is_over


class Hanging:
    """Native records whose disk has stopped to answer."""

    def __init__(self, own: Any) -> None:
        self.own, self.begun, self.given_up = own, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def begin_load(self, *_: Any) -> Any:
        self.begun += 1
        return self

    is_over, progress = False, 0.0

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def give_up(self) -> None:
        self.given_up += 1
