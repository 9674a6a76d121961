"""The connector: vLLM creates one in its scheduler and one in each worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .host import Settings, geometry
from .orders import Orders, Report
from .scheduler import ChunkScheduler
from .stats import ChunkMetrics, ChunkStats
from .worker import ChunkWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ChunkConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps chunks in host memory and copies them into vLLM's blocks at any position."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.of(self._kv_transfer_config.kv_connector_extra_config or {})
        shape = geometry(vllm_config, kv_cache_config, settings)
        self._scheduler: ChunkScheduler | None = None
        self._worker: ChunkWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = ChunkScheduler(vllm_config, shape, settings)
        else:
            self._worker = ChunkWorker(vllm_config, shape, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        # Lost rows are recomputed.
        return False

    # The scheduler's side.

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads, saves = self._scheduler.orders(scheduler_output)
        is_idle = not scheduler_output.num_scheduled_tokens
        orders = Orders(loads, saves, is_idle=is_idle, was_reset=self._scheduler.take_reset())
        disk = self._scheduler.disk_orders(scheduler_output, saves)
        if disk is not None:
            orders.disk = disk
        return orders

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, Report):
            self._scheduler.not_saved(meta.not_saved)
            self._scheduler.saved(meta.saved)
            self._scheduler.not_loaded(meta.not_loaded)
            self._scheduler.fetched(meta.fetched)
        self._scheduler.received(connector_output.finished_recving or set())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.prefixes.take_events()

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def has_pending_push_work(self) -> bool:
        # After a reset of an idle vLLM, a step tells workers, routers and metrics. What the disk is asked for
        # holds memory until it answers.
        return self._scheduler is not None and (self._scheduler.was_reset or self._scheduler.waits_for_disk())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.stats() if self._scheduler is not None else self._worker.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return ChunkStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return ChunkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        orders = self._get_connector_metadata()
        self._worker.begin_step(orders.disk, was_reset=orders.was_reset)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        self._worker.start_loads(orders.loads, orders.is_idle)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # A request runs only after all of its rows are copied.
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        # All layers are saved at the end of the step.
        return

    def wait_for_save(self) -> None:
        orders = self._get_connector_metadata()
        self._worker.save(orders.saves, orders.disk)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.loaded()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        _, received = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(finished_recving=received or set(), failed_recving=self._worker.failed_receives())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        saved, not_saved, not_loaded = self._worker.report()
        fetched = self._worker.fetched()
        if not (saved or not_saved or not_loaded or fetched):
            return None
        report = Report({name: 1 for name in saved}, not_saved, not_loaded)
        if fetched:
            report.fetched = fetched
        return report

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
