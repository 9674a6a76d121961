"""Types of the native module."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, final, overload

from typing_extensions import Self, disjoint_base

class _SupportsDlpack(Protocol):
    """A tensor from NumPy, torch or another library."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

BUILT_IN_DECOYS: tuple[str, ...]

class KvCacheError(RuntimeError):
    """An error from kvcache. Its attributes are the numbers in the message, by name."""

    kind: str
    asked: int
    free: int
    evictable: int
    total: int
    expected: int
    got: int
    value: int
    limit: int
    most: int
    budget: int
    block_bytes: int
    of: int
    number: int

@final
class Ropes:
    """The rotary embeddings of a model's layers, read from the contents of its ``config.json``. With ``layers``, only
    those of these layers, in this order.
    """

    def __new__(cls, config_json: str, longest: int | None = None, layers: Sequence[int] | None = None) -> Self: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    def at(self, layer: int, position: int) -> tuple[list[float], list[float], float]: ...

@final
class Arena:
    """The keys and values of all layers, in blocks in a device's memory.

    Operations return when they are done. Tensors are used in place: during a call, nothing else may use the
    tensors' elements or the blocks that the call writes.
    """

    def __new__(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype_name: str,
        device: str = "cpu",
        memory: Literal["device", "host"] = "device",
    ) -> Self: ...
    def provide(self) -> None:
        """Has the system provide an arena of a CPU now, and not when blocks are first written. Their contents stay."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def scatter(
        self,
        layer: int,
        k: _SupportsDlpack,
        v: _SupportsDlpack,
        slots: _Slots,
        *,
        ropes: Ropes | None = None,
        positions: _Integers | None = None,
    ) -> None:
        """Writes row ``i`` of ``k`` and ``v``, both ``[rows, heads, head_dim]``, to slot ``slots[i]`` of a
        layer."""

    def gather(
        self,
        layer: int,
        slots: _Slots,
        k: _SupportsDlpack,
        v: _SupportsDlpack,
        *,
        ropes: Ropes | None = None,
        distance: int = 0,
    ) -> None:
        """Reads slot ``slots[i]`` of a layer into row ``i`` of ``k`` and ``v``, both ``[rows, heads,
        head_dim]``. With ``ropes``, keys are rotated by ``distance`` positions on the fly."""

    def copy(self, pairs: _Pairs) -> None:
        """Copies whole blocks of all layers. Each pair consists of the block to read and the block to write.
        """

    def rotate(self, pairs: _Pairs, ropes: Ropes, distance: int) -> None:
        """Copies whole blocks of all layers, rotating keys by ``distance`` positions."""

    def attend(
        self,
        layer: int,
        q: _SupportsDlpack,
        work: AttendWork,
        out: _SupportsDlpack,
        *,
        ropes: Ropes | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        lse: _SupportsDlpack | None = None,
    ) -> None:
        """Attends with ``q``, ``[rows, heads, head_dim]``, to the segments of ``work``, and writes the result
        to ``out``, which has the same shape.

        With ``ropes``, queries are rotated to their positions on the fly. Keys are not rotated.
        """

    def load(self, cache: ForeignCache, loads: Sequence[tuple[_Rows, _Rows, int]], ropes: Ropes) -> None:
        """Copies rows to another engine's cache. Each entry of ``loads`` consists of the rows to read, the
        rows to write, and the distance to rotate keys by.

        Rows are given either as ``(blocks, first, count)``, for ``count`` tokens of these blocks starting at
        token ``first``, or as a list of slots. Rows to write in a negative block, or with a negative slot,
        are skipped.
        """

    def save(self, cache: ForeignCache, to: _Rows, rows: _Rows) -> None:
        """Copies rows from another engine's cache to rows ``to`` of this arena, with keys unchanged. Rows are
        given as in ``load``.
        """

@final
class BlockPool:
    """The blocks of an arena: free, being filled, shared, or cached under a key until their memory is
    needed.
    """

    def __new__(
        cls,
        num_blocks: int,
        *,
        start: int = 0,
        policy: Literal["lru", "tiny-lfu", "s3-fifo", "priority"] = "lru",
        ttl: float | None = None,
        chains: bool = True,
        events: int = 0,
    ) -> Self: ...
    def take_events(self) -> list[tuple[Literal["stored", "removed", "cleared", "lost"], bytes | None]]: ...
    def allocate(self, n: int) -> MutableBlocks: ...
    def lookup(self, keys: Sequence[bytes]) -> SharedBlocks: ...
    def cached_prefix(self, keys: Sequence[bytes]) -> int: ...
    def counts(self) -> dict[str, int]: ...
    def clear_cached(self) -> int: ...
    def check_invariants(self) -> None: ...

@final
class MutableBlocks:
    """Blocks that one owner fills. They become free when this object is released or dropped."""

    @property
    def ids(self) -> list[int]: ...
    def write_slots(self, block_size: int, slots: _Integers) -> WriteSlots: ...
    def register(self, keys: Sequence[bytes], parent: bytes | None = None) -> SharedBlocks: ...
    def share(self) -> SharedBlocks: ...
    def release(self) -> None: ...
    def __len__(self) -> int: ...

@final
class SharedBlocks:
    """A hold on filled blocks, which any number of holders may read."""

    @property
    def ids(self) -> list[int]: ...
    def release(self) -> None: ...
    def __len__(self) -> int: ...

@final
class BlockTable:
    """The blocks of a sequence in order: first shared ones, then the ones that the sequence fills itself."""

    def __new__(cls, pool: BlockPool, block_size: int, prefix: SharedBlocks | None = None) -> Self: ...
    @property
    def block_ids(self) -> list[int]: ...
    def grow(self, tokens: int) -> WriteSlots: ...
    def write_slots(self, start: int, end: int) -> WriteSlots: ...
    def slots(self, start: int, end: int) -> list[int]: ...
    def segment(self, *, logical_start: int = 0, stored_start: int = 0) -> Segment: ...
    def fork(self) -> BlockTable: ...
    def unshare_tail(self) -> TailCopy | None: ...
    def truncate(self, length: int) -> None: ...
    def share_full(self, keys: Sequence[bytes], parent: bytes | None = None) -> None: ...
    def release(self) -> None: ...
    def __len__(self) -> int: ...

@final
class WriteSlots:
    """Slots that may be written: a slot mapping with a permit from the owner of the blocks."""

    def tolist(self) -> list[int]: ...
    def __len__(self) -> int: ...

@final
class TailCopy:
    """The copy that must be made before a sequence writes to a shared block."""

    @property
    def pairs(self) -> list[tuple[int, int]]: ...

_Integers: TypeAlias = Sequence[int] | _SupportsDlpack
_Slots: TypeAlias = WriteSlots | _Integers
_Rows: TypeAlias = tuple[Sequence[int], int, int] | _Integers
_Pairs: TypeAlias = TailCopy | Sequence[tuple[int, int]]

@final
class Segment:
    """A run of cached tokens as one request uses it."""

    def __new__(
        cls,
        block_ids: Sequence[int],
        length: int,
        *,
        logical_start: int = 0,
        stored_start: int = 0,
        offset: int = 0,
    ) -> Self: ...
    @property
    def length(self) -> int: ...
    @property
    def logical_start(self) -> int: ...
    @property
    def position(self) -> int: ...

@final
class AttendWork:
    """A step's queries and the segments that they attend to, prepared once for all layers.

    Each request has a number of rows, which are the last tokens of its last segment, and the segments that it
    attends to.
    """

    def __new__(cls, batch: Sequence[tuple[int, Sequence[Segment]]]) -> Self: ...
    @property
    def num_rows(self) -> int: ...

@final
class ForeignCache:
    """The cache of another engine: the keys and values of each layer, in the engine's own memory."""

    @staticmethod
    def interleaved(
        layers: Sequence[_SupportsDlpack], order: Literal["rows", "columns", "tiles"], device: str = "cpu"
    ) -> ForeignCache: ...
    @staticmethod
    def rows(layers: Sequence[_SupportsDlpack], axes: str) -> ForeignCache: ...
    @staticmethod
    def lent(
        planes: Sequence[tuple[int, int]],
        owner: object,
        *,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        head_dim: int,
        dtype_name: str,
        device: str = "ascend",
    ) -> ForeignCache: ...

