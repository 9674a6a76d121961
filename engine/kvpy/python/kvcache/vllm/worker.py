"""The workers' side: a rank's arena, and the copies between the arena and vLLM's blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from .arenas import Arenas, GroupCache
from .disk.open import open_disk
from .host import Geometry, LayerGroup, Settings, UnsupportedHostError, caller_of, ropes_for
from .layout import arena_device, block_size_of, device_of, foreign_cache, place_of
from .stats import TIER_GAUGES, Counting

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from .disk.store import DiskStore
    from .orders import Answers, DiskOrders
    from .stats import ChunkStats

logger = init_logger("vllm.kvcache")

MEASURED = 32
"""The number of tokens of the smallest step whose time says how long computing takes."""
IDLE_WAIT = 0.01
"""The number of seconds that a step without work waits for the disk."""
CLOSE = 30.0
"""The number of seconds in which the disk may take its last records."""


def check_layers(vllm_config: VllmConfig, cached: int) -> None:
    """Raises ``UnsupportedHostError`` unless this rank has ``cached`` caches because each layer of the model has one."""
    # Configurations such as GPT-2's have the number under another name, and this one as an attribute only.
    expected = vllm_config.model_config.hf_text_config.num_hidden_layers
    if expected == cached:
        return
    modules = vllm_config.compilation_config.static_forward_context.values()
    shared = sum(getattr(module, "kv_sharing_target_layer_name", None) is not None for module in modules)
    found = f"this rank has the keys and values of {cached} layers, and the model has {expected} layers"
    if shared > 0:
        reason = f"{shared} layers use the keys and values of other layers, which is not supported; use a model without such layers"
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        reason = "pipelines are not supported; start vLLM with --pipeline-parallel-size 1"
    elif vllm_config.speculative_config is not None:
        reason = "draft models are not supported; start vLLM without --speculative-config"
    else:
        reason = "use a model in which each layer has keys and values of its own"
    raise UnsupportedHostError(f"{found}: {reason}")


class ChunkWorker:
    """Carries out a rank's orders and reports on them."""

    def __init__(self, vllm_config: VllmConfig, shape: Geometry, settings: Settings | None = None) -> None:
        self.config, self.settings = vllm_config, settings or Settings()
        own = {name for group in shape.groups for name in group.layers}
        # vLLM creates layers in the model's order.
        self.layers = [name for name in vllm_config.compilation_config.static_forward_context if name in own]
        check_layers(vllm_config, len(self.layers))
        self.shape = shape
        self.block_size = shape.engine_block_size
        self.arena: Any = None
        """Chunks, unless there can be none."""
        self.prefixes: Any = None
        """Blocks of ordinary prompts, as large as the engine's."""
        self.disk: DiskStore | None = None
        """The records on the disk, if there is one."""
        self.counting = Counting()
        self.step_began = 0.0
        self.recomputer: Any = None
        """The model that recomputes tokens of chunks."""
        self.threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcache-load")
        self.loading: dict[str, Future[None]] = {}
        self.failed: set[int] = set()
        """Blocks of requests that run in this step and could not be loaded."""
        self.not_received: set[str] = set()
        self.is_idle = False
        self.just_saved: list[str] = []
        self.not_saved: set[str] = set()
        self.not_loaded: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocates the arenas for vLLM's caches. Raises ``UnsupportedHostError`` for an unknown layout."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from .recompute import Recomputer

        runner = caller_of(GPUModelRunner, "the runner of the model")
        tensors = [kv_caches[name] for name in self.layers]
        shape, self.place, size = self.shape, place_of(tensors[0]), block_size_of(tensors[0])
        if size != self.block_size:
            raise UnsupportedHostError(
                f"the kernels use blocks of {size} tokens, but vLLM uses {self.block_size}; set --block-size {size}"
            )
        orders, groups = zip(*(self._group(group, kv_caches) for group in shape.groups))
        if shape.no_chunks is None:
            self.arena = chunks = Arenas(groups, shape.num_blocks, shape.block_size)
            # A model whose tokens can be recomputed has one group.
            self.recomputer = Recomputer(self.config, runner, self.layers, tensors, orders[0], self.block_size, chunks.load_first)
        if shape.prefix_blocks > 0:
            self.prefixes = Arenas(groups, shape.prefix_blocks, shape.engine_block_size)
        for memory in (self.arena, self.prefixes):
            if memory is not None:
                threading.Thread(target=memory.provide, name="kvcache-memory", daemon=True).start()
        if self.settings.disk_path is not None:
            arenas = {name: arena for name, arena in ((False, self.arena), (True, self.prefixes)) if arena is not None}
            self.disk = open_disk(self.config, self.settings, shape, self.layers, arenas)

    def _group(self, group: LayerGroup, kv_caches: dict[str, torch.Tensor]) -> tuple[str, GroupCache]:
        """Returns the name of the layout of a group's cache, and the cache."""
        places = [place for place, name in enumerate(self.layers) if name in group.layers]
        names = [self.layers[place] for place in places]
        cache, order = foreign_cache(self.config, names, kv_caches)
        shape = self.shape
        return order, GroupCache(
            cache=cache,
            ropes=ropes_for(self.config, shape, places),
            num_layers=len(places),
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            device=arena_device(device_of(kv_caches[names[0]])),
        )

    def forget(self) -> None:
        """Forgets what questions chose, and what is on the disk."""
        if self.recomputer is not None:
            self.recomputer.forget()
        if self.disk is not None:
            self.disk.forget()

    def begin_step(self, orders: DiskOrders | None, *, was_reset: bool) -> None:
        """Starts to fetch records from the disk, before the step computes."""
        if was_reset:
            self.forget()
        self.step_began = time.monotonic()
        if self.disk is not None and orders is not None:
            self.disk.use(orders.used)
            self.disk.fetch(orders.fetches)

    def fetched(self) -> Answers:
        """Returns what became of records since the last call."""
        if self.disk is None:
            return {}
        # If no request runs, wait here for a moment instead of in empty steps.
        return self.disk.take_answers(IDLE_WAIT if self.is_idle else 0.0)

    def stats(self) -> ChunkStats | None:
        """Returns the counts of the disk since the last call."""
        if self.disk is None:
            return None
        usage = {f"tier_{name}": value for name, value in self.disk.usage().items()}
        gauges = {name: float(usage.pop(name)) for name in TIER_GAUGES}
        return self.counting.report(usage, gauges, {f"tier_{name}": times for name, times in self.disk.take_times().items()})

    # Decision: docs/decisions/vllm.md#plain-reuse-loads-asynchronously-recomputation-within-its-step
    def start_loads(self, loads: list[Any], is_idle: bool) -> None:
        """Copies the rows of requests that run in this step, and starts all other copies."""
        self.is_idle = is_idle
        if not loads:
            return
        # A step that is still running may write to blocks that a request has freed since.
        event = self._event()
        for load in loads:
            if load.at_once:
                self._wait(event)
                self._load_at_once(load)
            else:
                self.loading[load.request_id] = self.threads.submit(self._load_in_parallel, event, load)

    def _event(self) -> Any:
        """Returns an event after all work that the model has enqueued on a device; None on a CPU, where it is
        done.
        """
        if self.place.type == "cpu":
            return None
        import torch

        event = torch.Event(self.place)
        event.record(torch.get_device_module(self.place).current_stream(self.place))
        return event

    @staticmethod
    def _wait(event: Any) -> None:
        if event is not None:
            event.synchronize()

    def _load_in_parallel(self, event: Any, load: Any) -> None:
        self._wait(event)
        (self.prefixes if load.of_prefix else self.arena).load(load.rows)

    def _load_at_once(self, load: Any) -> None:
        """Copies the rows of a request that runs in this step."""
        failure: Exception | None = None
        try:
            self.arena.load(load.rows)
        except Exception as error:
            failure = error
        try:
            # Also after a failed copy, because all ranks must run the model in the same step. vLLM drops the
            # rows.
            if load.again is not None:
                self.recomputer.run(load.again)
        except Exception as error:
            failure = failure or error
        if failure is not None:
            self._failed(load.request_id, load.block_ids, failure)

    def _failed(self, request_id: str, block_ids: Iterable[int], error: BaseException) -> None:
        logger.error("rows of request %s could not be copied in: %s", request_id, error)
        self.failed.update(block_ids)
        self.not_loaded.add(request_id)

    def save(self, saves: list[Any], orders: DiskOrders | None = None) -> None:
        """Copies rows to host memory, after the step that computed them, and has the disk store them."""
        if saves:
            # Rows are copied on a different stream, so the model's stream has to be done.
            self._wait(self._event())
        disk = self.disk if orders is not None else None
        if disk is not None and saves and orders.tokens >= MEASURED:
            disk.measured(orders.tokens, time.monotonic() - self.step_began)
        for save in saves:
            arena = self.prefixes if save.of_prefix else self.arena
            try:
                if disk is not None:
                    disk.claim((block for to, _ in save.rows for block in to[0]), of_prefix=save.of_prefix)
                for to, sources in save.rows:
                    arena.save(to, sources)
                if disk is not None:
                    disk.store(orders.saves[save.name])
                self.just_saved.append(save.name)
            except Exception as error:
                logger.error("%s could not be copied to host memory: %s", save.name, error)
                self.not_saved.add(save.name)

    def loaded(self) -> set[str] | None:
        """Returns the requests whose asynchronous loads have ended, successfully or not; None if there are
        none."""
        done = {name for name, future in self.loading.items() if future.done()}
        if not done and self.loading and self.is_idle:
            # No request runs, so wait here instead of in empty steps.
            next(iter(self.loading.values())).exception()
            done = {name for name, future in self.loading.items() if future.done()}
        for name in done:
            error = self.loading.pop(name).exception()
            if error is not None:
                # Report the request, not its blocks: blocks that a window has passed may belong to other
                # requests.
                self.not_received.add(name)
                self._failed(name, (), error)
        return done or None

    def failed_receives(self) -> set[str]:
        """Returns the requests whose asynchronous loads have failed since the last call."""
        failed, self.not_received = self.not_received, set()
        return failed

    def failed_blocks(self) -> set[int]:
        """Returns the blocks whose loads have failed in this step."""
        failed, self.failed = self.failed, set()
        return failed

    def report(self) -> tuple[list[str], set[str], set[str]]:
        """Returns the rows that were saved, the rows that could not be saved and the requests that could not
        be loaded, all since the last call.
        """
        said = self.just_saved, self.not_saved, self.not_loaded
        self.just_saved, self.not_saved, self.not_loaded = [], set(), set()
        return said

    def shutdown(self) -> None:
        self.threads.shutdown(wait=True)
        if self.disk is not None:
            self.disk.close(CLOSE)
