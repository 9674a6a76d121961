"""The jobs of a ``SlabTier``. One thread loads and one stores, and the scheduler never waits for either."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .loads import JobLoads
from .reads import Rest

if TYPE_CHECKING:
    from kvcache._native import Slab

    from .prefill import PrefillRate
    from .settings import SlabSettings

MOST_WAITING = 256 << 20
"""The number of bytes that may wait to be written. While they wait, they occupy host memory of vLLM."""


@dataclass(eq=False)
class Job:
    """Blocks to load or to store. ``names[i]`` is the block in the row ``rows[i]`` of vLLM's host memory."""

    number: int
    names: list[bytes]
    rows: list[int]
    tokens: list[int]
    """The number of tokens that each block adds to those before it."""
    is_load: bool
    request: str
    lacks: int = 0
    """For a load, the number of tokens that the request lacks."""
    costs: list[float] = field(default_factory=list)
    """For a store, the number of seconds that computing each block took, or 0."""
    submitted: float = field(default_factory=time.monotonic)
    done: list[bytes] = field(default_factory=list)
    """The blocks that were loaded or stored."""
    reason: str | None = None
    """The reason why the other blocks were not."""
    is_slower: bool = False
    """Whether nothing was loaded because computing is faster."""
    seconds: float = 0.0


class Stores:
    """The thread that stores, one job after another."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.waiting: deque[Job | Callable[[], object]] = deque()
        self.rest = Rest()
        self.given_up = False
        self.thread = threading.Thread(target=self.run, name="kvcache-disk-store", daemon=True)

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
                self.jobs.store(job)
            except Exception as error:  # A thread that ended would leave all later jobs without a result.
                job.reason = f"{type(error).__name__}: {error}"
        job.seconds = time.monotonic() - began
        self.jobs.ended(job)


class Jobs:
    """The jobs of a tier. Every job ends: a disk that does not answer makes it fail."""

    def __init__(self, slab: Slab, table: Any, row_bytes: int, settings: SlabSettings, prefill: PrefillRate) -> None:
        self.slab, self.table, self.row_bytes = slab, table, row_bytes
        self.settings, self.prefill = settings, prefill
        self.changed = threading.Condition()
        self.finished: deque[Job] = deque()
        self.running = 0
        self.bytes_waiting = 0
        self.blocks_refused = 0
        self.closed = False
        self.loads, self.stores = JobLoads(self), Stores(self)
        self.loads.thread.start()
        self.stores.thread.start()

    def submit(self, job: Job) -> None:
        size = 0 if job.is_load else len(job.names) * self.row_bytes
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
            (self.loads if job.is_load else self.stores).waiting.append(job)
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
        """Ends both threads. Loads fail; stores may take ``write_deadline`` seconds."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.stores.thread.join(self.settings.write_deadline)
        self.stores.given_up = True
        self.stores.thread.join()
        self.loads.thread.join()

    def store(self, job: Job) -> None:
        """Writes the blocks of a job, and waits for the disk."""
        began, deadline = time.monotonic(), self.settings.write_deadline
        stored = self.slab.store(job.names, self.table, job.rows, deadline=deadline, costs=job.costs)
        job.done = [name for name, is_stored in zip(job.names, stored, strict=True) if is_stored]
        if len(job.done) < len(job.names):
            job.reason = "the disk refused, or has no room"
            if time.monotonic() - began >= deadline:
                job.reason = "the disk did not answer in time"
                self.stores.rest.begin()
        self.slab.touch(job.names[::-1])
