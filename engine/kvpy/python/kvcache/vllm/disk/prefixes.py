"""Blocks of ordinary prompts that the disk has and host memory lacks.

```text
  first ask: which blocks does the disk have?  ── none, or computing is faster ──► computed
     └── some ──► room in host memory ──► second ask: load them ──► registered, as if they had been saved
```

The first ask takes no memory, so a new prompt evicts nothing. The request is parked until the answers are there. It asks
once: what it does not get is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvcache import KvCacheError, MutableBlocks, SharedBlocks

from ..orders import Record
from .asks import Asks

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..prefix import Prefixes
    from ..requests import PrefixState


class Phase(Enum):
    ASKED = auto()
    LISTED = auto()
    LOADING = auto()
    DONE = auto()


@dataclass(eq=False)
class PrefixFetch:
    """The blocks of one request that the disk is asked for."""

    request: Request
    first: int
    """The index of the first of these blocks in the request."""
    keys: list[bytes]
    parent: bytes | None
    """The key of the block before them."""
    phase: Phase = Phase.ASKED
    answers: dict[int, str | None] = field(default_factory=dict)
    room: list[MutableBlocks] = field(default_factory=list)
    """The memory for the blocks that are being loaded."""
    reason: str | None = None
    """Why the first block that the disk did not deliver was not delivered."""
    before: SharedBlocks | None = None
    """The blocks before them, which stay until the blocks are registered."""

    def count(self) -> int:
        """Returns how many of the first blocks have been answered with yes."""
        return next((number for number in range(len(self.keys)) if self.answers.get(number, "") is not None), len(self.keys))

    def release(self) -> None:
        """Ends the hold on the blocks before those of the fetch, whose own memory has an owner or is free."""
        self.room.clear()
        if self.before is not None:
            self.before.release()
            self.before = None


class PrefixDisk:
    """Asks the disk for blocks of ordinary prompts."""

    def __init__(self, tier: Prefixes, asks: Asks) -> None:
        self.tier, self.asks = tier, asks
        self.loading: dict[bytes, PrefixFetch] = {}
        """The fetches that load blocks, by the key of each block."""

    def waits(self, request: Request, state: PrefixState, keys: list[bytes], found: SharedBlocks, num_computed: int) -> bool:
        """Returns whether a request must wait for the disk. If it must, ``found`` is no longer the caller's."""
        fetch = state.fetch
        if fetch is None:
            missing = keys[len(found) :]
            if not missing or len(keys) * self.tier.block_size <= num_computed:
                return False
            if missing[0] in self.loading:
                # Another request loads the same blocks.
                found.release()
                return True
            fetch = state.fetch = PrefixFetch(request, len(found), missing, keys[len(found) - 1] if len(found) else None)
            self._ask(fetch, len(missing))
        elif fetch.phase == Phase.LISTED:
            self._load(fetch, found, num_computed)
            if fetch.phase == Phase.LOADING:
                return True
        if fetch.phase == Phase.DONE:
            return False
        found.release()
        return True

    def _ask(self, fetch: PrefixFetch, count: int) -> None:
        """Asks for the first ``count`` blocks: to be loaded, if there is room for them, and else whether they are there."""
        size, tokens = self.tier.block_size, fetch.request.all_token_ids
        records = []
        for number in range(count):
            start = (fetch.first + number) * size
            blocks = list(fetch.room[number].ids) if fetch.room else []
            records.append(Record(fetch.keys[number], list(tokens[start : start + size]), start, blocks, of_prefix=True, is_public=False))
        fetch.answers.clear()

        def answered(number: int, reason: str | None) -> None:
            fetch.answers[number] = reason
            if len(fetch.answers) == count:
                self._answered(fetch)

        self.asks.ask(records, answered)

    def _answered(self, fetch: PrefixFetch) -> None:
        fetch.reason = fetch.answers.get(fetch.count()) or fetch.reason
        if fetch.phase == Phase.ASKED:
            fetch.phase = Phase.LISTED
        elif fetch.phase == Phase.LOADING:
            self._loaded(fetch)

    def _load(self, fetch: PrefixFetch, found: SharedBlocks, num_computed: int) -> None:
        """Has the blocks loaded that the disk has and that vLLM lacks."""
        count, fetch.phase = fetch.count(), Phase.DONE
        # What was found when the request asked first may have been evicted since.
        if len(found) != fetch.first or (fetch.first + count) * self.tier.block_size <= num_computed:
            return
        wanted = fetch.keys[:count]
        if any(key in self.loading for key in wanted):
            wanted = []
        try:
            for _ in wanted:
                fetch.room.append(self.tier.pool.allocate(1))
        except KvCacheError:
            # The beginning is worth having without the rest.
            pass
        if not fetch.room:
            return
        fetch.phase, fetch.before = Phase.LOADING, found
        self.loading.update(dict.fromkeys(wanted[: len(fetch.room)], fetch))
        self.tier.note(fetch.request, wanted[: len(fetch.room)], fetch.first)
        self._ask(fetch, len(fetch.room))

    def _loaded(self, fetch: PrefixFetch) -> None:
        """Registers the blocks that have been loaded, up to the first one that has not."""
        count = fetch.count()
        for number, room in enumerate(fetch.room):
            key = fetch.keys[number]
            self.loading.pop(key, None)
            if number < count:
                parent = fetch.keys[number - 1] if number else fetch.parent
                room.register([key], parent).release()
                self.tier.known.stored(key, [], is_public=False)
            else:
                self.tier.drop(key, room)
        fetch.release()
        fetch.phase = Phase.DONE

    def reset(self) -> None:
        """Gives up all fetches."""
        for fetch in set(self.loading.values()):
            for key, room in zip(fetch.keys, fetch.room):
                self.tier.drop(key, room)
            fetch.release()
        self.loading.clear()

    def records(self, saving: Any) -> list[Record]:
        """Returns a block that is being saved as a record."""
        start = saving.index * self.tier.block_size
        blocks = list(saving.blocks.ids)
        return [Record(saving.key, saving.tokens, start, blocks, of_prefix=True, parent=saving.parent, is_public=False)]