@final
class ChunkCacheConfig:
    """The settings of a chunk cache."""

    def __new__(cls, **settings: Any) -> Self: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class PieceHold:
    """A hold on a stored piece of a chunk."""

    @property
    def slots(self) -> list[int]: ...
    @property
    def block_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def stored_start(self) -> int: ...
    @property
    def chunk_hash(self) -> ChunkHash: ...
    def segment(self, logical_start: int, position: int) -> Segment: ...
    def share(self) -> PieceHold: ...
    def release(self) -> None: ...

@final
class ChunkReservation:
    """Blocks for a missing piece of a chunk."""

    @property
    def block_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def stored_start(self) -> int: ...
    @property
    def chunk_hash(self) -> ChunkHash: ...
    def write_slots(self) -> WriteSlots: ...
    def store(self) -> PieceHold: ...
    def abandon(self) -> None: ...

@final
class ChunkWaiter:
    """A piece of a chunk that another request is computing."""

    @property
    def is_over(self) -> bool: ...
    @property
    def chunk_hash(self) -> ChunkHash: ...

@final
class ChunkCacheManager:
    """A cache of chunks in blocks. It only tracks the blocks; their bytes may be anywhere."""

    def __new__(cls, config: ChunkCacheConfig, num_blocks: int, block_size: int) -> Self: ...
    def acquire(
        self, root: bytes, mode: str, system: Sequence[int], tokens: Sequence[int], stored_start: int
    ) -> list[PieceHold | ChunkReservation | ChunkWaiter | None]: ...
    def acquire_all(
        self, root: bytes, parts: Sequence[tuple[str, Sequence[int], Sequence[int], int]]
    ) -> list[list[PieceHold | ChunkReservation | ChunkWaiter | None]]: ...
    def compute_chunk_hash(self, root: bytes, mode: str, system: Sequence[int], tokens: Sequence[int]) -> list[ChunkHash]: ...
    def clear_cache(self) -> None: ...
    def evict_lru(self) -> bool: ...
    def get_metrics(self) -> ChunkCacheMetrics: ...
    def check_invariants(self) -> None: ...
    @staticmethod
    def hash_algorithms() -> list[str]: ...

