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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ..orders import Answers, Fetch, Record
from .epoch import Epoch
from .jobs import Rest
from .prefill import PrefillRate

if TYPE_CHECKING:
    from kvcache._native import Slab

logger = init_logger("vllm.kvcache")

MOST_LOST = 0.05
"""The part of the time to compute what it lacks that a request may lose by waiting for a disk."""
LEAST_LOST = 0.02
"""The number of seconds that it may lose in any case."""
TRIED = 16
"""One of so many loads is tried although computing was expected to be faster, because the disk may have become faster."""
MOST_LOADING = 64 << 20
"""The number of bytes that may be read at the same time. They occupy memory until they are in the arena."""
MOST_WAITS = 1000
"""The number of times that are kept until somebody takes them."""
POLL = 0.002
"""The number of seconds between two looks at what is being read."""


@dataclass(eq=False)
class Loading:
    """A record that is being read."""

    number: int
    record: Record
    handle: Any
    seconds: float
    """The time to compute it."""
    size: int


@dataclass(eq=False)
class Fetching:
    """A fetch under way."""

    order: Fetch
    since: float
    waiting: list[Loading] = field(default_factory=list)
    """The records that the disk has and that are not being read yet."""
    reading: list[Loading] = field(default_factory=list)
    arrived: list[Loading] = field(default_factory=list)
    """The record that is being copied to host memory."""
    may_lose: float = 0.0
    """The number of seconds that the request may lose by waiting, beyond those that loads save."""
    cost: float = 0.0
    """The number of seconds to compute what the disk has."""
    size: int = 0
    """The number of bytes of what the disk has."""
    unread: float = 0.0
    """The number of these bytes that had not been read at the last look."""
    moved: float = 0.0
    """The time of the last look at which something had been read since the one before."""

    def left(self) -> float:
        """Returns the number of seconds to compute what has not been read."""
        reading = sum(one.seconds * (1 - one.handle.progress) for one in self.reading)
        return reading + sum(one.seconds for one in self.waiting)

    def parts_left(self) -> list[tuple[float, float]]:
        """Returns for each record that has not been read, in order, the bytes that are left and the seconds to compute it."""
        reading = [((1 - one.handle.progress) * one.size, one.seconds) for one in self.reading]
        return reading + [(one.size, one.seconds) for one in self.waiting]

    def look(self, now: float) -> None:
        """Notes whether something has been read since the last look."""
        unread = sum(size for size, _ in self.parts_left())
        if unread < self.unread:
            self.unread, self.moved = unread, now

    def pays(self, waited: float) -> bool:
        """Returns whether the disk, as fast as it was so far, reads the next records sooner than they are computed."""
        left = self.parts_left()
        read = self.size - sum(size for size, _ in left)
        if read <= 0:
            return False
        took = cost = 0.0
        for size, seconds in left:
            took += size * waited / read
            cost += seconds
            if took < cost:
                return True
        return False


