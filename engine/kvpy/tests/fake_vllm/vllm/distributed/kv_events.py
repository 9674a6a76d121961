"""Events about blocks."""

from dataclasses import dataclass
from typing import Any

MEDIUM_CPU = "CPU"


@dataclass
class BlockStored:
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