@final
class ChunkCacheMetrics:
    """A chunk cache's counts since it was created, and its current gauges."""

    lookup_count: int
    hit_count: int
    miss_count: int
    shared_flights: int
    insertions: int
    evictions: int
    uncached: int
    tokens_reused: int
    tokens_computed: int
    cached_chunks: int
    total_blocks: int
    used_blocks: int
    hit_rate: float
    memory_utilization: float
    avg_lookup_time_ms: float
    avg_reindex_time_ms: float
    avg_compute_time_ms: float

@final
class ChunkHash:
    """The hash of a piece of a chunk, which does not depend on the piece's position."""

    hash_bytes: bytes
    token_count: int
    num_blocks: int
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class ChunkedPrompt:
    """The tokens of a prompt in parts: a system prompt, chunks that do not attend to each other, and a
    question.

    ``decoys`` are documents that chunks see while they are computed in the mode ``behind:N``, and the question
    never.
    """

    def __new__(
        cls,
        sys_prompt: Sequence[int],
        chunks: Sequence[Sequence[int]],
        user_question: Sequence[int],
        *,
        decoys: Sequence[Sequence[int]] | None = None,
    ) -> Self: ...
    @property
    def sys_prompt(self) -> list[int]: ...
    @property
    def chunks(self) -> list[list[int]]: ...
    @property
    def user_question(self) -> list[int]: ...
    @property
    def decoys(self) -> list[list[int]]: ...
    def get_total_tokens(self) -> int: ...
    def positions(
        self, mode: str = "with-system", strategy: str = "overlapped", max_positions: int = ...
    ) -> PositionPlan: ...

@final
class PositionPlan:
    """The positions of a prompt's parts."""

    chunks: list[ChunkPlace]
    question_logical: int
    question_position: int

@final
class ChunkPlace:
    """A chunk's place: the logical index of its first token in the prompt, the position at which that token
    is stored, and the position at which it is used."""

    logical_start: int
    stored_start: int
    used_start: int
    num_tokens: int

