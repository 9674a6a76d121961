"""The chunk cache, and the pieces on their way to it.

```text
  acquire ── all pieces are held
     │  ├─── a piece is missing: an encode computes it ──► stored, and handed to everyone who waits for it
     │  └─── another request's encode computes it ──────────▲
     └────── no room: queue ──► the requests that hold rows let go ──► acquire again, or go without
```

Every wait has an end. A stored piece is handed to the requests that wait for it, so it cannot be evicted before
they hold it. In the queue for room, only the first request asks again, and only until the requests have let go
that held rows when its wait began. A request in the queue holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from kvcache import ChunkCacheConfig, ChunkCacheManager, ChunkReservation, PieceHold

from .requests import ChunkState, Encode, Outcome, RoomWait, Work

Part = tuple[str, list[int], list[int], int]
"""A part to look up: its mode, the tokens that it sees before its own, its own tokens, and the position of its
first key.
"""


class Found(Enum):
    """The result of a lookup."""

    HELD = auto()
    WAITS = auto()
    NO_ROOM = auto()
    """There is no room, and nothing to wait for."""


class Pieces:
    """The pieces of chunks: stored ones, and ones that encodes compute."""

    def __init__(self, config: ChunkCacheConfig, num_blocks: int, block_size: int) -> None:
        self.cache = ChunkCacheManager(config, num_blocks, block_size)
        self.num_blocks = num_blocks
        self.under_way: dict[bytes, Work] = {}
        """The pieces that encodes compute, by hash."""
        self.encodes: set[Encode] = set()
        self.states: set[ChunkState] = set()
        """The requests that hold rows."""
        self.queue: list[ChunkState] = []
        """The requests that wait for room."""
        self.changes = 0
        """The number of times that rows may have been let go."""

    # Decision: docs/decisions/vllm.md#a-stored-piece-is-handed-to-its-waiters
    def acquire(self, state: ChunkState, part: Callable[[int], Part], encode: Callable[[int, list[Work]], Encode]) -> Found:
        """Holds the parts of a request that it does not hold yet, or waits for their missing pieces.

        ``part`` returns a part by its number. ``encode`` starts the encode of a part's missing pieces.
        """
        numbers = [number for number in state.wanted() if number not in state.pieces]
        if not numbers:
            return Found.HELD if state.is_held() else Found.WAITS
        if not self._may_ask(state):
            return self._wait_for_room(state)
        if state.room is not None and state.room.seen == self.changes and not state.room.was_over:
            return Found.WAITS
        parts = [part(number) for number in numbers]
        outcomes = self.cache.acquire_all(state.root, parts)
        if any(one is None for pieces in outcomes for one in pieces):
            _give_back(outcomes)
            if self.blocks_of(state, part) > self.num_blocks:
                self.let_go(state)
                return Found.NO_ROOM
            return self._wait_for_room(state)
        self._leave_queue(state)
        self.states.add(state)
        for number, pieces in zip(numbers, outcomes):
            self._add(state, number, pieces, encode)
        return Found.HELD if state.is_held() else Found.WAITS

    def _add(self, state: ChunkState, number: int, outcomes: list[Outcome], encode: Callable[[int, list[Work]], Encode]) -> None:
        """Adds a part that was looked up to a request's pieces."""
        pieces: list[PieceHold | Work] = []
        missing, start = [], 0
        for outcome in outcomes:
            if isinstance(outcome, PieceHold):
                pieces.append(outcome)
                start += outcome.num_tokens
                continue
            key = outcome.chunk_hash.hash_bytes
            if isinstance(outcome, ChunkReservation):
                missing.append(Work(start, outcome))
                self.under_way[key] = missing[-1]
            # Any other outcome means that an encode computes the piece.
            work = self.under_way[key]
            work.waiters.append((state, number, len(pieces)))
            pieces.append(work)
            start += work.reservation.num_tokens
        state.pieces[number] = pieces
        if missing:
            self.encodes.add(encode(number, missing))

    def stored(self, encode: Encode) -> None:
        """Stores the pieces of an encode, and hands them to the requests that wait for them."""
        self._end(encode)
        for work in encode.pieces:
            if not encode.state.is_served:
                encode.state.computed[work.key] = work.reservation.num_tokens
            _hand_over(work)

    def fetched(self, encode: Encode, work: Work) -> None:
        """Stores a piece of an encode that came from a disk, and hands it to the requests that wait for it. Ends the
        encode if it was the last one."""
        if encode.pieces == [work]:
            self._end(encode)
        else:
            encode.pieces.remove(work)
            del self.under_way[work.key]
        _hand_over(work)

    def abandon(self, encode: Encode) -> set[ChunkState]:
        """Frees the memory of an encode's pieces. Returns the requests that waited for them, which will ask
        again."""
        self._end(encode)
        waited = set()
        for work in encode.pieces:
            work.reservation.abandon()
            for state, number, _ in list(work.waiters):
                state.drop([number])
                waited.add(state)
        return waited

    def _end(self, encode: Encode) -> None:
        self.changes += 1
        encode.is_over = True
        self.encodes.discard(encode)
        for work in encode.pieces:
            del self.under_way[work.key]

    def let_go(self, state: ChunkState) -> None:
        """Lets all pieces of a request go. If the request needs them again, it asks again."""
        self._drop_all(state)
        self._leave_queue(state)

    def reset(self) -> list[Encode]:
        """Forgets all pieces, also the held ones. Returns the encodes that were under way, which are over."""
        encodes = list(self.encodes)
        for encode in encodes:
            self.abandon(encode)
        for state in list(self.states):
            self.let_go(state)
        self.cache.clear_cache()
        return encodes

    # Room.

    def blocks_of(self, state: ChunkState, part: Callable[[int], Part]) -> int:
        """Returns the number of blocks that a request's pieces take."""
        pieces: dict[bytes, int] = {}
        for number in state.wanted():
            if number not in state.sizes:
                hashes = self.cache.compute_chunk_hash(state.root, *part(number)[:3])
                state.sizes[number] = {one.hash_bytes: one.num_blocks for one in hashes}
            pieces |= state.sizes[number]
        return sum(pieces.values())

    def _may_ask(self, state: ChunkState) -> bool:
        return not self.queue or self.queue[0] is state

    def _drop_all(self, state: ChunkState) -> None:
        self.changes += bool(state.pieces)
        state.drop(list(state.pieces))
        self.states.discard(state)

    def _wait_for_room(self, state: ChunkState) -> Found:
        self._drop_all(state)
        if state not in self.queue:
            self.queue.append(state)
        if not self._may_ask(state):
            return Found.WAITS
        if state.room is None:
            state.room = RoomWait(set(self.states), set(self.encodes))
        elif state.room.was_over:
            self._leave_queue(state)
            return Found.NO_ROOM
        # If everything has ended by now, the next lookup is the last one.
        state.room.look(self.changes)
        return Found.WAITS

    def _leave_queue(self, state: ChunkState) -> None:
        state.room = None
        if state in self.queue:
            self.queue.remove(state)


def _hand_over(work: Work) -> None:
    hold = work.reservation.store()
    for state, number, index in work.waiters:
        state.pieces[number][index] = hold.share()
    hold.release()


def _give_back(outcomes: list[list[Outcome]]) -> None:
    """Releases everything that a lookup has taken."""
    for outcome in (one for pieces in outcomes for one in pieces):
        if isinstance(outcome, PieceHold):
            outcome.release()
        elif isinstance(outcome, ChunkReservation):
            outcome.abandon()
