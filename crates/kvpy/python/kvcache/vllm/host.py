"""What is read of the host engine: its settings, the shape of its caches, and the objects that own the connector."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """The order in which chunks are given up."""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Settings:
        """Reads the settings. Raises ``ValueError`` for a name or a value that is not one."""
        unknown = set(extra) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"kv_connector_extra_config has {sorted(unknown)}; the settings are {known}")
        values = dict(extra)
        if isinstance(values.get("host_memory"), str):
            match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", values["host_memory"].strip())
            if match is None:
                raise ValueError(f"host_memory is {values['host_memory']!r}: take bytes, or a number with KiB, MiB or GiB")
            values["host_memory"] = int(match[1]) * UNITS[match[2]]
        settings = cls(**values)
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
    return Geometry(
        num_layers=layers,
        num_blocks=min(blocks, (1 << 32) - 1),
        block_size=settings.block_size,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        engine_block_size=spec.block_size,
        sliding=kind == "SlidingWindowSpec",
    )


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