@final
class Tensor:
    """A tensor returned by this module. ``numpy.from_dlpack`` and ``torch.from_dlpack`` import it without
    a copy.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_contiguous(self) -> bool: ...
    def __dlpack__(
        self,
        *,
        stream: Any | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

_KVPair: TypeAlias = tuple[Tensor, Tensor]

@final
class BlockManager:
    """The keys and values of a model in blocks that are allocated and freed by ID. All layers share the block
    IDs.

    Keys and values are ``[num_kv_heads, tokens, head_dim]``, in the memory of the manager's device. Invalid
    IDs raise ``KvCacheError`` and change nothing.
    """

    def __new__(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        num_blocks: int = 256,
        device: object | None = None,
        dtype: object | None = None,
    ) -> Self: ...
    @classmethod
    def from_config(cls, model_config: object, engine_config: object, block_size: int = 16, num_blocks: int = 256) -> BlockManager:
        """Reads the sizes from a transformers configuration, and ``device`` and ``dtype`` from
        ``engine_config``."""

    def allocate_blocks(self, num_blocks_needed: int, seq_id: int = -1) -> list[int]: ...
    def free_blocks(self, block_ids: Sequence[int]) -> None: ...
    def write_kv(self, layer_idx: int, block_id: int, offset: int, key: _SupportsDlpack, value: _SupportsDlpack) -> None:
        """Writes ``key`` and ``value``, both ``[num_kv_heads, tokens, head_dim]``, to a block of one layer,
        starting at token ``offset``."""

    def read_kv(self, layer_idx: int, block_ids: Sequence[int], seq_len: int) -> _KVPair:
        """Copies the first ``seq_len`` tokens in the given blocks from one layer. Returns keys and values,
        both ``[num_kv_heads, seq_len, head_dim]``."""

    @property
    def k_storage(self) -> Tensor: ...
    @property
    def v_storage(self) -> Tensor: ...
    def num_free_blocks(self) -> int: ...
    def max_tokens_supported(self) -> int: ...
    def get_memory_usage(self) -> int: ...
    def reset(self) -> None: ...

@final
class PagedKVCache:
    """Sequences in the blocks of a ``BlockManager``, written layer by layer. Keys and values are
    ``[num_kv_heads, tokens, head_dim]``.

    All layers of a sequence share its blocks; a sequence is as long as its longest layer. Invalid calls raise
    ``KvCacheError`` and change nothing.
    """

    def __new__(cls, block_manager: BlockManager, max_blocks_per_seq: int = 64) -> Self: ...
    def create_sequence(self, seq_id: int | None = None) -> int: ...
    def delete_sequence(self, seq_id: int) -> None: ...
    def append_kv(self, seq_id: int, layer_idx: int, key: _SupportsDlpack, value: _SupportsDlpack) -> None: ...
    def get_kv(self, seq_id: int, layer_idx: int) -> _KVPair: ...
    def get_seq_len(self, seq_id: int) -> int: ...
    def update(
        self, seq_id: int, layer_idx: int, key: _SupportsDlpack, value: _SupportsDlpack, start_pos: int
    ) -> _KVPair:
        """Writes tokens to one layer at ``start_pos``, replacing all later tokens of the layer, and returns
        all tokens of the layer."""

@final
class PagedKVCacheWrapper:
    """One sequence of a ``PagedKVCache`` with the interface of a dense cache."""

    def __new__(cls, paged_cache: PagedKVCache, seq_id: int) -> Self: ...
    def get_layer_kv(self, layer_idx: int, seq_len: int) -> _KVPair: ...
    def update(self, layer_idx: int, key: _SupportsDlpack, value: _SupportsDlpack, start_pos: int) -> _KVPair: ...

@final
class KVCache:
    """The keys, or the values, of consecutive layers, in memory that is allocated once.

    Tensors are ``[B, H, L, D]`` for a cache of one layer, and ``[layers, B, H, L, D]`` for more. Invalid
    tensors raise ``KvCacheError`` and change nothing.
    """

    def __new__(
        cls,
        batch_size: int,
        num_heads: int,
        max_length: int,
        head_dim: int,
        *,
        num_layers: int = 1,
        device: object | None = None,
        dtype: object | None = None,
    ) -> Self: ...
    @property
    def current_length(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    def append_sequence(self, tensor: _SupportsDlpack) -> Tensor:
        """Appends a tensor along the sequence axis, and returns all tokens so far as a view."""

    def merge_from_ranks(self, tensors: Sequence[_SupportsDlpack], dim: int | None = None) -> Tensor:
        """Merges all ranks' caches for the next tokens: by layer or, with ``dim=2``, along the sequence.
        """

    def expect_chunks(self, num_tokens: int, chunk_length: int, num_stages: int) -> None:
        """Empties the cache and starts a merge of pieces, which may arrive in any order."""

    def receive(self, tensor: _SupportsDlpack, chunk: int, stage: int) -> None:
        """Receives a stage's piece of a chunk, ``[layers of the stage, B, H, tokens of the chunk, D]``."""

    @property
    def cache_received_indicator(self) -> ReceivedMatrix | None: ...
    def get_data(self) -> Tensor:
        """Returns all tokens so far in contiguous memory: the cache's own if the cache is full, otherwise a copy."""

    def reset(self) -> None: ...

