"""The host engine: its settings, the shape of its caches, and the objects that own the connector."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcache import KvCacheError, Ropes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class UnsupportedHostError(RuntimeError):
    """vLLM, or the model that it runs, is of a kind that chunks cannot be kept for."""


@dataclass(frozen=True)
class Settings:
    """The settings in ``kv_connector_extra_config``."""

    host_memory: int = 1 << 30
    """Bytes of host memory for chunks, over all ranks."""
    block_size: int = 32
    """Tokens in a block of that memory."""
    max_chunk_tokens: int = 4096
    """Longer chunks are stored in pieces."""
    max_chunks: int = 100_000
    """The largest number of pieces."""
    cache_policy: str = "lru"
    """The order in which chunks and prefixes are given up."""
    prefix_memory: int = 0
    """Bytes of host memory for blocks of ordinary prompts, over all ranks; 0 keeps none."""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Settings:
        """Reads the settings. Raises ``ValueError`` for a name or a value that is not one."""
        unknown = set(extra) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"kv_connector_extra_config has {sorted(unknown)}; the settings are {known}")
        values = dict(extra)
        for name in ("host_memory", "prefix_memory"):
            if isinstance(values.get(name), str):
                match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", values[name].strip())
                if match is None:
                    raise ValueError(f"{name} is {values[name]!r}: take bytes, or a number with KiB, MiB or GiB")
                values[name] = int(match[1]) * UNITS[match[2]]
        settings = cls(**values)
        if type(settings.prefix_memory) is not int or settings.prefix_memory < 0:
            raise ValueError(f"prefix_memory is {settings.prefix_memory!r}: it must be a number, 0 for none")
        for name in ("host_memory", "block_size", "max_chunk_tokens", "max_chunks"):
            if type(getattr(settings, name)) is not int or getattr(settings, name) <= 0:
                raise ValueError(f"{name} is {getattr(settings, name)!r}: it must be a number above 0")
        return settings


@dataclass(frozen=True)
class Geometry:
    """The extents of the arena of one rank, and of the engine's blocks."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    head_dim: int
    dtype: str
    engine_block_size: int
    prefix_blocks: int
    """Blocks of host memory for ordinary prompts, as large as the engine's."""
    sliding: bool


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> Geometry:
    """Reads the shape of vLLM's caches. Raises ``UnsupportedHostError`` for caches of several kinds of layers."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        raise UnsupportedHostError(f"the model has layers of several kinds ({kinds}): chunks need one kind")
    spec = groups[0].kv_cache_spec
    kind = type(spec).__name__
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
        raise UnsupportedHostError(f"layers of the kind {kind} are not known: take a model with ordinary attention")
    dtype = str(spec.dtype).rsplit(".", 1)[-1]
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedHostError(f"keys and values are stored as {dtype}: take float32, float16 or bfloat16")
    layers, width = len(groups[0].layer_names), 2 if dtype != "float32" else 4
    row = 2 * layers * spec.num_kv_heads * spec.head_size * width
    ranks = vllm_config.parallel_config.tensor_parallel_size
    blocks = settings.host_memory // (row * settings.block_size * ranks)
    if blocks < 1:
        raise ValueError(
            f"host_memory of {settings.host_memory} bytes holds no block: one takes {row * settings.block_size * ranks} bytes"
        )
    prefix_block = row * spec.block_size * ranks
    if 0 < settings.prefix_memory < prefix_block:
        raise ValueError(f"prefix_memory of {settings.prefix_memory} bytes holds no block: one takes {prefix_block} bytes")
    return Geometry(
        num_layers=layers,
        num_blocks=min(blocks, (1 << 32) - 1),
        block_size=settings.block_size,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        engine_block_size=spec.block_size,
        prefix_blocks=min(settings.prefix_memory // prefix_block, (1 << 32) - 1),
        sliding=kind == "SlidingWindowSpec",
    )


def ropes_of(config: Any, positions: int) -> Ropes:
    """Reads the RoPE of a configuration of transformers. Raises ``UnsupportedHostError`` for a family that is not known."""
    try:
        return Ropes(config.to_json_string(), positions)
    except KvCacheError as error:
        raise UnsupportedHostError(str(error)) from error


# Decision: docs/decisions/vllm.md#the-scheduler-and-the-runner-are-found-on-the-stack
def caller_of(kind: type, found: str) -> Any:
    """Returns the object of a class whose method is on the stack: vLLM hands connectors no reference to what owns them.

    Raises ``UnsupportedHostError`` if there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back
    import vllm

    raise UnsupportedHostError(f"vLLM {vllm.__version__} calls its connector in another way: {found} was not found")
