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
# Backends of attention on NVIDIA GPUs that keep a key and its value in one row, whatever the order of the rows.
GPU_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}


def device_of(tensor: torch.Tensor) -> str:
    """Returns the name of the device that a cache lies on. Raises ``UnsupportedHostError`` for others than CPUs and NVIDIA GPUs."""
    kind = tensor.device.type
    if kind == "cpu":
        return "cpu"
    if kind == "cuda":
        return f"cuda:{tensor.device.index or 0}"
    raise UnsupportedHostError(f"vLLM {_version()} keeps its caches on {kind!r}: chunks go to caches on CPUs and NVIDIA GPUs")


def foreign_cache(
    vllm_config: VllmConfig, layers: list[str], kv_caches: dict[str, torch.Tensor]
) -> tuple[ForeignCache, str]:
    """Describes the caches of all layers, in their order, and names the order of their elements."""
    tensors = [kv_caches[name] for name in layers]
    device = device_of(tensors[0])
    modules = [vllm_config.compilation_config.static_forward_context[name] for name in layers]
    if device == "cpu":
        names = {getattr(module, "isa", None) for module in modules}
        known = CPU_KERNELS
    else:
        names = {module.attn_backend.get_name() for module in modules}
        known = dict.fromkeys(GPU_BACKENDS, "rows")
    orders = {known.get(name) for name in names}
    if len(orders) != 1 or None in orders:
        raise UnsupportedHostError(
            f"vLLM {_version()} lays its caches out for {', '.join(sorted(map(str, names)))}: "
            f"the layouts of {', '.join(sorted(known))} are known"
        )
    (order,) = orders
    return ForeignCache.interleaved(tensors, order, device), order


def _version() -> str:
    import vllm

    return vllm.__version__


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