@final
class ReceivedMatrix:
    """A matrix ``[num_chunks, num_stages]`` that records which pieces of a merge have arrived. It is printed
    as a table."""

    def __new__(cls, num_chunks: int, num_stages: int) -> Self: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def record(self, chunk: int, stage: int) -> None: ...
    def is_received(self, chunk: int, stage: int) -> bool: ...
    def is_chunk_complete(self, chunk: int) -> bool: ...
    def is_stage_complete(self, stage: int) -> bool: ...
    def is_complete(self) -> bool: ...
    @property
    def completion(self) -> float: ...
    def missing(self) -> list[tuple[int, int]]: ...
    def tolist(self) -> list[list[int]]: ...

@final
class KvStorageManager:
    """Tracks the blocks of each request, which are reserved step by step and released together. It does not
    store keys or values."""

    def __new__(cls, total_blocks: int, block_size: int) -> Self: ...
    @property
    def block_size(self) -> int: ...
    @property
    def pool(self) -> BlockPool: ...
    def reserve_blocks(self, request_id: int, num_blocks: int) -> list[int]: ...
    def release_blocks(self, request_id: int) -> int: ...
    def get_blocks(self, request_id: int) -> list[int]: ...
    def take_blocks(self, request_id: int) -> MutableBlocks: ...
    def available_count(self) -> int: ...
    def inflight_count(self) -> int: ...
    def export_metrics(self) -> StorageMetrics: ...

@final
class StorageMetrics:
    """The state of a ``KvStorageManager`` at one moment, and its counts since it was created."""

    @property
    def available_blocks(self) -> int: ...
    @property
    def inflight_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def utilization(self) -> float: ...
    @property
    def states(self) -> dict[str, int]: ...
    def goals(self) -> dict[str, bool | None]: ...
    def to_dict(self) -> dict[str, Any]: ...
    def prometheus(self, pool: str = "main") -> str: ...

@final
class StorageTierConfig:
    """The thresholds for moving blocks between tiers, from 0 to 1. They only determine how many blocks to
    move; the caller moves them."""

    def __new__(
        cls, gpu_offload_threshold: float = 0.85, cpu_offload_threshold: float = 0.90, prefetch_threshold: float = 0.7
    ) -> Self: ...
    @property
    def gpu_offload_threshold(self) -> float: ...
    @property
    def cpu_offload_threshold(self) -> float: ...
    @property
    def prefetch_threshold(self) -> float: ...
    def blocks_to_offload(self, tier: Literal["gpu", "cpu"], used: int, total: int) -> int: ...
    def blocks_to_prefetch(self, heat: float, wanted: int, used: int, total: int) -> int: ...

@final
class SamplingParams:
    """The settings of an answer, named as in vLLM."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    stop: list[str]
    ignore_eos: bool
    json_schema: str | None
    regex: str | None
    grammar: str | None
    def __new__(
        cls,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
        max_tokens: int = 64,
        stop: Sequence[str] = ...,
        ignore_eos: bool = False,
        json_schema: dict[str, object] | bool | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Self: ...

@final
class RequestOutput:
    """An answer, with its costs."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    missed: list[str | None]
    prefix_missed: str | None
    ttft: float

_Prompt: TypeAlias = str | Sequence[int] | ChunkedPrompt

