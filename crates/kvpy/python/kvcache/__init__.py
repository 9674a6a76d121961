"""KV caches for LLM inference: chunks that are reused at any position, and the memory that holds them.

``kvcache.vllm`` is a connector for vLLM; it is imported only when it is named.
"""

from ._native import (
    Arena,
    ChunkCacheConfig,
    ChunkCacheManager,
    ChunkReservation,
    ChunkWaiter,
    ForeignCache,
    KvCacheError,
    PieceHold,
    Ropes,
    key_root,
)

__all__ = [
    "Arena",
    "ChunkCacheConfig",
    "ChunkCacheManager",
    "ChunkReservation",
    "ChunkWaiter",
    "ForeignCache",
    "KvCacheError",
    "PieceHold",
    "Ropes",
    "key_root",
]