class DiskStore:
    """The records of one rank."""

    def __init__(self, slab: Slab, blocks: dict[bool, Any], epoch: Epoch, *, deadline: float, only_faster: bool) -> None:
        self.slab, self.blocks, self.epoch = slab, blocks, epoch
        """``blocks`` are the native records for each arena, by whether it is that of ordinary prompts."""
        self.deadline, self.only_faster = deadline, only_faster
        self.rest = Rest()
        self.changed = threading.Condition()
        self.stores: deque[tuple[Record, float]] = deque()
        """The records that wait for their copy, with the seconds that computing each took."""
        self.copying: set[tuple[bool, int]] = set()
        """The blocks of host memory that are being copied."""
        self.fetches: list[Fetching] = []
        self.answers: Answers = {}
        self.waits: deque[float] = deque(maxlen=MOST_WAITS)
        """The number of seconds that each fetch took."""
        self.generation = 0
        """The number of resets. What began before one is dropped."""
        self.prefill = PrefillRate()
        self.dropped = self.not_asked = self.skips = 0
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
            one = Fetching(order, time.monotonic())
            answers = self._look_up(one)
            for of_prefix in (False, True):
                self.claim((b for load in one.waiting if load.record.of_prefix == of_prefix for b in load.record.blocks), of_prefix=of_prefix)
            with self.changed:
                if answers:
                    self.answers[order.name] = answers
                if one.waiting:
                    self.fetches.append(one)
                self.changed.notify_all()

    def _look_up(self, one: Fetching) -> dict[int, tuple[int, str | None]]:
        """Adds the records that the disk has to a fetch. Returns the answers for the others."""
        answers: dict[int, tuple[int, str | None]] = {}
        listed: list[Loading] = []
        for number, record in enumerate(one.order.records):
            blocks, name = self.blocks[record.of_prefix], self._name(record)
            if self.rest.is_resting():
                self.not_asked += 1
                answers[number] = (1, "deadline")
                continue
            found = blocks.peek(name)
            if found is None:
                answers[number] = (1, blocks.why_absent(name, record.tokens, text=self._text(record)))
                continue
            size, seconds = found
            listed.append(Loading(number, record, None, self.prefill.cost(len(record.tokens), seconds), size))
        if self._is_slower(listed):
            self.blocks[listed[0].record.of_prefix].count_skipped(len(listed))
            answers.update((load.number, (1, "slower")) for load in listed)
            return answers
        for load in listed:
            if load.record.blocks:
                one.waiting.append(load)
            else:
                answers[load.number] = (1, None)
        one.cost, one.size, one.moved = one.left(), sum(load.size for load in one.waiting), one.since
        one.unread = one.size
        stored = {load.number: load.seconds for load in listed}
        each = enumerate(one.order.records)
        whole = sum(stored.get(number) or self.prefill.cost(len(record.tokens)) for number, record in each)
        one.may_lose = max(MOST_LOST * whole, LEAST_LOST)
        return answers

    def _is_slower(self, listed: list[Loading]) -> bool:
        """Returns whether computing records is expected to end before the disk has read them, and the disk need not be
        tried again."""
        cost = sum(load.seconds for load in listed)
        if not listed or not self.only_faster or not cost:
            return False
        size = self._bytes_reading() + sum(load.size for load in listed)
        expected = self.blocks[listed[0].record.of_prefix].expected(size)
        if expected is None or expected < cost:
            return False
        self.skips += 1
        return self.skips % TRIED != 0

    def take_answers(self, seconds: float = 0.0) -> Answers:
        """Returns what became of records since the last call. Waits up to ``seconds`` seconds for the first answer, if
        something is being fetched.
        """
        with self.changed:
            if seconds and self.fetches and not self.answers:
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
            self.fetches.clear()
            self.answers.clear()
            self.changed.wait_for(lambda: not self.copying)
        self.epoch.forget(self.deadline)

    def usage(self) -> dict[str, int]:
        """Returns what the disk contains, and what it has done, by name."""
        usage = self.slab.usage()
        own = {"stores_dropped": self.dropped, "deadline_exceeded": self.not_asked, "misses": self.not_asked}
        return {name: value + own.get(name, 0) for name, value in usage.items()}

    def take_waits(self) -> list[float]:
        """Returns the number of seconds that each fetch took which has ended since the last call."""
        with self.changed:
            taken = list(self.waits)
            self.waits.clear()
        return taken

    def is_busy(self) -> bool:
        """Returns whether something is being copied or fetched."""
        return bool(self.stores or self.copying or self.fetches)

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
                self.changed.wait_for(lambda: self.stores or self.fetches or self.closed)
                if self.closed and not self.stores:
                    return
                fetches, store = list(self.fetches), None
                if self.stores:
                    store = self.stores.popleft()
                    # Until the copy ends, nobody overwrites the blocks.
                    self.copying = _places(store[0])
                generation = self.generation
            if store is not None:
                self._copy_out(*store)
            ended = [self._advance(one, generation) for one in fetches]
            if fetches and store is None and not any(ended):
                self._wait(fetches)

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

    def _wait(self, fetches: list[Fetching]) -> None:
        reading = next((load for one in fetches for load in one.reading), None)
        if reading is not None:
            reading.handle.wait(POLL)
        else:
            time.sleep(POLL)

    def _advance(self, one: Fetching, generation: int) -> bool:
        """Starts what a fetch waits for, and takes what has arrived. Returns whether something has."""
        progress = False
        try:
            self._start(one)
            for load in [load for load in one.reading if load.handle.is_over]:
                progress = True
                # The disk reads the next records while this one is copied.
                one.arrived.append(load)
                one.reading.remove(load)
                self._start(one)
                self._take(one, load, generation)
                one.arrived.remove(load)
            self._give_up(one, generation)
        except Exception as error:  # A fetch without an answer would make its request wait for ever.
            logger.error("records could not be fetched from the disk: %s", error)
            self._end(one, "failed", generation)
        if not one.reading and not one.waiting:
            with self.changed:
                if one in self.fetches:
                    self.fetches.remove(one)
                    self.waits.append(time.monotonic() - one.since)
            return True
        return progress

    def _start(self, one: Fetching) -> None:
        while one.waiting and (not (busy := self._bytes_reading()) or busy + one.waiting[0].size <= MOST_LOADING):
            load, record = one.waiting[0], one.waiting[0].record
            load.handle = self.blocks[record.of_prefix].begin_load(self._name(record), record.tokens, record.start)
            one.reading.append(one.waiting.pop(0))

    def _bytes_reading(self) -> int:
        return sum(load.size for one in list(self.fetches) for load in list(one.reading))

    def _take(self, one: Fetching, load: Loading, generation: int) -> None:
        """Writes a record that has arrived to host memory."""
        with self.changed:
            if self.generation != generation:
                return
            # Until the copy ends, a reset waits.
            self.copying = _places(load.record)
        try:
            reason = load.handle.end(load.record.blocks)
        finally:
            self._copied()
        self._answer(one, load, reason, generation)

    def _give_up(self, one: Fetching, generation: int) -> None:
        """Gives up the rest of a fetch if waiting costs more than it may."""
        if not one.reading and not one.waiting:
            return
        now = time.monotonic()
        waited, most = now - one.since, self.deadline
        one.look(now)
        if self.only_faster and one.cost:
            # If the request stopped waiting now, it would compute what is left.
            most = min(most, one.cost - one.left() + one.may_lose)
            # A record that has been read in part is lost, so a disk that is too slow is given up as soon as that is known.
            if waited >= one.may_lose and not one.pays(waited):
                most = 0.0
        if waited >= most:
            if waited >= self.deadline and now - one.moved >= self.deadline / 2:
                self.rest.begin()
            self._end(one, "deadline", generation)

    def _end(self, one: Fetching, reason: str, generation: int) -> None:
        """Ends a fetch. Nobody waits for the rest any more."""
        for load in one.reading:
            load.handle.give_up()
        self.not_asked += len(one.waiting)
        for load in (*one.arrived, *one.reading, *one.waiting):
            self._answer(one, load, reason, generation)
        for loads in (one.arrived, one.reading, one.waiting):
            loads.clear()

    def _answer(self, one: Fetching, load: Loading, reason: str | None, generation: int) -> None:
        with self.changed:
            if self.generation == generation:
                self.answers.setdefault(one.order.name, {})[load.number] = (1, reason)
                self.changed.notify_all()


def _places(record: Record) -> set[tuple[bool, int]]:
    return {(record.of_prefix, block) for block in record.blocks}
