"""The host engine: its settings, the shape of its caches, and its objects that call the connector."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcache import KvCacheError, Ropes, key_root

from .adapters import stamp_of
from .disk.settings import check_loads, check_policy, check_seconds, check_version, folder_of, limit_of
from .sizes import size_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request


class UnsupportedHostError(RuntimeError):
    """An error: chunks cannot be kept for this vLLM or its model."""


@dataclass(frozen=True)
class Settings:
    """The settings in ``kv_connector_extra_config``."""

    host_memory: int = 1 << 30
    """Bytes of host memory for chunks, over all ranks."""
    block_size: int = 32
    """Tokens per block in that memory."""
    max_chunk_tokens: int = 4096
    """The maximum number of tokens per piece. Longer chunks are stored in several pieces."""
    max_chunks: int = 100_000
    """The maximum number of pieces."""
    cache_policy: str = "lru"
    """The order in which chunks and prefixes are evicted."""
    prefix_memory: int = 0
    """Bytes of host memory for ordinary prompts' blocks, over all ranks; 0 turns the tier off."""
    question_memory: int = 2 << 30
    """Bytes of memory for the copy of a prompt in which a question chooses tokens, over all ranks."""
    disk_path: str | None = None
    """The folder in which chunks and prefixes survive a restart, or none."""
    disk_limit: int = 0
    """Bytes of the files in that folder, over all ranks."""
    disk_deadline: float = 2.0
    """Seconds that a request may wait for the disk."""
    disk_loads: str = "if-faster"
    """``if-faster``: what is computed sooner is not loaded. ``always``: everything is loaded."""
    disk_policy: str = "lru"
    """What leaves first when the files are full: ``lru``, ``s3-fifo`` or ``tiny-lfu``."""
    disk_version: str = ""
    """A part of every record's identity. Change it when weights change without their files changing."""

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Settings:
        """Reads the settings. Raises ``ValueError`` for an unknown name or an invalid value."""
        unknown = set(extra) - set(cls.__dataclass_fields__)
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise ValueError(f"kv_connector_extra_config has the unknown settings {sorted(unknown)}; the known settings are {known}")
        values = dict(extra)
        for name in ("host_memory", "prefix_memory", "question_memory"):
            if name in values:
                values[name] = size_of(name, values[name])
        settings = cls(**values)
        for name in ("prefix_memory", "question_memory"):
            if type(getattr(settings, name)) is not int or getattr(settings, name) < 0:
                raise ValueError(f"{name} is {getattr(settings, name)!r}: it must be a number; 0 means none")
        for name in ("host_memory", "block_size", "max_chunk_tokens", "max_chunks"):
            if type(getattr(settings, name)) is not int or getattr(settings, name) <= 0:
                raise ValueError(f"{name} is {getattr(settings, name)!r}: it must be a number above 0")
        return replace(settings, **_disk(settings, set(extra)))


def _disk(settings: Settings, given: set[str]) -> dict[str, Any]:
    """Checks the settings about the disk. Returns them in their final form."""
    if settings.disk_path is None:
        alone = sorted(name for name in given if name.startswith("disk_"))
        if alone:
            raise ValueError(f"{alone[0]} is set, but disk_path is not; set disk_path to the folder for the records")
        return {}
    if "disk_limit" not in given:
        raise ValueError('disk_path needs the setting disk_limit: the size of the file in that folder, such as "50GiB"')
    check_seconds("disk_deadline", settings.disk_deadline)
    check_policy("disk_policy", settings.disk_policy)
    check_version("disk_version", settings.disk_version)
    check_loads("disk_loads", settings.disk_loads)
    return {"disk_path": folder_of("disk_path", settings.disk_path), "disk_limit": limit_of("disk_limit", settings.disk_limit)}



@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a table of blocks."""

    kind: str
    """vLLM's name of the kind of their attention."""
    window: int | None
    """The number of tokens that a token of these layers sees, including itself; ``None`` for all of them."""
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Geometry:
    """The shape of one rank's arenas and of the engine's blocks."""

    groups: tuple[LayerGroup, ...]
    """The groups of layers, in the order of vLLM's tables of blocks."""
    num_blocks: int
    """The number of host memory blocks for chunks; 0 if there can be none."""
    block_size: int
    num_heads: int
    head_dim: int
    dtype: str
    engine_block_size: int
    prefix_blocks: int
    """The number of host memory blocks for ordinary prompts. They are as large as the engine's."""
    question_tokens: int
    """The number of tokens of the longest prompt in which a question may choose."""
    no_chunks: str | None
    """Why keys cannot be moved to other positions, so that there is only the tier for ordinary prompts; ``None`` if they
    can."""

    @property
    def sliding(self) -> bool:
        """True if vLLM frees blocks that a window has passed."""
        return any(group.kind == "sliding_window" for group in self.groups)


# The kinds of layers that are supported: vLLM's classes, and its names for them in events.
KINDS = {"FullAttentionSpec": "full_attention", "SlidingWindowSpec": "sliding_window"}


