"""The layouts of vLLM's caches. An error names an unknown layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache import ForeignCache

from .host import UnsupportedHostError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    # One tensor, or one of keys and one of values.
    Layer = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# The element orders, by the names that CPU layers have for their kernels.
CPU_KERNELS = {"vec": "columns", "vec16": "columns", "amx": "tiles"}
# Attention backends on NVIDIA GPUs that keep a key and its value in one row. The order of rows may vary.
GPU_BACKENDS = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
# Attention classes of vllm-ascend whose layers have one tensor for keys and one for values, each `[blocks,
# block_size, heads, head_dim]`.
NPU_BACKENDS = {"AscendAttentionBackend"}
# The names of devices in torch, and their names in this module.
DEVICES = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}


def place_of(layer: Layer) -> torch.device:
    """Returns the torch device of a layer."""
    return layer[0].device if isinstance(layer, (tuple, list)) else layer.device


def device_of(layer: Layer) -> str:
    """Returns the name of a layer's device. Raises ``UnsupportedHostError`` for devices other than CPUs,
    NVIDIA GPUs and NPUs."""
    place = place_of(layer)
    if place.type == "cpu":
        return "cpu"
    if place.type in DEVICES:
        return f"{DEVICES[place.type]}:{place.index or 0}"
    raise UnsupportedHostError(
        f"vLLM {_version()} keeps its caches on {place.type!r}; chunks are supported for caches on CPUs, NVIDIA GPUs and Ascend NPUs"
    )


def arena_device(device: str) -> str:
    """Returns the device of arenas in host memory: the cache's own, or the CPU for an NPU, because NPU
    kernels cannot access host memory.
    """
    return "cpu" if device.startswith("ascend") else device


def block_size_of(layer: Layer) -> int:
    """Returns the number of tokens per block in a layer."""
    return int(layer[0].shape[1] if isinstance(layer, (tuple, list)) else layer.shape[2])


def foreign_cache(vllm_config: VllmConfig, layers: list[str], kv_caches: dict[str, Layer]) -> tuple[ForeignCache, str]:
    """Describes the caches of ``layers``. Also returns the name of their layout."""
    tensors = [kv_caches[name] for name in layers]
    device = device_of(tensors[0])
    modules = [vllm_config.compilation_config.static_forward_context[name] for name in layers]
    if device == "cpu":
        names = {getattr(module, "isa", None) for module in modules}
        known = CPU_KERNELS
    elif device.startswith("ascend"):
        names = {module.attn_backend.__name__ for module in modules}
        known = dict.fromkeys(NPU_BACKENDS, "planes")
    else:
        names = {module.attn_backend.get_name() for module in modules}
        known = dict.fromkeys(GPU_BACKENDS, "rows")
    orders = {known.get(name) for name in names}
    if len(orders) != 1 or None in orders:
        raise UnsupportedHostError(
            f"vLLM {_version()} lays out its caches for {', '.join(sorted(map(str, names)))}; "
            f"only the layouts for {', '.join(sorted(known))} are supported"
        )
    (order,) = orders
    if order == "planes":
        return _lent(tensors, device), order
    return ForeignCache.interleaved(tensors, order, device), order


def _lent(layers: list[Layer], device: str) -> ForeignCache:
    """Describes the caches of an NPU by their addresses."""
    planes = [plane for layer in layers for plane in layer]
    shapes, dtypes = {tuple(plane.shape) for plane in planes}, {str(plane.dtype).rsplit(".", 1)[-1] for plane in planes}
    if len(planes) != 2 * len(layers) or len(shapes) != 1 or len(dtypes) != 1 or len(min(shapes)) != 4:
        raise UnsupportedHostError(
            f"vLLM {_version()} has tensors of {sorted(shapes)} in {len(planes)} planes of {len(layers)} layers: "
            "only keys and values [blocks, block_size, heads, head_dim] are supported"
        )
    if not all(plane.is_contiguous() for plane in planes):
        raise UnsupportedHostError(f"vLLM {_version()} leaves gaps in its caches; only planes without gaps are supported")
    ((num_blocks, block_size, num_heads, head_dim),), (dtype,) = shapes, dtypes
    return ForeignCache.lent(
        [(keys.data_ptr(), values.data_ptr()) for keys, values in layers],
        planes,
        num_blocks=num_blocks,
        block_size=block_size,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype_name=dtype,
        device=device,
    )


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
