"""How vLLM's attention lays its caches out. Unknown layouts are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache import ForeignCache

from .host import UnsupportedHostError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

# By the kernels of the CPU backend, as its layers name them.
CPU_KERNELS = {"vec": "columns", "vec16": "columns", "amx": "tiles"}


def foreign_cache(
    vllm_config: VllmConfig, layers: list[str], kv_caches: dict[str, torch.Tensor]
) -> tuple[ForeignCache, str]:
    """Describes the caches of all layers, in their order, and names the order of their elements."""
    import vllm

    tensors = [kv_caches[name] for name in layers]
    device = tensors[0].device.type
    if device != "cpu":
        raise UnsupportedHostError(f"vLLM {vllm.__version__} keeps its caches on {device!r}: chunks go to CPU caches only")
    modules = vllm_config.compilation_config.static_forward_context
    kernels = {getattr(modules[name], "isa", None) for name in layers}
    orders = {CPU_KERNELS.get(kernel) for kernel in kernels}
    if len(orders) != 1 or None in orders:
        raise UnsupportedHostError(
            f"vLLM {vllm.__version__} lays its caches out for the kernels {sorted(map(str, kernels))}: "
            f"the layouts of {', '.join(CPU_KERNELS)} are known"
        )
    (order,) = orders
    return ForeignCache.interleaved(tensors, order), order


def keys_of(cache: torch.Tensor, blocks: torch.Tensor, order: str) -> torch.Tensor:
    """Returns the keys ``[tokens, heads, head_dim]`` of some blocks of a layer."""
    taken = cache[blocks]
    count, heads, size, both = taken.shape
    dim = both // 2
    keys = taken.reshape(count, heads, -1)[..., : size * dim]
    if order == "columns":
        return keys.reshape(count, heads, dim, size).permute(0, 3, 1, 2).reshape(count * size, heads, dim)
    tiles = keys.reshape(count, heads, size // 16, dim // 2, 16, 2)
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(count * size, heads, dim)