@final
class LLM:
    """A model on this machine that caches the documents of its prompts, and finds them again in any order.

    By default, the half of the document tokens to which the question attends most is recomputed. If three
    ``decoys`` or more are given, documents are computed behind three of them instead, and nothing is recomputed. ``recompute`` chooses
    another strategy. If only ``chunk_cache_config`` is given, nothing is recomputed.

    With the compute mode ``behind:N``, documents see the first ``N`` of ``decoys`` while they are computed, and the
    question never does. Built-in texts are used by default. Decoys of the same kind as the documents keep more of
    the answers.

    With ``compute="bf16"``, activations are rounded to bf16 for weights in bf16. With ``compute="int8"``, they are rounded
    to eight bits for weights in ggml blocks, as in llama.cpp.

    With ``disk``, documents and prompts outlive the program in a file of ``disk_limit`` bytes in that folder. When it is
    full, ``disk_policy`` determines which of them leave first. What was saved or loaded last also stays in
    ``disk_memory`` bytes of host memory.
    """

    def __new__(
        cls,
        model: str | PathLike[str],
        *,
        enable_chunk_cache: bool = True,
        chunk_cache_config: ChunkCacheConfig | None = None,
        recompute: str | None = None,
        decoys: Sequence[str] | None = None,
        dtype_name: str = "float32",
        block_size: int = 16,
        kv_cache_memory_bytes: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
        compute: Literal["exact", "bf16", "int8"] = "exact",
        disk: str | PathLike[str] | None = None,
        disk_limit: int | None = None,
        disk_loads: Literal["faster", "always"] = "faster",
        disk_policy: Literal["lru", "s3-fifo", "tiny-lfu", "priority"] = "lru",
        disk_memory: int = 0,
    ) -> Self: ...
    @overload
    def generate(
        self,
        prompts: _Prompt,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        template_args: dict[str, object] | None = None,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: Sequence[_Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
        template_args: dict[str, object] | None = None,
    ) -> list[RequestOutput | KvCacheError]: ...
    @overload
    def chat(
        self,
        messages: Sequence[dict[str, object]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: dict[str, object] | None = None,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[dict[str, object]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: dict[str, object] | None = None,
    ) -> list[RequestOutput | KvCacheError]: ...
    def get_chunk_cache_stats(self) -> ChunkCacheMetrics: ...
    def get_disk_stats(self) -> dict[str, int] | None: ...
    def disk_prometheus(self) -> str: ...
    def close_disk(self) -> None: ...
    def save_prompt(
        self, prompt: _Prompt, path: str | PathLike[str], *, chat: bool = False, max_tokens: int = 16
    ) -> dict[str, int]: ...
    def restore_prompt(self, path: str | PathLike[str]) -> dict[str, int]: ...

@final
class NoteQuestion:
    """A question about a fact in one of several notes about invented firms, which no model has heard of."""

    @property
    def system(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def text(self) -> str: ...
    @property
    def answer(self) -> str: ...
    def is_right(self, said: str) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...

@final
class Paired:
    """Counts of right answers to questions that were answered twice: once with ordinary attention, once with
    reuse.
    """

    def __new__(cls, asked: int, lost: int, gained: int) -> Self: ...
    @staticmethod
    def of(ordinary: Sequence[bool], reused: Sequence[bool]) -> Paired: ...
    @property
    def asked(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def gained(self) -> int: ...
    @property
    def loss(self) -> float: ...
    def at_most(self) -> float: ...
    def __eq__(self, value: object, /) -> bool: ...

@final
class Slab:
    """Records in a folder, for the rows of another engine's memory. Private: ``kvcache.vllm.SlabTier`` uses it."""

    def __new__(
        cls, folder: str | PathLike[str], identity: str, *, limit: int, row_bytes: int, policy: str = "lru"
    ) -> Self:
        """Opens or creates the records in a folder. Records with another ``identity`` are never found."""

    def contains(self, name: bytes) -> bool:
        """Returns whether a record with this name is on the disk. Does not read the disk."""

    def touch(self, names: Sequence[bytes]) -> int:
        """Makes records the last ones to leave, in this order. Does not read the disk."""

    def store(
        self,
        names: Sequence[bytes],
        rows: _SupportsDlpack,
        at: Sequence[int],
        *,
        deadline: float,
        costs: Sequence[float] | None = None,
    ) -> list[bool]:
        """Writes rows and waits. Returns for each row whether it is on the disk. Gives up if 32 MiB take longer
        than ``deadline`` seconds. ``costs`` are the seconds that computing each row took.
        """

    def peek(self, name: bytes) -> tuple[int, float] | None:
        """Returns the bytes of the record with this name, and the seconds that computing it took; None if there is
        no such record. Does not read the disk.
        """

    def begin_load(self, name: bytes) -> RowLoad:
        """Starts to load a row, without waiting for the disk."""

    def expected(self, bytes: int) -> float | None:
        """Returns the seconds in which the disk is expected to read this many bytes, or None if it has read nothing."""

    def count_skipped(self, loads: int) -> None:
        """Counts loads that are skipped, because computing takes less time."""

    def usage(self) -> dict[str, int]: ...
    def take_times(self) -> dict[str, list[float]]:
        """Returns the seconds that each load of a record and each batch of writes took since the last call, as
        ``load_seconds`` and ``write_seconds``. The latest 10,000 of both are kept.
        """

    def flush(self, *, deadline: float) -> bool:
        """Waits until everything that was stored is on the disk or was dropped. Returns False if that takes longer."""

    def close(self, *, deadline: float) -> bool:
        """Writes what is waiting, and closes the folder. Returns False if that takes longer."""

@final
class SlabBlocks:
    """Records for the blocks of arenas of one shape, in which a block has the same ID. Private: the disk of
    ``kvcache.vllm.ChunkConnector`` uses it.
    """

    def __new__(cls, slab: Slab, arenas: Sequence[Arena]) -> Self: ...
    def peek(self, name: bytes) -> tuple[int, float] | None:
        """Returns the bytes of the record with this name, and the seconds that computing it took; None if there is
        no such record. Does not read the disk.
        """

    def store(
        self,
        name: bytes,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        *,
        parent: bytes | None = None,
        seconds: float = 0.0,
        text: bytes | None = None,
    ) -> Literal["queued", "known", "dropped"]:
        """Copies blocks and queues them to be written, without waiting for the disk."""

    def touch(self, names: Sequence[bytes]) -> int:
        """Makes records the last ones to leave, in this order. Does not read the disk."""

    def begin_load(self, name: bytes, tokens: Sequence[int], start: int) -> BlockLoad:
        """Starts to load a record, without waiting for the disk."""

    def why_absent(self, name: bytes, tokens: Sequence[int], *, text: bytes | None = None) -> str:
        """Counts a miss, and returns why no record with this name is on the disk."""

@disjoint_base
class SlabLoad:
    """A record that is being loaded. If it is dropped, nobody waits for it any more."""

    @property
    def is_over(self) -> bool: ...
    @property
    def progress(self) -> float:
        """The part of the record that the disk has read so far, from 0 to 1."""

    def wait(self, seconds: float) -> bool:
        """Waits until the load has ended, for at most this many seconds. Returns whether it has."""

    def give_up(self) -> None:
        """Ends the load, and drops what has arrived. A load that has not ended is counted as late."""

@final
class BlockLoad(SlabLoad):
    """A record that is being loaded into blocks."""

    def end(self, blocks: Sequence[int]) -> str | None:
        """Ends the load, and fills blocks of the arena with the record. Returns None, or the reason why they were not
        filled. A load that has not ended is late.
        """

@final
class RowLoad(SlabLoad):
    """A row that is being loaded."""

    def end(self, rows: _SupportsDlpack, at: int) -> str | None:
        """Ends the load, and fills a row of a table. Returns None, or the reason why it was not filled. A load that
        has not ended is late.
        """

def note_decoys() -> list[str]:
    """Returns decoys: notes of the same form that do not contain the answer to any question."""

def note_questions(seed: int, count: int, notes: int) -> list[NoteQuestion]:
    """Draws ``count`` questions with ``notes`` notes each, from 2 to 20. Equal seeds give equal questions."""

def prefix_keys(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the keys of a prompt's full blocks. A key covers its block and all blocks before it."""

def vllm_keys(
    tokens: Sequence[int],
    block_size: int,
    *,
    cache_salt: str | None = None,
    lora: tuple[str, str] | None = None,
    seed: str | None = None,
) -> list[bytes]:
    """Returns the keys of a prompt's full blocks, as vLLM computes them with ``sha256_cbor``."""

def key_root(
    model: str,
    revision: bytes,
    ropes: Ropes,
    *,
    dtype_name: str,
    num_heads: int,
    head_dim: int,
    block_size: int,
    adapter: tuple[str, bytes] | None = None,
    salt: bytes | None = None,
) -> bytes: ...
