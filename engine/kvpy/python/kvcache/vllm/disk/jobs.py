"""The threads of a ``SlabTier``: one loads, one stores, and the scheduler never waits for either."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcache._native import Slab

MOST_WAITING = 256 << 20
"""The number of bytes that may wait to be written. While they wait, they occupy host memory of vLLM."""
REST = 10.0
"""Seconds for which nobody asks a disk that has not answered in time."""


@dataclass
class Job:
    """Blocks to load or to store. ``names[i]`` is the block in the row ``rows[i]`` of vLLM's host memory."""

    number: int
    names: list[bytes]
    rows: list[int]
    is_load: bool
    request: str
    done: list[bytes] = field(default_factory=list)
    """The blocks that were loaded or stored."""
    reason: str | None = None
    """The reason why the other blocks were not."""
    seconds: float = 0.0


class Rest:
    """Leaves a disk alone for a while after it has not answered in time."""

    def __init__(self) -> None:
        self.until = 0.0

    def is_resting(self) -> bool:
        return time.monotonic() < self.until

    def begin(self) -> None:
        self.until = time.monotonic() + REST


class Direction:
    """The jobs of one direction, which one thread works on in their order."""

    def __init__(self, name: str, work: Callable[[Job], None], jobs: Jobs) -> None:
        self.work, self.jobs = work, jobs
        self.waiting: deque[Job | Callable[[], object]] = deque()
        self.rest = Rest()
        self.given_up = False
        self.thread = threading.Thread(target=self.run, name=f"kvcache-disk-{name}", daemon=True)
        self.thread.start()

    def run(self) -> None:
        while True:
            with self.jobs.changed:
                self.jobs.changed.wait_for(lambda: self.waiting or self.jobs.closed)
                if not self.waiting:
                    return
                job = self.waiting.popleft()
            if isinstance(job, Job):
                self.end(job)
            else:
                with contextlib.suppress(Exception):  # A block that is not renewed only leaves earlier.
                    job()

    def end(self, job: Job) -> None:
        began = time.monotonic()
        if self.rest.is_resting():
            job.reason = "the disk has not answered in time, and is left alone for a while"
        elif self.given_up:
            job.reason = "vLLM ends"
        else:
            try:
                self.work(job)
            except Exception as error:  # A thread that ended would leave all later jobs without a result.
                job.reason = f"{type(error).__name__}: {error}"
        job.seconds = time.monotonic() - began
        self.jobs.ended(job)


class Jobs:
    """The jobs of a tier. Every job ends: a disk that does not answer makes it fail."""

    def __init__(self, slab: Slab, table: Any, row_bytes: int, read_deadline: float, write_deadline: float) -> None:
        self.slab, self.table, self.row_bytes = slab, table, row_bytes
        self.read_deadline, self.write_deadline = read_deadline, write_deadline
        self.changed = threading.Condition()
        self.finished: deque[Job] = deque()
        self.running = 0
        self.bytes_waiting = 0
        self.blocks_refused = 0
        self.closed = False
        self.loads, self.stores = Direction("load", self._load, self), Direction("store", self._store, self)

    def submit(self, job: Job) -> None:
        direction, size = (self.loads, 0) if job.is_load else (self.stores, len(job.names) * self.row_bytes)
        with self.changed:
            if self.closed:
                job.reason = "vLLM ends"
            elif size and self.bytes_waiting and self.bytes_waiting + size > MOST_WAITING:
                job.reason = "too many blocks wait to be written"
                self.blocks_refused += len(job.names)
            if job.reason is not None:
                self.finished.append(job)
                return
            self.running += 1
            self.bytes_waiting += size
            direction.waiting.append(job)
            self.changed.notify_all()

    def touch(self, positions: dict[bytes, int]) -> None:
        """Renews blocks of a prompt, given with their positions: the last one leaves first. They are renewed after
        all stores that were submitted.
        """
        with self.changed:
            if not self.closed:
                self.stores.waiting.append(lambda: self.slab.touch(sorted(positions, key=positions.__getitem__, reverse=True)))
                self.changed.notify_all()

    def ended(self, job: Job) -> None:
        with self.changed:
            self.running -= 1
            if not job.is_load:
                self.bytes_waiting -= len(job.names) * self.row_bytes
            self.finished.append(job)
            self.changed.notify_all()

    def take_finished(self) -> list[Job]:
        with self.changed:
            taken = list(self.finished)
            self.finished.clear()
            return taken

    def drain(self) -> None:
        """Waits until every job has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.running == 0)

    def close(self) -> None:
        """Ends both threads. Loads that have not begun fail; stores may take ``write_deadline`` seconds."""
        self.loads.given_up = True
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.stores.thread.join(self.write_deadline)
        self.stores.given_up = True
        self.stores.thread.join()
        self.loads.thread.join()

    def _load(self, job: Job) -> None:
        reasons = self.slab.load(job.names, self.table, job.rows, deadline=self.read_deadline)
        job.done = [name for name, reason in zip(job.names, reasons, strict=True) if reason is None]
        counts = Counter(reason for reason in reasons if reason is not None)
        job.reason = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or None
        if "late" in reasons:
            self.loads.rest.begin()

    def _store(self, job: Job) -> None:
        began = time.monotonic()
        stored = self.slab.store(job.names, self.table, job.rows, deadline=self.write_deadline)
        job.done = [name for name, is_stored in zip(job.names, stored, strict=True) if is_stored]
        if len(job.done) < len(job.names):
            job.reason = "the disk refused, or has no room"
            if time.monotonic() - began >= self.write_deadline:
                job.reason = "the disk did not answer in time"
                self.stores.rest.begin()
        self.slab.touch(job.names[::-1])
