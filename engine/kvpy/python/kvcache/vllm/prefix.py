"""The tier for ordinary prompts: blocks in host memory that are found after vLLM has given its own up.

```text
  a step fills blocks of a request ── known? ── no ──► saved at the end of the step ──► registered under their keys
  vLLM finds fewer blocks of a prompt than the tier ──► the rest is copied in beside a step, as chunks are
```

A block's key covers every token before it, the model, an adapter and the client's salt. Requests with chunks neither save nor find
blocks here: their bytes are those of another attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcache import BlockPool, KvCacheError, MutableBlocks, SharedBlocks, prefix_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

SAVE = "kvcache-prefix-"


@dataclass
class Progress:
    """The keys of a request's full blocks, as far as they were needed."""

    root: bytes
    keys: list[bytes] = field(default_factory=list)
    offered: int = 0
    """Blocks that are in the tier, or on their way to it."""


@dataclass
class Saving:
    """A block of host memory that the workers fill."""

    blocks: MutableBlocks
    parent: bytes | None
    key: bytes
    is_forgotten: bool = False
    """True once everything was to be forgotten."""


class PrefixTier:
    """The scheduler's side of the tier: the blocks, who finds them, and which are saved."""

    def __init__(self, num_blocks: int, block_size: int, policy: str, root_of: Callable[[Request], bytes]) -> None:
        self.pool = BlockPool(num_blocks, policy=policy)
        self.block_size = block_size
        self.root_of = root_of
        self.progress: dict[str, Progress] = {}
        self.holds: dict[str, tuple[int, SharedBlocks]] = {}
        """By request: the first token that was found, and the blocks."""
        self.saving: dict[str, Saving] = {}
        self.on_their_way: set[bytes] = set()
        self.barred: set[str] = set()
        """Requests whose blocks could not be copied in: they are computed."""
        self.numbers = itertools.count()
        self.tokens_found = 0
        self.blocks_saved = 0

    def _keys(self, request: Request, tokens: int) -> list[bytes]:
        """Returns the keys of the full blocks of a request's first tokens."""
        size, name = self.block_size, request.request_id
        own = self.progress.get(name)
        if own is None:
            own = self.progress[name] = Progress(self.root_of(request))
        done, wanted = len(own.keys), tokens // size
        if done < wanted:
            parent = own.keys[-1] if own.keys else own.root
            own.keys += prefix_keys(parent, list(request.all_token_ids[done * size : wanted * size]), size)
        return own.keys[:wanted]

    def matched(self, request: Request, num_computed: int) -> int:
        """Holds the blocks that follow those that vLLM has itself, and returns the number of their tokens."""
        self.let_go(request.request_id)
        own = self.progress.get(request.request_id)
        if own is not None:
            # It comes back after it gave way: the tier may have given blocks up since.
            own.offered = 0
        if request.request_id in self.barred:
            return 0
        # One token at least is left to compute.
        keys = self._keys(request, request.num_tokens - 1)[num_computed // self.block_size :]
        found = self.pool.lookup(keys)
        if len(found) == 0:
            return 0
        self.holds[request.request_id] = (num_computed, found)
        return len(found) * self.block_size

    def found(self, name: str) -> tuple[int, list[int]]:
        """Returns the first token that a request has found, and the slots of all of them."""
        (first, blocks), size = self.holds[name], self.block_size
        slots = [block * size + token for block in blocks.ids for token in range(size)]
        self.tokens_found += len(slots)
        return first, slots

    def new_blocks(self, request: Request, tokens: int) -> list[tuple[int, str, int]]:
        """Reserves room for full blocks among the first tokens of a request that the tier lacks.

        Returns for each its index in the request, a name, which `stored` or `lost` takes, and its block in host memory.
        """
        tokens, own = min(tokens, request.num_tokens), self.progress.get(request.request_id)
        if own is not None and tokens // self.block_size <= own.offered:
            return []
        keys = self._keys(request, tokens)
        own, new = self.progress[request.request_id], []
        for at in range(own.offered, len(keys)):
            key = keys[at]
            if key not in self.on_their_way and not self.pool.cached_prefix([key]):
                try:
                    room = self.pool.allocate(1)
                except KvCacheError:
                    # Everything is held or on its way. Later blocks are not found without this one: the next step offers it again.
                    break
                name = f"{SAVE}{next(self.numbers)}"
                self.saving[name] = Saving(room, keys[at - 1] if at else None, key)
                self.on_their_way.add(key)
                new.append((at, name, room.ids[0]))
            own.offered = at + 1
        return new

    def stored(self, name: str) -> None:
        """Registers a block that all workers have saved."""
        saving = self.saving.pop(name)
        self.on_their_way.discard(saving.key)
        if saving.is_forgotten:
            saving.blocks.release()
            return
        saving.blocks.register([saving.key], saving.parent).release()
        self.blocks_saved += 1

    def lost(self, name: str) -> None:
        """Gives back a block that a worker could not save."""
        saving = self.saving.pop(name)
        self.on_their_way.discard(saving.key)
        saving.blocks.release()

    def bar(self, name: str) -> None:
        """Keeps a request from the tier: its blocks could not be copied in."""
        self.barred.add(name)

    def let_go(self, name: str) -> None:
        """Ends the hold of a request on what it has found."""
        _, blocks = self.holds.pop(name, (0, None))
        if blocks is not None:
            blocks.release()

    def finished(self, name: str) -> None:
        """Forgets a request."""
        self.let_go(name)
        self.progress.pop(name, None)
        self.barred.discard(name)

    def reset(self) -> None:
        """Forgets every block that nobody holds, and those that are on their way."""
        self.pool.clear_cached()
        for saving in self.saving.values():
            saving.is_forgotten = True
