"""The host engine: its settings, the shape of its caches, and its objects that call the connector."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvcache import KvCacheError, Ropes, key_root

from .adapters import stamp_of
from .disk.settings import check_seconds, check_version, folder_of, limit_of
from .sizes import size_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
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
    check_version("disk_version", settings.disk_version)
    if settings.disk_loads not in ("if-faster", "always"):
        raise ValueError(f"disk_loads is {settings.disk_loads!r}: it must be \"if-faster\" or \"always\"")
    return {"disk_path": folder_of("disk_path", settings.disk_path), "disk_limit": limit_of("disk_limit", settings.disk_limit)}



@dataclass(frozen=True)
class Geometry:
    """The shape of one rank's arena and of the engine's blocks."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    head_dim: int
    dtype: str
    engine_block_size: int
    prefix_blocks: int
    """The number of host memory blocks for ordinary prompts. They are as large as the engine's."""
    question_tokens: int
    """The number of tokens of the longest prompt in which a question may choose."""
    sliding: bool


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: Settings) -> Geometry:
    """Reads the shape of vLLM's caches. Raises ``UnsupportedHostError`` if layers are of several kinds or of
    an unknown kind.
    """
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    for kind in kinds:
        if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
            raise UnsupportedHostError(f"layers of the kind {kind} are not supported; use a model with ordinary attention")
    if len(groups) != 1:
        raise UnsupportedHostError(
            f"the model has layers of several kinds ({', '.join(kinds)}), and vLLM keeps a table of blocks for each of them; "
            "start vLLM with --disable-hybrid-kv-cache-manager, which keeps the blocks of all attention layers alike"
        )
    (kind,), spec = kinds, groups[0].kv_cache_spec
    dtype = str(spec.dtype).rsplit(".", 1)[-1]
    if dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedHostError(f"keys and values are stored as {dtype}; use float32, float16 or bfloat16")
    layers, width = len(groups[0].layer_names), 2 if dtype != "float32" else 4
    row = 2 * layers * spec.num_kv_heads * spec.head_size * width
    ranks = vllm_config.parallel_config.tensor_parallel_size
    blocks = settings.host_memory // (row * settings.block_size * ranks)
    if blocks < 1:
        raise ValueError(
            f"host_memory of {settings.host_memory} bytes is less than one block, which takes {row * settings.block_size * ranks} bytes"
        )
    prefix_block = row * spec.block_size * ranks
    if 0 < settings.prefix_memory < prefix_block:
        raise ValueError(f"prefix_memory of {settings.prefix_memory} bytes is less than one block, which takes {prefix_block} bytes")
    return Geometry(
        num_layers=layers,
        num_blocks=min(blocks, (1 << 32) - 1),
        block_size=settings.block_size,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        engine_block_size=spec.block_size,
        prefix_blocks=min(settings.prefix_memory // prefix_block, (1 << 32) - 1),
        question_tokens=settings.question_memory // prefix_block * spec.block_size,
        sliding=kind == "SlidingWindowSpec",
    )


def ropes_of(config: Any, positions: int) -> Ropes:
    """Reads the rotary embeddings from a transformers configuration. Raises ``UnsupportedHostError`` for an
    unknown family.
    """
    try:
        return Ropes(config.to_json_string(), positions)
    except KvCacheError as error:
        raise UnsupportedHostError(str(error)) from error


class Roots:
    """The roots of keys: everything that keys and values depend on besides tokens."""

    def __init__(self, vllm_config: VllmConfig, shape: Geometry) -> None:
        model = vllm_config.model_config
        described = [model.revision, model.hf_text_config.to_dict()]
        self.model, self.revision = model.model, json.dumps(described, default=str, sort_keys=True).encode()
        self.ropes = ropes_of(model.hf_text_config, model.max_model_len)
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
