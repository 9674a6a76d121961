"""The tier for ordinary prompts: blocks in host memory, which are still found after vLLM has freed its own.

```text
  a step fills blocks of a request ── known? ── no ──► saved at the end of the step ──► registered under their keys
  vLLM finds fewer blocks of a prompt than the tier ──► the rest is copied in, in parallel with a step, as chunks are
```

A block has the rows of all layers, also if vLLM keeps a table of blocks for each kind of layers. Its key covers every
token before it, the model, an adapter and the client's salt. Requests with chunks neither save nor find blocks here,
because their attention, and so their bytes, differ.

With a disk, a request that is looked up first asks it for the blocks that host memory lacks.

A prompt is only found from its first block on. The pool therefore evicts the last block of a prompt first, a block
is dropped if the block before it is gone, and whoever finds or adds to a prompt renews all of its blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvcache import BlockPool, KvCacheError, MutableBlocks, prefix_keys

from .disk.asks import Asks
from .disk.prefixes import PrefixDisk
from .events import TierEvents
from .host import Geometry, Roots, Settings
from .missed import Known, combined
from .orders import Load, Record, Save, Tables, runs_of, writable
from .requests import BlockSaving, PrefixState, Saving, Tracked

if TYPE_CHECKING:
    from vllm.v1.request import Request

SAVE = "kvcache-prefix-"


class NoPrefixes:
    """The tier of a host that has no memory for prefixes. It saves and finds nothing."""

    def matched(self, tracked: Tracked, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def load(self, tracked: Tracked, tables: Tables, count: int) -> Load:
        raise AssertionError("nothing was found that could be loaded")

    def saves(self, tracked: Tracked, count: int) -> Sequence[Saving]:
        return ()

    def records(self, saving: Saving) -> list[Record]:
        return []

    def ended(self, tracked: Tracked) -> dict[str, Any] | None:
        return None

    def take_events(self) -> Iterable[Any]:
        return ()

    def copied(self, tracked: Tracked) -> None:
        return

    def bar(self, tracked: Tracked) -> None:
        return

    def reset(self) -> None:
        return

    def counts(self) -> tuple[dict[str, int], dict[str, float]]:
        return {}, {}


class Prefixes:
    """The blocks in host memory: the requests that find them, and the blocks being saved."""

    def __init__(
        self, shape: Geometry, settings: Settings, roots: Roots, host: Any, events: TierEvents | None, asks: Asks | None = None
    ) -> None:
        self.disk = PrefixDisk(self, asks) if asks is not None else None
        # Each step can store and evict every block once.
        kept_events = 4 * shape.prefix_blocks if events is not None else 0
        self.pool = BlockPool(shape.prefix_blocks, policy=settings.cache_policy, events=kept_events)
        self.events = events
        self.block_size = shape.engine_block_size
        self.roots, self.host = roots, host
        self.known = Known()
        self.saving: dict[bytes, BlockSaving] = {}
        """Blocks that are being saved to host memory, by key."""
        self.numbers = itertools.count()
        self.tokens_found = 0
        self.blocks_saved = 0

    def _state(self, tracked: Tracked) -> PrefixState:
        if tracked.prefix is None:
            tracked.prefix = PrefixState(self.roots.of(tracked.request))
        return tracked.prefix

    def _keys(self, request: Request, state: PrefixState, tokens: int) -> list[bytes]:
        """Returns the keys of the full blocks of a request's first tokens."""
        done, wanted, size = len(state.keys), tokens // self.block_size, self.block_size
        if done < wanted:
            parent = state.keys[-1] if state.keys else state.root
            state.keys += prefix_keys(parent, list(request.all_token_ids[done * size : wanted * size]), size)
        return state.keys[:wanted]

    def matched(self, tracked: Tracked, num_computed: int) -> tuple[int | None, bool]:
        """Holds the blocks after the first ``num_computed`` tokens, which vLLM has. Returns the answer to
        vLLM."""
        if not tracked.is_plain():
            return 0, False
        request, state = tracked.request, self._state(tracked)
        state.release()
        # After a preemption, the tier may have evicted blocks that it once got from the request.
        state.offered = 0
        if state.is_barred:
            return 0, False
        # At least one token is left to compute. The whole prompt is renewed, also the blocks that vLLM has.
        keys = self._keys(request, state, request.num_tokens - 1)
        found = self.pool.lookup(keys)
        if self.disk is not None and self.disk.waits(request, state, keys, found, num_computed):
            return None, False
        if self.disk is not None:
            # The beginning leaves last.
            self.disk.asks.use(keys[: len(found)][::-1], of_prefix=True)
        self._note_report(state, keys, len(found), num_computed)
        tokens = len(found) * self.block_size - num_computed
        if tokens <= 0:
            found.release()
            return 0, False
        state.first_found, state.found = num_computed, found
        return tokens, True

    def _note_report(self, state: PrefixState, keys: list[bytes], found: int, num_computed: int) -> None:
        """Notes what was found for a request when it was looked up first."""
        if state.report is not None:
            return
        own, missing = num_computed // self.block_size, max(found, num_computed // self.block_size)
        state.report = {"prefix_tokens_found": max(0, found - own) * self.block_size}
        if missing < len(keys):
            host = self.known.why_absent(keys[missing], [], is_public=False)
            state.report["prefix_missed"] = combined(host, state.fetch.reason if state.fetch is not None else None)

    def ended(self, tracked: Tracked) -> dict[str, Any] | None:
        """Returns what the answer of an ordinary request says about its blocks, if the request asks for that."""
        params, state = tracked.request.kv_transfer_params, tracked.prefix
        is_asked = isinstance(params, dict) and params.get("prefix_report") is True
        return state.report if is_asked and state is not None and tracked.is_plain() else None

    def load(self, tracked: Tracked, tables: Tables, count: int) -> Load:
        """Returns the rows of the ``count`` tokens that were found."""
        state, size = tracked.prefix, self.block_size
        first, found = state.first_found, state.found.ids[state.first_found // size :]
        state.copied = count
        rows = ((found, 0, len(found) * size), runs_of(writable(tables), size, first, count), 0)
        return Load(tracked.request.request_id, [rows], [], of_prefix=True)

    # Decision: docs/decisions/vllm.md#a-block-in-the-tier-has-the-rows-of-all-layers
    def saves(self, tracked: Tracked, count: int) -> list[Saving]:
        """Returns the blocks that the tier lacks and that this step, which computes ``count`` tokens,
        fills.
        """
        request = tracked.request
        if not tracked.is_plain() or tracked.is_stale:
            return []
        saves, size = self.new_blocks(tracked, request.num_computed_tokens + count), self.block_size
        if saves:
            tables = self.host.kv_cache_manager.get_block_ids(request.request_id)
            for saving in saves:
                sources = [([table[saving.index]], 0, size) for table in tables]
                saving.order = Save(saving.name, [((saving.blocks.ids, 0, size), sources)], of_prefix=True)
        return saves

    def records(self, saving: BlockSaving) -> list[Record]:
        """Returns a block that is being saved as a record for the disk."""
        return self.disk.records(saving) if self.disk is not None else []

    def note(self, request: Request, keys: list[bytes], first: int) -> None:
        """Notes the blocks, from index ``first`` of a request on, that are on their way to host memory."""
        if self.events is not None:
            for index, key in enumerate(keys, start=first):
                self.events.note(key, request, index)

    def drop(self, key: bytes, room: MutableBlocks) -> None:
        """Frees memory for a block that has not come."""
        room.release()
        if self.events is not None:
            self.events.drop(key)

    def new_blocks(self, tracked: Tracked, tokens: int) -> list[BlockSaving]:
        """Reserves memory for the full blocks of a request's first ``tokens`` tokens that the tier lacks, up to the first
        one that a window has passed: without it, the blocks after it would not be found.
        """
        request, state = tracked.request, self._state(tracked)
        tokens = min(tokens, request.num_tokens)
        if tokens // self.block_size <= state.offered or not self._has_room(state):
            return []
        keys, new = self._keys(request, state, tokens), []
        # The hold renews the blocks that are known, and keeps them while the ones after them are saved.
        before = self.pool.lookup(keys)
        state.offered = max(state.offered, len(before))
        passed = self._first_passed(request, len(before), len(keys))
        for index in range(len(before), len(keys)):
            key = keys[index]
            if key not in self.saving:
                if index >= passed:
                    # Whatever memory it got would be taken from other prompts in vain.
                    state.offered = len(keys)
                    break
                try:
                    room = self.pool.allocate(1)
                except KvCacheError:
                    # All memory is held or being filled. Later blocks cannot be found without this one, so
                    # the next step offers it again.
                    break
                parent = keys[index - 1] if index else None
                tokens_of = list(request.all_token_ids[index * self.block_size : (index + 1) * self.block_size])
                saving = BlockSaving(f"{SAVE}{next(self.numbers)}", self, room, parent, key, index, tokens_of, before)
                self.saving[key] = saving
                new.append(saving)
                self.note(request, [key], index)
            state.offered = index + 1
        if not new:
            before.release()
        return new

    def _first_passed(self, request: Request, first: int, end: int) -> int:
        """Returns the index of the first of a request's blocks ``first`` to ``end`` that a window has passed; ``end`` if
        there is none."""
        tables = self.host.kv_cache_manager.get_block_ids(request.request_id)
        return next((index for index in range(first, end) if any(table[index] == 0 for table in tables)), end)

    def _has_room(self, state: PrefixState) -> bool:
        """Returns false if the pool has room only in the place of the request's own blocks, which would be evicted for
        the ones after them."""
        counts = self.pool.counts()
        return counts["free"] + counts["evictable"] > state.offered

    def stored(self, saving: BlockSaving) -> None:
        del self.saving[saving.key]
        if saving.parent is not None and not self.pool.cached_prefix([saving.parent]):
            self.drop(saving.key, saving.blocks)
            return
        saving.blocks.register([saving.key], saving.parent).release()
        self.known.stored(saving.key, [], is_public=False)
        self.blocks_saved += 1

    def lost(self, saving: BlockSaving) -> None:
        del self.saving[saving.key]
        self.drop(saving.key, saving.blocks)

    def take_events(self) -> Iterable[Any]:
        """Returns vLLM's events since the last call."""
        return self.events.of(self.pool.take_events()) if self.events is not None else ()

    def copied(self, tracked: Tracked) -> None:
        """Counts the tokens of a copy that has ended, unless it failed."""
        if tracked.prefix is not None:
            if not tracked.prefix.is_barred:
                self.tokens_found += tracked.prefix.copied
            tracked.prefix.copied = 0

    def bar(self, tracked: Tracked) -> None:
        """Bars a request from the tier, because its blocks could not be copied in."""
        self._state(tracked).is_barred = True

    def reset(self) -> None:
        """Forgets every block that is not held, and the blocks still being saved."""
        for saving in list(self.saving.values()):
            self.lost(saving)
            saving.before.release()
        self.known.reset()
        if self.disk is not None:
            self.disk.reset()
        self.pool.clear_cached()

    def counts(self) -> tuple[dict[str, int], dict[str, float]]:
        """Returns the tier's counters and gauges."""
        counts = self.pool.counts()
        totals = {
            "prefix_tokens_found": self.tokens_found,
            "prefix_blocks_saved": self.blocks_saved,
            "prefix_blocks_evicted": counts["evictions"],
        }
        return totals, {"prefix_memory_usage_perc": 1 - counts["free"] / counts["total"]}
