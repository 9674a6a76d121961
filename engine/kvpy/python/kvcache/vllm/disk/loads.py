"""The thread of a ``SlabTier`` that loads: the blocks of several requests at a time, as long as that pays."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .reads import Fetching, Load, Reads

if TYPE_CHECKING:
    from .jobs import Job, Jobs


@dataclass(eq=False)
class RowLoad(Load):
    """A block that is being read."""

    name: bytes
    row: int


class JobFetch(Fetching[RowLoad]):
    """The loads of one job."""

    def __init__(self, job: Job, loads: list[RowLoad], whole: float) -> None:
        super().__init__(loads, whole, job.submitted)
        self.job = job
        self.reasons: Counter[str] = Counter()


class JobLoads:
    """The jobs that load."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.waiting: deque[Job] = deque()
        settings = jobs.settings
        only_faster = settings.loads == "if-faster"
        self.reads: Reads[RowLoad] = Reads(self, deadline=settings.read_deadline, only_faster=only_faster, is_for_each=True)
        self.thread = threading.Thread(target=self.run, name="kvcache-disk-load", daemon=True)

    def run(self) -> None:
        jobs = self.jobs
        while True:
            with jobs.changed:
                jobs.changed.wait_for(lambda: self.waiting or self.reads.fetches or jobs.closed)
                new, closed = list(self.waiting), jobs.closed
                self.waiting.clear()
            if closed:
                for job in new:
                    self._refuse(job, "vLLM ends")
                for one in list(self.reads.fetches):
                    self.reads.end(one, "vLLM ends")
                return
            for job in new:
                self._begin(job)
            fetches = list(self.reads.fetches)
            progress = [self._advance(one) for one in fetches]
            if fetches and not any(progress):
                self.reads.wait(fetches)

    def _begin(self, job: Job) -> None:
        if self.reads.rest.is_resting():
            self._refuse(job, "the disk has not answered in time, and is left alone for a while")
            return
        try:
            loads = [self._load(*each) for each in zip(job.names, job.rows, job.tokens, strict=True)]
            is_slower = self.reads.is_slower(loads, self.jobs.slab.expected)
            if is_slower:
                self.jobs.slab.count_skipped(len(loads))
        except Exception as error:
            self._refuse(job, f"{type(error).__name__}: {error}")
            return
        if is_slower:
            job.is_slower = True
            self._refuse(job, "computing them is faster")
            return
        fetch = JobFetch(job, loads, max(self.jobs.prefill.cost(job.lacks), sum(load.seconds for load in loads)))
        self.reads.add(fetch)
        if fetch.is_over():
            self.reads.end(fetch, "there are none")

    def _load(self, name: bytes, row: int, tokens: int) -> RowLoad:
        # A block that has left since is loaded all the same, so that it counts as a miss.
        size, stored = self.jobs.slab.peek(name) or (0, 0.0)
        return RowLoad(self.jobs.prefill.cost_of_stored(tokens, stored), size, name, row)

    def _refuse(self, job: Job, reason: str) -> None:
        job.reason = reason
        self._end(job)

    def _end(self, job: Job) -> None:
        job.seconds = time.monotonic() - job.submitted
        self.jobs.ended(job)

    def _advance(self, one: Fetching[RowLoad]) -> bool:
        try:
            return self.reads.advance(one)
        except Exception as error:  # A thread that ended would leave all later jobs without a result.
            self.reads.end(one, f"{type(error).__name__}: {error}")
            return True

    # Calls of the reads.

    def begin(self, load: RowLoad) -> Any:
        return self.jobs.slab.begin_load(load.name)

    def take(self, fetch: JobFetch) -> None:
        for load, reason in fetch.taken(lambda load: load.handle.end(self.jobs.table, load.row)):
            self.answer(fetch, load, reason)

    def answer(self, fetch: JobFetch, load: RowLoad, reason: str | None) -> None:
        if reason is None:
            fetch.job.done.append(load.name)
        else:
            fetch.reasons[reason] += 1

    def ended(self, fetch: JobFetch) -> None:
        done = set(fetch.job.done)
        fetch.job.done = [name for name in fetch.job.names if name in done]
        fetch.job.reason = ", ".join(f"{count} {reason}" for reason, count in fetch.reasons.items()) or None
        self._end(fetch.job)
