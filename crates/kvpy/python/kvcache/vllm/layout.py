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
) -> ForeignCache:
    """Describes the caches of all layers, in their order."""
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
    return ForeignCache.interleaved(tensors, orders.pop())
