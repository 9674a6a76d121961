"""The identity of blocks: everything that their bytes depend on apart from vLLM's hash.

vLLM's hash covers the tokens up to the block's end, the salt, other inputs, and the adapter's name. It does not cover
the weights or the layout, because it never leaves the process. The connector's own keys cover more, but not the files of
the weights either.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import TYPE_CHECKING, Any

from ..adapters import stamp_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

    from ..host import Geometry


# Decision: docs/decisions/vllm.md#a-block-on-the-disk-is-identified-by-more-than-its-hash
def identity(spec: OffloadingSpec, vllm_config: VllmConfig, row_bytes: int, version: str) -> str:
    """Returns a text that differs if the bytes of blocks with equal hashes may differ. Raises ``ValueError`` if they
    may differ in a way that no process can see.
    """
    config, cache = spec.config, vllm_config.cache_config
    if str(cache.prefix_caching_hash_algo).startswith("xxhash"):
        raise ValueError(
            f"vLLM hashes blocks with {cache.prefix_caching_hash_algo}, under which different prompts can have equal hashes, "
            "and which finds nothing after a restart; start vLLM with --prefix-caching-hash-algo sha256"
        )
    if vllm_config.lora_config is not None and not version:
        raise ValueError(
            "vLLM identifies an adapter by its name alone, so SlabTier would find an adapter's old blocks after its files have "
            "changed; give SlabTier the setting version, a text that you change whenever an adapter changes"
        )
    parallel = config.parallel
    return json.dumps(
        {
            **_host(vllm_config, version),
            "dtype": config.model.dtype,
            "hash": [cache.prefix_caching_hash_algo, config.cache.tokens_per_hash],
            "groups": [[group.group_id, group.tokens_per_block, _digest(group.layer_names)] for group in config.groups],
            "bytes": [row_bytes, config.worker_kv_bytes_per_block, config.cache.blocks_per_chunk],
            "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
            "ranks": [parallel.rank, parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        },
        sort_keys=True,
    )


def own_identity(vllm_config: VllmConfig, layers: list[str], shape: Geometry, rank: int, version: str) -> str:
    """Returns a text that differs if the bytes of the connector's records with equal keys may differ."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    groups = [(group.kind, group.window, group.layers) for group in shape.groups]
    rows = [_digest(groups), shape.num_heads, shape.head_dim, shape.dtype]
    return json.dumps(
        {
            **_host(vllm_config, version),
            "connector": 1,
            "layers": _digest(layers),
            "rows": rows,
            "blocks": [shape.block_size, shape.engine_block_size],
            "ranks": [rank, ranks],
        },
        sort_keys=True,
    )


def _host(vllm_config: VllmConfig, version: str) -> dict[str, Any]:
    """Describes what the bytes of any block depend on: the host, the weights, and the kernels."""
    import vllm

    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return {
        "record": 1,
        "vllm": vllm.__version__,
        "version": version,
        "model": _model(vllm_config.model_config),
        "draft": _model(draft) if draft is not None else None,
        "attention": _attention(vllm_config),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()


def _model(model: ModelConfig) -> list[str]:
    """Describes a model: its name, its files, and how it is used."""
    if os.path.isdir(model.model):
        files = stamp_of(model.model)
    elif os.path.isfile(model.model):
        stat = os.stat(model.model)
        files = _digest([stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    else:
        # The commit on the hub.
        files = str(getattr(model.hf_config, "_commit_hash", None))
    used = [model.revision, str(model.dtype), model.quantization, model.max_model_len, model.hf_config.to_dict()]
    return [model.model, files, _digest(used)]


def _attention(vllm_config: VllmConfig) -> list[str]:
    """Describes what decides the order of the elements in a block."""
    from vllm.platforms import current_platform

    described = [current_platform.device_type, str(current_platform.get_device_name()), str(vllm_config.attention_config.backend)]
    if current_platform.is_cpu():
        import torch

        # The matrix unit has an order of its own.
        amx, avx512 = (getattr(torch.cpu, name, bool)() for name in ("_is_amx_tile_supported", "_is_avx512_supported"))
        described += [platform.machine(), f"amx {amx}", f"avx512 {avx512}"]
    return described
