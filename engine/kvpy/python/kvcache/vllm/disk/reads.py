"""Loads under way, and how long their requests wait for them: hardly longer than computing takes.

```text
  waiting ── fewer than 64 MiB are being read ──► reading ── the disk has read it ──► taken, answered
     └───────────────┴── waiting longer costs the request too much ───────────────► given up: deadline
```

The owner of the records starts loads, takes what has arrived, and hears the answers. One thread advances all fetches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

MOST_LOST = 0.05
"""The part of the time to compute what it lacks that a request may lose by waiting for a disk."""
LEAST_LOST = 0.05
"""The number of seconds that it may lose where that is a small part of the time, because short waits of a busy process say
nothing about a disk."""
SMALL_PART = 0.1
"""The part of the time to compute what it lacks that is small."""
TRIED = 16
"""One of so many loads is tried although computing was expected to be faster, because the disk may have become faster."""
MOST_LOADING = 64 << 20
"""The number of bytes that may be read at the same time. They occupy memory until they are where they belong."""
POLL = 0.002
"""The number of seconds between two looks at what is being read."""
REST = 10.0
"""Seconds for which nobody asks a disk that has not answered in time."""


class Rest:
    """Leaves a disk alone for a while after it has not answered in time."""

    def __init__(self) -> None:
        self.until = 0.0

    def is_resting(self) -> bool:
        return time.monotonic() < self.until

    def begin(self) -> None:
        self.until = time.monotonic() + REST


@dataclass(eq=False)
class Load:
    """A record that is to be read."""

    seconds: float
    """The time to compute it, or 0 if that is not known."""
    size: int
    """The number of its bytes."""
    handle: Any = field(default=None, init=False)
    """The native load, once it has been started."""

    def unread(self) -> float:
        """Returns the part that has not been read."""
        return 1.0 if self.handle is None else 1.0 - self.handle.progress


L = TypeVar("L", bound=Load)


class Fetching(Generic[L]):
    """The records that one request waits for."""

    def __init__(self, loads: Sequence[L], whole: float, since: float) -> None:
        self.waiting = list(loads)
        """The records that are not being read yet, in the order in which the request needs them."""
        self.reading: list[L] = []
        self.arrived: list[L] = []
        """The records that have been read and are being taken."""
        self.since = since
        self.may_lose = max(MOST_LOST * whole, min(LEAST_LOST, SMALL_PART * whole))
        """The number of seconds that the request may lose by waiting, beyond those that loads save. ``whole`` is what it
        takes to compute everything that the request lacks."""
        self.cost = self.left()
        """The number of seconds to compute what the disk has."""
        self.size = sum(load.size for load in loads)
        self.unread: float = self.size
        """The number of bytes that had not been read at the last look."""
        self.moved = since
        """The time of the last look at which something had been read since the one before."""

    def is_over(self) -> bool:
        return not self.reading and not self.waiting

    def taken(self, end: Callable[[L], str | None]) -> Iterator[tuple[L, str | None]]:
        """Ends the loads that have arrived, and yields each with the reason why it is of no use, or None."""
        while self.arrived:
            reason = end(self.arrived[0])
            yield self.arrived.pop(0), reason

    def left(self) -> float:
        """Returns the number of seconds to compute what has not been read."""
        return sum(load.seconds * load.unread() for load in (*self.reading, *self.waiting))

    def parts_left(self) -> list[tuple[float, float]]:
        """Returns for each record that has not been read, in order, the bytes that are left and the seconds to compute it."""
        return [(load.unread() * load.size, load.seconds) for load in (*self.reading, *self.waiting)]

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


class Owner(Protocol[L]):
    """Those who have the records."""

    def begin(self, load: L) -> Any:
        """Starts to read a record, and returns the native load."""

    def take(self, fetch: Fetching[L]) -> None:
        """Puts the records that have arrived where they belong, and answers."""

    def answer(self, fetch: Fetching[L], load: L, reason: str | None) -> None:
        """Says that a record is there, or the reason why it is not."""

    def ended(self, fetch: Fetching[L]) -> None:
        """Says that all records of a fetch have been answered."""


class Reads(Generic[L]):
    """The fetches under way from one disk."""

    def __init__(self, owner: Owner[L], *, deadline: float, only_faster: bool, is_for_each: bool = False) -> None:
        self.owner, self.deadline, self.only_faster = owner, deadline, only_faster
        self.is_for_each = is_for_each
        """Whether the deadline is that of each record, and not of a whole fetch."""
        self.rest = Rest()
        self.lock = threading.Lock()
        self.fetches: list[Fetching[L]] = []
        self.skips = 0
        """The number of times that computing was expected to be faster."""
        self.not_asked = 0
        """The number of records that were given up before the disk was asked."""

    def is_slower(self, loads: Sequence[L], expected: Callable[[int], float | None]) -> bool:
        """Returns whether computing records is expected to end before the disk has read them, and the disk need not be
        tried again. ``expected`` returns the time in which the disk reads a number of bytes.
        """
        cost = sum(load.seconds for load in loads)
        if not loads or not self.only_faster or not cost:
            return False
        took = expected(self._bytes_reading() + sum(load.size for load in loads))
        if took is None or took < cost:
            return False
        self.skips += 1
        return self.skips % TRIED != 0

    def add(self, fetch: Fetching[L]) -> None:
        with self.lock:
            self.fetches.append(fetch)

    def clear(self) -> None:
        """Forgets all fetches. Their loads are dropped, and nobody hears answers."""
        with self.lock:
            self.fetches.clear()

    def advance(self, one: Fetching[L]) -> bool:
        """Starts what a fetch waits for, and takes what has arrived. Returns whether something has."""
        self._start(one)
        is_over = {load: load.handle.is_over for load in one.reading}
        one.arrived = [load for load, is_read in is_over.items() if is_read]
        one.reading = [load for load, is_read in is_over.items() if not is_read]
        has_progress = bool(one.arrived)
        # The disk reads the next records while these are copied.
        self._start(one)
        if has_progress:
            # Together, because each lock that the step also takes costs a switch of threads.
            self.owner.take(one)
        self._give_up(one)
        return self._end_if_over(one) or has_progress

    def wait(self, fetches: Sequence[Fetching[L]]) -> None:
        """Waits for a moment, or until a record has been read."""
        reading = next((load for one in fetches for load in one.reading), None)
        if reading is not None:
            reading.handle.wait(POLL)
        else:
            time.sleep(POLL)

    def end(self, one: Fetching[L], reason: str) -> None:
        """Ends a fetch. Nobody waits for the rest any more."""
        for load in one.reading:
            load.handle.give_up()
        self.not_asked += len(one.waiting)
        rest = (*one.arrived, *one.reading, *one.waiting)
        for loads in (one.arrived, one.reading, one.waiting):
            loads.clear()
        for load in rest:
            self.owner.answer(one, load, reason)
        self._end_if_over(one)

    def _end_if_over(self, one: Fetching[L]) -> bool:
        if not one.is_over():
            return False
        with self.lock:
            if one not in self.fetches:
                return True
            self.fetches.remove(one)
        self.owner.ended(one)
        return True

    def _start(self, one: Fetching[L]) -> None:
        while one.waiting and (not (busy := self._bytes_reading()) or busy + one.waiting[0].size <= MOST_LOADING):
            one.waiting[0].handle = self.owner.begin(one.waiting[0])
            one.reading.append(one.waiting.pop(0))

    def _bytes_reading(self) -> int:
        with self.lock:
            return sum(load.size for one in self.fetches for load in list(one.reading))

    def _give_up(self, one: Fetching[L]) -> None:
        """Gives up the rest of a fetch if waiting costs more than it may."""
        if one.is_over():
            return
        now = time.monotonic()
        waited, most = now - one.since, self.deadline
        one.look(now)
        if self.is_for_each:
            most += one.moved - one.since
        late = waited >= most
        if self.only_faster and one.cost:
            # If the request stopped waiting now, it would compute what is left. A disk that becomes slower later may cost
            # twice as much as one that is too slow from the start.
            most = min(most, one.cost - one.left() + 2 * one.may_lose)
            # A record that has been read in part is lost, so a disk that is too slow is given up as soon as that is known.
            if waited >= one.may_lose and not one.pays(waited):
                most = 0.0
        if waited >= most:
            if late and now - one.moved >= self.deadline / 2:
                self.rest.begin()
            self.end(one, "deadline")
