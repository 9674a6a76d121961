"""A lightweight profiler: times of named spans, and counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class TimingStats:
    """The times recorded under one name, in seconds."""

    name: str
    total_time: float = 0.0
    count: int = 0
    min_time: float = 0.0
    max_time: float = 0.0

    @property
    def avg_time(self) -> float:
        """The average time; 0 before the first span."""
        return self.total_time / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        self.min_time = min(self.min_time, seconds) if self.count else seconds
        self.max_time = max(self.max_time, seconds)
        self.total_time += seconds
        self.count += 1


class SimpleProfiler:
    """Records times of named spans, and counters. Threads may share it. Does nothing unless ``enabled``.

    >>> profiler = SimpleProfiler()
    >>> with profiler.record("prefill"):
    ...     profiler.increment("tokens", 512)
    >>> profiler.summary()["prefill"]["count"], profiler.summary()["tokens"]["value"]
    (1, 512)
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._lock = threading.Lock()
        self._timings: dict[str, TimingStats] = {}
        self._counters: dict[str, int] = {}

    @contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Adds the block's time to a span, even if the block raises. An outer span's time includes inner
        ones.
        """
        if not self.enabled:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            with self._lock:
                self._timings.setdefault(name, TimingStats(name)).add(took)

    def increment(self, name: str, value: int = 1) -> None:
        """Adds ``value`` to a counter, which starts at 0."""
        if self.enabled:
            with self._lock:
                self._counters[name] = self._counters.get(name, 0) + value

    def summary(self) -> dict[str, dict[str, float]]:
        """Returns spans and counters by name: a span's ``count``, and ``total_time``, ``min_time``,
        ``max_time`` and ``avg_time`` in seconds; a counter's ``value``.
        """
        with self._lock:
            found: dict[str, dict[str, float]] = {}
            for name, stats in self._timings.items():
                found[name] = {key: getattr(stats, key) for key in ("total_time", "count", "min_time", "max_time", "avg_time")}
            for name, value in self._counters.items():
                found.setdefault(name, {})["value"] = value
        return found

    def print_summary(self) -> None:
        """Prints the spans, the longest total first, and then the counters."""
        found = self.summary()
        rows = [("span", "count", "total ms", "avg ms", "min ms", "max ms")]
        spans = sorted(((name, row) for name, row in found.items() if "count" in row), key=lambda span: -span[1]["total_time"])
        for name, row in spans:
            times = (f"{1e3 * row[key]:.3f}" for key in ("total_time", "avg_time", "min_time", "max_time"))
            rows.append((name, str(row["count"]), *times))  # type: ignore[arg-type]
        counters = [("counter", "value"), *((name, str(row["value"])) for name, row in found.items() if "value" in row)]
        for table in (rows, counters):
            if len(table) == 1:
                continue
            widths = [max(map(len, column)) for column in zip(*table)]
            for name, *cells in table:
                print("  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:]))]))

    def reset(self) -> None:
        """Forgets all spans and counters."""
        with self._lock:
            self._timings.clear()
            self._counters.clear()
