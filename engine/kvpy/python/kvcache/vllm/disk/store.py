"""A rank's records on a disk: copies of its host memory that survive the process.

```text
  saved to host memory ──► store: waits for its copy ──► the slab's queue ──► written     the step does not wait
  fetch ── not on the disk, or computing is faster ──────────────────────► answered at once
     └──── being read ── arrived ──► written to host memory ─────────────► answered
                └─────── giving up costs too much ───────────────────────► answered: deadline
```

One thread copies. Everything that a step calls returns at once, however the disk behaves. Only ``claim`` and ``forget``
wait, for a copy in memory that is running.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ..orders import Answers, Fetch, Record
from .epoch import Epoch
from .prefill import PrefillRate
from .reads import Fetching, Load, Reads

if TYPE_CHECKING:
    from kvcache._native import Slab

logger = init_logger("vllm.kvcache")

MOST_WAITS = 1000
"""The number of times that are kept until somebody takes them."""

@dataclass(eq=False)
class Loading(Load):
    """A record that is being read."""

    number: int
    record: Record


class RankFetch(Fetching[Loading]):
    """A fetch under way. What began before a reset is dropped."""

    def __init__(self, order: Fetch, loads: list[Loading], whole: float, since: float, generation: int) -> None:
        super().__init__(loads, whole, since)
        self.order, self.generation = order, generation


class DiskStore:
    """The records of one rank."""

    def __init__(self, slab: Slab, blocks: dict[bool, Any], epoch: Epoch, *, deadline: float, only_faster: bool) -> None:
        self.slab, self.blocks, self.epoch = slab, blocks, epoch
        """``blocks`` are the native records for each arena, by whether it is that of ordinary prompts."""
        self.deadline = deadline
        self.reads: Reads[Loading] = Reads(self, deadline=deadline, only_faster=only_faster)
        self.changed = threading.Condition()
        self.stores: deque[tuple[Record, float]] = deque()
        """The records that wait for their copy, with the seconds that computing each took."""
        self.copying: set[tuple[bool, int]] = set()
        """The blocks of host memory that are being copied."""
        self.answers: Answers = {}
        self.waits: deque[float] = deque(maxlen=MOST_WAITS)
        """The number of seconds that each fetch took."""
        self.generation = 0
        """The number of resets. What began before one is dropped."""
        self.prefill = PrefillRate()
        self.dropped = self.not_asked = 0
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="kvcache-disk", daemon=True)
        self.thread.start()

    # Calls of a step.

    def store(self, records: Iterable[Record]) -> None:
        """Has records copied and written. Their blocks are in host memory."""
        with self.changed:
            self.stores.extend((record, self.prefill.cost(len(record.tokens))) for record in records)
            self.changed.notify_all()

    # Decision: docs/decisions/vllm.md#host-memory-is-copied-for-the-disk-by-a-thread
    def claim(self, blocks: Iterable[int], *, of_prefix: bool) -> None:
        """Must be called before blocks of host memory are overwritten. What is not copied by then is not stored."""
        claimed = {(of_prefix, block) for block in blocks}
        with self.changed:
            kept = [one for one in self.stores if claimed.isdisjoint(_places(one[0]))]
            if len(kept) < len(self.stores):
                self.dropped += len(self.stores) - len(kept)
                self.stores = deque(kept)
            self.changed.wait_for(lambda: claimed.isdisjoint(self.copying))

    # Decision: docs/decisions/vllm.md#what-host-memory-finds-is-renewed-on-the-disk
    def use(self, used: Iterable[tuple[bool, list[bytes]]]) -> None:
        """Makes records that were found in host memory the last ones to leave the disk."""
        for of_prefix, keys in used:
            self.blocks[of_prefix].touch([self._key(of_prefix, key) for key in keys])

    def fetch(self, orders: Iterable[Fetch]) -> None:
        """Starts to fetch records. ``take_answers`` says what became of them."""
        for order in orders:
            one, answers = self._look_up(order)
            for of_prefix in (False, True):
                self.claim((b for load in one.waiting if load.record.of_prefix == of_prefix for b in load.record.blocks), of_prefix=of_prefix)
            with self.changed:
                if answers:
                    self.answers[order.name] = answers
                if one.waiting:
                    self.reads.add(one)
                self.changed.notify_all()

    def _look_up(self, order: Fetch) -> tuple[RankFetch, dict[int, tuple[int, str | None]]]:
        """Returns a fetch of the records that the disk has, and the answers for the others."""
        since = time.monotonic()
        answers: dict[int, tuple[int, str | None]] = {}
        listed: list[Loading] = []
        for number, record in enumerate(order.records):
            blocks, name = self.blocks[record.of_prefix], self._name(record)
            if self.reads.rest.is_resting():
                self.not_asked += 1
                answers[number] = (1, "deadline")
                continue
            found = blocks.peek(name)
            if found is None:
                answers[number] = (1, blocks.why_absent(name, record.tokens, text=self._text(record)))
                continue
            size, seconds = found
            listed.append(Loading(self.prefill.cost_of_stored(len(record.tokens), seconds), size, number, record))
        loads = [load for load in listed if load.record.blocks]
        if self.reads.is_slower(listed, self.slab.expected):
            self.slab.count_skipped(len(listed))
            answers.update((load.number, (1, "slower")) for load in listed)
            loads = []
        else:
            answers.update((load.number, (1, None)) for load in listed if not load.record.blocks)
        stored = {load.number: load.seconds for load in listed}
        each = enumerate(order.records)
        whole = sum(stored.get(number) or self.prefill.cost(len(record.tokens)) for number, record in each)
        return RankFetch(order, loads, whole, since, self.generation), answers

    def take_answers(self, seconds: float = 0.0) -> Answers:
        """Returns what became of records since the last call. Waits up to ``seconds`` seconds for the first answer, if
        something is being fetched.
        """
        with self.changed:
            if seconds and self.reads.fetches and not self.answers:
                self.changed.wait(seconds)
            taken, self.answers = self.answers, {}
        return taken

    def measured(self, tokens: int, seconds: float) -> None:
        """Notes how long a step took to compute this many tokens."""
        self.prefill.measured(tokens, seconds)

    # Decision: docs/decisions/vllm.md#a-reset-is-an-epoch-of-the-records
    def forget(self) -> None:
        """Forgets everything that was stored so far, also after a restart, and gives up what is under way."""
        with self.changed:
            self.generation += 1
            self.stores.clear()
            self.reads.clear()
            self.answers.clear()
            self.changed.wait_for(lambda: not self.copying)
        self.epoch.forget(self.deadline)

    def usage(self) -> dict[str, int]:
        """Returns what the disk contains, and what it has done, by name."""
        usage = self.slab.usage()
        not_asked = self.not_asked + self.reads.not_asked
        own = {"stores_dropped": self.dropped, "deadline_exceeded": not_asked, "misses": not_asked}
        return {name: value + own.get(name, 0) for name, value in usage.items()}

    def take_times(self) -> dict[str, list[float]]:
        """Returns the seconds that each fetch, each load of a record and each batch of writes took which has ended since
        the last call, by name.
        """
        with self.changed:
            waits = list(self.waits)
            self.waits.clear()
        return {"wait_seconds": waits, **self.slab.take_times()}

    def is_busy(self) -> bool:
        """Returns whether something is being copied or fetched."""
        return bool(self.stores or self.copying or self.reads.fetches)

    def close(self, deadline: float) -> None:
        """Copies and writes what waits. Gives up after ``deadline`` seconds."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join(deadline)
        if not self.slab.close(deadline=deadline):
            logger.warning("the disk did not take its last records in %s s", deadline)

    # The thread.

    def _name(self, record: Record) -> bytes:
        return self._key(record.of_prefix, record.key)

    def _key(self, of_prefix: bool, key: bytes) -> bytes:
        return self.epoch.current + bytes([of_prefix]) + key

    def _text(self, record: Record) -> bytes | None:
        return self.epoch.current if record.is_public else None

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.stores or self.reads.fetches or self.closed)
                if self.closed and not self.stores:
                    return
                fetches, store = list(self.reads.fetches), None
                if self.stores:
                    store = self.stores.popleft()
                    # Until the copy ends, nobody overwrites the blocks.
                    self.copying = _places(store[0])
            if store is not None:
                self._copy_out(*store)
            ended = [self._advance(one) for one in fetches]
            if fetches and store is None and not any(ended):
                self.reads.wait(fetches)

    def _copy_out(self, record: Record, seconds: float) -> None:
        parent = None if record.parent is None else self._key(record.of_prefix, record.parent)
        try:
            self.blocks[record.of_prefix].store(
                self._name(record), record.tokens, record.start, record.blocks, parent=parent, seconds=seconds, text=self._text(record)
            )
        except Exception as error:  # A record that is not stored is computed again.
            logger.error("a record could not be copied for the disk: %s", error)
            self.dropped += 1
        finally:
            self._copied()

    def _copied(self) -> None:
        with self.changed:
            self.copying = set()
            self.changed.notify_all()

    def _advance(self, one: Fetching[Loading]) -> bool:
        try:
            return self.reads.advance(one)
        except Exception as error:  # A fetch without an answer would make its request wait for ever.
            logger.error("records could not be fetched from the disk: %s", error)
            self.reads.end(one, "failed")
            return True

    # Calls of the reads.

    def begin(self, load: Loading) -> Any:
        record = load.record
        return self.blocks[record.of_prefix].begin_load(self._name(record), record.tokens, record.start)

    def take(self, fetch: RankFetch) -> None:
        """Writes records that have arrived to host memory."""
        with self.changed:
            if self.generation != fetch.generation:
                fetch.arrived.clear()
                return
            # Until the copies end, a reset waits.
            self.copying = {place for load in fetch.arrived for place in _places(load.record)}
        answers: dict[int, tuple[int, str | None]] = {}
        try:
            answers.update((load.number, (1, reason)) for load, reason in fetch.taken(lambda load: load.handle.end(load.record.blocks)))
        finally:
            self._answer(fetch, answers)

    def answer(self, fetch: RankFetch, load: Loading, reason: str | None) -> None:
        self._answer(fetch, {load.number: (1, reason)})

    def _answer(self, fetch: RankFetch, answers: dict[int, tuple[int, str | None]]) -> None:
        with self.changed:
            self.copying = set()
            if answers and self.generation == fetch.generation:
                self.answers.setdefault(fetch.order.name, {}).update(answers)
            self.changed.notify_all()

    def ended(self, fetch: RankFetch) -> None:
        with self.changed:
            self.waits.append(time.monotonic() - fetch.since)


def _places(record: Record) -> set[tuple[bool, int]]:
    return {(record.of_prefix, block) for block in record.blocks}
