"""A connector that records vLLM's calls to it. vLLM loads ``RecordedConnector`` in place of
``ChunkConnector``.

The scheduler's side and the worker's side run in one process and write to one list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from golden_calls import Call, Effects, blocks, call, described, ints, plain
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.sched.interface import SchedulerInterface

from kvcache.vllm import ChunkConnector
from kvcache.vllm.host import caller_of


class Record:
    """The calls since the last start."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.config: dict[str, Any] = {}
        self.scheduler: Any = None
        self.worker: Any = None
        self.effects = Effects(self.salts)

    def run(self, method: str, args: Any, work: Callable[[], Any]) -> Any:
        """Runs a call to the connector, and records it with its result and effects."""
        noted = [method]
        self.calls.append(noted)
        result, effects = self.effects.of(work)
        noted[:] = call(method, args, plain(result), effects)
        return result

    def salts(self) -> dict[str, str | None]:
        return {name: request.cache_salt for name, request in self.scheduler.requests.items()}

    def watch_scheduler(self, scheduler: Any) -> None:
        """Records the requests that the connector adds, with the calls that result."""
        self.scheduler, add = scheduler, scheduler.add_request

        def added(request: Any) -> None:
            if not self.effects.running:
                add(request)
                return
            outer, self.calls = self.calls, []
            self.effects.note("add_request", described(request), self.calls)
            try:
                add(request)
            finally:
                self.calls = outer

        scheduler.add_request = added

    def watch_blocks(self, manager: Any) -> None:
        """Records the blocks that the connector removes from vLLM's prefix cache."""
        evict = manager.evict_blocks

        def noted(block_ids: set[int]) -> None:
            if self.effects.running:
                self.effects.note("evict_blocks", plain(block_ids))
            evict(block_ids)

        manager.evict_blocks = noted

    def watch_recomputer(self, recomputer: Any) -> None:
        """Records recomputations."""
        run = recomputer.run

        def noted(again: Any) -> None:
            self.effects.note("recompute", plain(again))
            run(again)

        recomputer.run = noted


record = Record()


def step(output: Any) -> dict[str, Any]:
    """Returns the parts of a step that the connector reads: each request's tokens to compute, computed
    tokens, and blocks."""
    scheduler = record.scheduler
    return {
        name: [count, scheduler.requests[name].num_computed_tokens, blocks(scheduler.kv_cache_manager.get_block_ids(name))]
        for name, count in output.num_scheduled_tokens.items()
    }


def finished(request: Any, block_ids: tuple[list[int], ...]) -> list[Any]:
    return [request.request_id, blocks(block_ids), ints(request.output_token_ids)]


# Functions that convert each call's arguments for writing.
CALLS: dict[str, Callable[..., Any]] = {
    "on_new_request": described,
    "get_num_new_matched_tokens": lambda request, computed: [request.request_id, computed, request.num_tokens],
    "update_state_after_alloc": lambda request, held, external: [request.request_id, blocks(held.get_block_ids()), external],
    "build_connector_meta": step,
    "update_connector_output": lambda output: [plain(output.kv_connector_worker_meta), plain(output.finished_recving)],
    "request_finished_all_groups": finished,
    "bind_connector_metadata": lambda metadata: None,
    "clear_connector_metadata": lambda: None,
    "start_load_kv": lambda context: None,
    "wait_for_save": lambda: None,
    "get_finished": lambda names: plain(names) or None,
    "get_block_ids_with_load_errors": lambda: None,
    "build_connector_worker_meta": lambda: None,
}
# Methods that are recorded elsewhere or have no effect.
OTHERS = {
    "__init__",
    "register_kv_caches",
    "wait_for_layer_load",
    "save_kv_layer",
    "request_finished",
    "requires_kv_delivery",
    "take_events",
    "reset_cache",
    "get_kv_connector_stats",
    "get_transfer_results",
    "has_pending_push_work",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "shutdown",
}


class RecordedConnector(ChunkConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        unknown = set(vars(ChunkConnector)) & set(vars(KVConnectorBase_V1)) - set(CALLS) - OTHERS
        unknown = {name for name in unknown if not name.startswith("_")}
        assert not unknown, f"the connector answers to {sorted(unknown)}, which are not recorded"
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            record.watch_scheduler(caller_of(SchedulerInterface, "the scheduler"))
            record.config = configured(vllm_config, kv_cache_config)
        else:
            record.worker = self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        record.watch_recomputer(self._worker.recomputer)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        record.watch_blocks(kv_cache_manager)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        # Wait for loads in every step, so the recording does not depend on how long they take.
        self._worker.threads.submit(lambda: None).result()
        return super().get_finished(finished_req_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # This is vLLM's own forward pass. During a connector call, it would be a recomputation.
        if not record.effects.running and layer_name == self._worker.layers[0]:
            record.calls.append(["forward"])


def recorded(method: str, written: Callable[..., Any]) -> Callable[..., Any]:
    own = getattr(RecordedConnector, method)

    def run(self: RecordedConnector, *args: Any, **kwargs: Any) -> Any:
        return record.run(method, written(*args, **kwargs), lambda: own(self, *args, **kwargs))

    return run


for name, describe in CALLS.items():
    setattr(RecordedConnector, name, recorded(name, describe))


def configured(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Returns the parts of vLLM's configuration that the connector reads."""
    model = vllm_config.model_config
    text = model.hf_text_config.to_dict()
    return {
        "model": {key: value for key, value in text.items() if key != "_name_or_path"},
        "max_model_len": model.max_model_len,
        "extra_config": vllm_config.kv_transfer_config.kv_connector_extra_config,
        "groups": [{"layers": group.layer_names, "spec": described_blocks(group.kv_cache_spec)} for group in kv_cache_config.kv_cache_groups],
        "num_blocks": kv_cache_config.num_blocks,
    }


def described_blocks(spec: Any) -> dict[str, Any]:
    """Returns the parts of a group's description that the connector reads."""
    return {
        "kind": type(spec).__name__,
        "dtype": str(spec.dtype),
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "block_size": spec.block_size,
        "sliding_window": getattr(spec, "sliding_window", None),
    }
