"""Host memory for the rows of all layers, next to the caches of the groups of layers.

vLLM keeps a table of blocks for each group of layers, and the groups share the memory of its blocks: block 5 of one
group lies where block 5 of another one would lie. Therefore, each group has a cache and an arena of its own. A block in
host memory has the same ID in all arenas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache import Arena, ForeignCache, Ropes

if TYPE_CHECKING:
    from .orders import Rows, Run


@dataclass(frozen=True)
class GroupCache:
    """vLLM's cache of a group of layers, and what its rows look like."""

    cache: ForeignCache
    ropes: Ropes
    """The rotary embeddings of the group's layers."""
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    device: str
    """The device of the arena."""


class Arenas:
    """Blocks in host memory for the rows of all layers."""

    def __init__(self, groups: Sequence[GroupCache], num_blocks: int, block_size: int) -> None:
        self.groups = groups
        self.arenas = [
            Arena(
                num_layers=group.num_layers,
                num_blocks=num_blocks,
                block_size=block_size,
                num_heads=group.num_heads,
                head_dim=group.head_dim,
                dtype_name=group.dtype,
                device=group.device,
                memory="host",
            )
            for group in groups
        ]

    def provide(self) -> None:
        """Has the system provide the memory now, and not in the steps that first use it."""
        for arena in self.arenas:
            arena.provide()

    @property
    def block_bytes(self) -> int:
        """The number of bytes of a block in all arenas."""
        return sum(arena.block_bytes for arena in self.arenas)

    def load(self, rows: list[Rows]) -> None:
        """Copies rows to vLLM's blocks of each group."""
        for number, (group, arena) in enumerate(zip(self.groups, self.arenas)):
            arena.load(group.cache, [(source, targets[number], distance) for source, targets, distance in rows], group.ropes)

    def load_first(self, cache: ForeignCache, rows: list[tuple[Run, Run, int]]) -> None:
        """Copies rows of the first group's layers to another cache."""
        self.arenas[0].load(cache, rows, self.groups[0].ropes)

    def save(self, to: Run, sources: list[Run]) -> None:
        """Copies rows from vLLM's blocks of each group to the rows ``to``."""
        for group, arena, source in zip(self.groups, self.arenas, sources):
            arena.save(group.cache, to, source)
