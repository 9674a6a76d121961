"""Types of the native module."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, final

from typing_extensions import Self

class _SupportsDlpack(Protocol):
    """A tensor of NumPy, torch or another library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

class KvCacheError(Exception):
    """An error of kvcache. The attributes are the numbers of the message, by name."""

    kind: str
    asked: int
    free: int
    evictable: int
    total: int
    expected: int
    got: int
    value: int
    limit: int
    most: int
    budget: int
    block_bytes: int
    of: int
    number: int

@final
class Ropes:
    """The rotary embeddings of a model's layers, from the text of its ``config.json``."""

    def __new__(cls, config_json: str, longest: int | None = None) -> Self: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    def at(self, layer: int, position: int) -> tuple[list[float], list[float], float]: ...

@final
class Arena:
    """Keys and values of all layers in host memory, in blocks."""

    def __new__(
        cls, *, num_layers: int, num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype_name: str
    ) -> Self: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    def load(
        self, cache: ForeignCache, loads: Sequence[tuple[Sequence[int], Sequence[int], int]], ropes: Ropes
    ) -> None: ...
    def save(self, cache: ForeignCache, to: Sequence[int], slots: Sequence[int]) -> None: ...

@final
class ForeignCache:
    """The cache of another engine in host memory."""

    @staticmethod
    def interleaved(layers: Sequence[_SupportsDlpack], order: Literal["columns", "tiles"]) -> ForeignCache: ...
    @staticmethod
    def rows(layers: Sequence[_SupportsDlpack], axes: str) -> ForeignCache: ...

@final
class ChunkCacheConfig:
    """The settings of a chunk cache."""

    def __new__(cls, **settings: Any) -> Self: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class PieceHold:
    """A stored piece of a chunk that is held."""

    @property
    def slots(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def stored_start(self) -> int: ...
    def release(self) -> None: ...

@final
class ChunkReservation:
    """Blocks for a missing piece of a chunk."""

    @property
    def slots(self) -> list[int]: ...
    @property
    def stored_start(self) -> int: ...
    def store(self) -> PieceHold: ...
    def abandon(self) -> None: ...

@final
class ChunkWaiter:
    """Work of another request on a piece of a chunk."""

    @property
    def is_over(self) -> bool: ...

@final
class ChunkCacheManager:
    """The chunks in the blocks of an arena."""

    def __new__(cls, config: ChunkCacheConfig, num_blocks: int, block_size: int) -> Self: ...
    def acquire(
        self, root: bytes, mode: str, system: Sequence[int], tokens: Sequence[int], stored_start: int
    ) -> list[PieceHold | ChunkReservation | ChunkWaiter | None]: ...
    def clear(self) -> None: ...
    def metrics(self) -> dict[str, Any]: ...
    def check_invariants(self) -> None: ...
    @staticmethod
    def hash_algorithms() -> list[str]: ...

def key_root(
    model: str,
    revision: bytes,
    ropes: Ropes,
    *,
    dtype_name: str,
    num_heads: int,
    head_dim: int,
    block_size: int,
    adapter: tuple[str, bytes] | None = None,
    salt: bytes | None = None,
) -> bytes: ...
