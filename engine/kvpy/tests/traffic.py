"""What the tests with random requests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def finish(engine: Any, step: Callable[[], None]) -> None:
    """Takes steps until every request has ended. Fails if some of them do not."""
    for _ in range(8_000):
        if not engine.requests:
            return
        step()
    raise AssertionError(f"{sorted(engine.requests)} have not ended")
