"""The blocks of ``fake_engine.py`` and its prefix cache: as in vLLM, a table for each group of layers, whose blocks all
come from one pool. Block 0 stands for a block that a window has passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace

from vllm.v1.request import Request

SIZE = 8
"""The number of tokens per block of the engine."""


class Blocks:
    """The engine's blocks. Block 0 is never used.

    ``windows`` has the number of tokens that each group's layers see; ``None`` stands for all of them. vLLM registers
    the blocks of a window only where it expects a request to go on: at the end of a prompt.
    """

    def __init__(self, count: int, windows: Sequence[int | None] = (None,)) -> None:
        self.unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self.holders = [0] * count
        self.windows = windows
        self.hash_of: dict[int, tuple[int, bytes]] = {}
        """The group and the hash of each block that can be found."""
        self.block_of: dict[tuple[int, bytes], int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        """The blocks of each request, for each group."""
        self.num_cached: dict[str, list[int]] = {}
        """The number of blocks of each table that were found, or registered since."""
        self.block_pool = SimpleNamespace(num_gpu_blocks=count)

    def free(self, request: Request) -> None:
        self.release(request.request_id)

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables[name])

    def evict_blocks(self, blocks: set[int]) -> None:
        for block in blocks:
            key = self.hash_of.pop(block, None)
            if key is not None and self.block_of.get(key) == block:
                del self.block_of[key]

    # The prefix cache.

    def needed(self, group: int) -> int | None:
        """Returns the number of blocks before a token that a group's layers see; ``None`` for all of them."""
        window = self.windows[group]
        return None if window is None else -(-(window - 1) // SIZE)

    def found(self, request: Request) -> list[list[int]]:
        """Returns the cached blocks of a request's beginning, for each group. At least one token is left to compute."""
        groups = range(len(self.windows))
        has = [[(group, key) in self.block_of for key in request.block_hashes] for group in groups]
        count = min((request.num_tokens - 1) // SIZE, len(request.block_hashes))
        while (less := min(self._ends(has[group], self.needed(group), count) for group in groups)) < count:
            count = less
        firsts = [0 if (needed := self.needed(group)) is None else max(0, count - needed) for group in groups]
        keys = request.block_hashes
        return [[0] * firsts[group] + [self.block_of[group, key] for key in keys[firsts[group] : count]] for group in groups]

    @staticmethod
    def _ends(has: list[bool], needed: int | None, count: int) -> int:
        """Returns the largest number of blocks, at most ``count``, after which a group's layers could go on."""
        while count > 0 and not all(has[0 if needed is None else max(0, count - needed) : count]):
            count -= 1
        return count

    def get_computed_blocks(self, request: Request) -> tuple[list[list[int]], int, int]:
        blocks = self.found(request)
        return blocks, len(blocks[0]) * SIZE, 0

    def cache(self, request: Request, tokens: int) -> None:
        """Registers a request's new full blocks of its first ``tokens`` tokens."""
        name, full, end = request.request_id, tokens // SIZE, (len(request.prompt_token_ids) - 1) // SIZE
        for group, table in enumerate(self.tables[name]):
            done, needed = self.num_cached[name][group], self.needed(group)
            self.num_cached[name][group] = max(full, done)
            for index in range(done, full):
                key, block = (group, request.block_hashes[index]), table[index]
                reachable = needed is None or len(self.windows) == 1 or end - needed <= index < end
                if block != 0 and reachable and block not in self.hash_of and key not in self.block_of:
                    self.hash_of[block], self.block_of[key] = key, block

    def reset(self) -> bool:
        if any(self.holders):
            return False
        self.hash_of.clear()
        self.block_of.clear()
        return True

    # The requests' blocks.

    def passed(self, group: int, computed: int) -> int:
        """Returns the number of blocks that a group's window has passed after ``computed`` tokens."""
        window = self.windows[group]
        return 0 if window is None else max(0, computed - window + 1) // SIZE

    def grow(self, name: str, tokens: int, computed: int, found: list[list[int]] | None = None) -> bool:
        """Extends a request's tables to hold ``tokens`` tokens, starting with ``found`` if they are new. Frees the blocks
        that windows have passed after ``computed`` tokens. Returns false if there are too few blocks."""
        groups, full = range(len(self.windows)), -(-tokens // SIZE)
        if name in self.tables:
            self._let_pass(name, computed)
            kept = [[] for _ in groups]
            tables = self.tables[name]
        else:
            given = found or [[] for _ in groups]
            tables = [[0] * self.passed(group, computed) for group in groups]
            kept = [given[group][len(tables[group]) :] for group in groups]
        missing = sum(max(0, full - len(table) - len(own)) for table, own in zip(tables, kept))
        if missing > len(self.unused) - sum(block in self.unused for own in kept for block in own if block != 0):
            return False
        # Blocks of all groups are taken before others are evicted.
        for block in (block for own in kept for block in own if block != 0):
            self.unused.pop(block, None)
            self.holders[block] += 1
        for table, own in zip(tables, kept):
            table += own
        self.num_cached.setdefault(name, [len(table) for table in tables])
        for table in tables:
            while len(table) < full:
                block, _ = self.unused.popitem(last=False)
                self.evict_blocks({block})
                self.holders[block] = 1
                table.append(block)
        self.tables[name] = tables
        return True

    def _let_pass(self, name: str, computed: int) -> None:
        for group, table in enumerate(self.tables[name]):
            end = min(self.passed(group, computed), len(table))
            self._drop(table[:end])
            table[:end] = [0] * end

    def release(self, name: str) -> None:
        self.num_cached.pop(name, None)
        for table in self.tables.pop(name, []):
            self._drop(table)

    def _drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block == 0:
                continue
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.unused[block] = None
                if block not in self.hash_of:
                    self.unused.move_to_end(block, last=False)
