"""KV caches for LLM inference: documents that are reused at any position, and the memory that holds them.

- ``LLM`` answers prompts with a model on this machine, and finds their documents in any order.
- ``BlockPool``, ``BlockTable``, ``Arena`` and ``AttendWork`` are a paged cache for an engine of one's own, ``ChunkCacheManager`` a chunk
  cache over it. Tensors of NumPy, torch and others are used where they lie, through DLPack.
- ``kvcache.vllm`` is a connector for vLLM; it is imported only when it is named.
"""

from ._native import (
    LLM,
    Arena,
    AttendWork,
    BlockPool,
    BlockTable,
    ChunkCacheConfig,
    ChunkCacheManager,
    ChunkCacheMetrics,
    ChunkedPrompt,
    ChunkHash,
    ChunkPlace,
    ChunkReservation,
    ChunkWaiter,
    ForeignCache,
    KvCacheError,
    MutableBlocks,
    PieceHold,
    PositionPlan,
    RequestOutput,
    Ropes,
    SamplingParams,
    Segment,
    SharedBlocks,
    TailCopy,
    WriteSlots,
    key_root,
    prefix_keys,
    vllm_keys,
)

__all__ = [
    "LLM",
    "Arena",
    "AttendWork",
    "BlockPool",
    "BlockTable",
    "ChunkCacheConfig",
    "ChunkCacheManager",
    "ChunkCacheMetrics",
    "ChunkHash",
    "ChunkPlace",
    "ChunkReservation",
    "ChunkWaiter",
    "ChunkedPrompt",
    "ForeignCache",
    "KvCacheError",
    "MutableBlocks",
    "PieceHold",
    "PositionPlan",
    "RequestOutput",
    "Ropes",
    "SamplingParams",
    "Segment",
    "SharedBlocks",
    "TailCopy",
    "WriteSlots",
    "key_root",
    "prefix_keys",
    "vllm_keys",
]