def _group_of(group: KVCacheGroupSpec) -> LayerGroup:
    """Reads a group. Raises ``UnsupportedHostError`` if its layers are of an unknown kind."""
    spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
    if kind not in KINDS:
        # Without its hybrid manager, vLLM keeps the blocks of such layers like those of full attention.
        local = kind == "ChunkedLocalAttentionSpec"
        advice = "start vLLM with --disable-hybrid-kv-cache-manager" if local else "use a model with ordinary attention"
        raise UnsupportedHostError(f"layers of the kind {kind} ({group.layer_names[0]}) are not supported; {advice}")
    return LayerGroup(KINDS[kind], getattr(spec, "sliding_window", None), tuple(group.layer_names))


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> Geometry:
    """Reads the shape of vLLM's caches. Raises ``UnsupportedHostError`` for layers of an unknown kind, for groups whose
    blocks have different shapes, and for unknown rotary embeddings unless there is a tier, which needs none.
    """
    groups = tuple(map(_group_of, kv_cache_config.kv_cache_groups))
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if not specs:
        raise UnsupportedHostError("the model has no layers with keys and values; use a model with ordinary attention")
    shapes = {(spec.block_size, spec.num_kv_heads, spec.head_size, str(spec.dtype)) for spec in specs}
    if len(shapes) != 1:
        described = "; ".join(f"{size} tokens, {heads} heads of {dim}, {dtype}" for size, heads, dim, dtype in sorted(shapes))
        raise UnsupportedHostError(
            f"the blocks of the model's kinds of layers have different shapes ({described}), but only blocks of one shape are "
            "supported; use a model whose layers all have the same heads"
        )
    spec = specs[0]
    dtype = str(spec.dtype).rsplit(".", 1)[-1]
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedHostError(f"keys and values are stored as {dtype}; use float32, float16 or bfloat16")
    layers, width = sum(len(group.layers) for group in groups), 2 if dtype != "float32" else 4
    row = 2 * layers * spec.num_kv_heads * spec.head_size * width
    ranks = vllm_config.parallel_config.tensor_parallel_size
    try:
        ropes_of(vllm_config.model_config.hf_text_config, vllm_config.model_config.max_model_len)
        no_chunks = None
    except UnsupportedHostError as error:
        if settings.prefix_memory == 0:
            raise
        no_chunks = str(error)
    blocks = settings.host_memory // (row * settings.block_size * ranks) if no_chunks is None else 0
    if blocks < 1 and no_chunks is None:
        raise ValueError(
            f"host_memory of {settings.host_memory} bytes is less than one block, which takes {row * settings.block_size * ranks} bytes"
        )
    prefix_block = row * spec.block_size * ranks
    if 0 < settings.prefix_memory < prefix_block:
        raise ValueError(f"prefix_memory of {settings.prefix_memory} bytes is less than one block, which takes {prefix_block} bytes")
    return Geometry(
        groups=groups,
        num_blocks=min(blocks, (1 << 32) - 1),
        block_size=settings.block_size,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        engine_block_size=spec.block_size,
        prefix_blocks=min(settings.prefix_memory // prefix_block, (1 << 32) - 1),
        question_tokens=settings.question_memory // prefix_block * spec.block_size,
        no_chunks=no_chunks,
    )


def ropes_of(config: Any, positions: int, layers: list[int] | None = None) -> Ropes:
    """Reads the rotary embeddings of all layers, or of ``layers``, from a transformers configuration. Raises
    ``UnsupportedHostError`` for an unknown family.
    """
    try:
        return Ropes(config.to_json_string(), positions, layers)
    except KvCacheError as error:
        raise UnsupportedHostError(str(error)) from error


# Decision: docs/decisions/vllm.md#the-tier-does-not-rotate-keys
def ropes_for(vllm_config: VllmConfig, shape: Geometry, layers: list[int] | None = None) -> Ropes:
    """Returns the rotary embeddings of all layers, or of ``layers``. If they are unknown, returns stand-ins for copies that
    move no key."""
    model = vllm_config.model_config
    if shape.no_chunks is None:
        return ropes_of(model.hf_text_config, model.max_model_len, layers)
    count = len(layers) if layers is not None else sum(len(group.layers) for group in shape.groups)
    stand_in = {
        "model_type": "llama",
        "vocab_size": 1,
        "hidden_size": shape.head_dim,
        "intermediate_size": 1,
        "num_hidden_layers": count,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "max_position_embeddings": model.max_model_len,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return Ropes(json.dumps(stand_in), model.max_model_len)


class Roots:
    """The roots of keys: everything that keys and values depend on besides tokens."""

    def __init__(self, vllm_config: VllmConfig, shape: Geometry) -> None:
        model = vllm_config.model_config
        groups = [(group.kind, group.window, group.layers) for group in shape.groups]
        described = [model.revision, model.hf_text_config.to_dict(), groups]
        self.model, self.revision = model.model, json.dumps(described, default=str, sort_keys=True).encode()
        self.ropes = ropes_for(vllm_config, shape)
        self.shape, self.ranks = shape, vllm_config.parallel_config.tensor_parallel_size

    def of(self, request: Request) -> bytes:
        """Returns the root of a request's keys, which includes its adapter and its salt."""
        lora = request.lora_request
        return key_root(
            self.model,
            self.revision,
            self.ropes,
            dtype_name=self.shape.dtype,
            num_heads=self.shape.num_heads * self.ranks,
            head_dim=self.shape.head_dim,
            block_size=self.shape.block_size,
            adapter=(lora.lora_name, f"{lora.lora_path}\0{stamp_of(lora.lora_path)}".encode()) if lora else None,
            salt=request.cache_salt.encode() if request.cache_salt else None,
        )


def was_answered(request: Request) -> bool:
    """Returns true if a request has ended with an answer, and not by an abort or an error."""
    from vllm.v1.request import RequestStatus

    return request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


# Decision: docs/decisions/vllm.md#the-scheduler-and-the-runner-are-found-on-the-stack
def caller_of(kind: type, found: str) -> Any:
    """Returns the object of class ``kind`` whose method is on the stack. vLLM gives connectors no reference
    to their owner.

    Raises ``UnsupportedHostError`` if there is none. The message calls the object ``found``.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, kind):
            return owner
        frame = frame.f_back
    import vllm

    raise UnsupportedHostError(f"vLLM {vllm.__version__} calls its connector from an unknown place: {found} was not found")
