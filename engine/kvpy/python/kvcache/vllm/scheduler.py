"""The scheduler's side of the connector: one table of requests on top of the chunk cache and the tier for
ordinary prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .adapters import Adapters
from .chunks import Chunks
from .disk.asks import Asks
from .events import tier_events
from .host import Geometry, Roots, Settings, caller_of, was_answered
from .names import Names
from .orders import Answers, DiskOrders, Load, Save
from .prefix import NoPrefixes, Prefixes
from .requests import Saving, Tracked, set_salt
from .stats import ChunkStats, Counting

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class ChunkScheduler:
    """Answers vLLM's scheduler, and gives orders to the workers."""

    def __init__(self, vllm_config: VllmConfig, shape: Geometry, settings: Settings) -> None:
        from vllm.v1.core.sched.interface import SchedulerInterface

        self.host = caller_of(SchedulerInterface, "the scheduler")
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.requests: dict[str, Tracked] = {}
        self.saving: dict[str, Saving] = {}
        """Rows that the workers were told to save, by name."""
        self.loads: list[Load] = []
        self.was_reset = False
        """True if the workers must forget what they remember, too."""
        self.counting = Counting()
        roots = Roots(vllm_config, shape)
        self.names, self.adapters = Names(), Adapters()
        self.asks = Asks(self.ranks) if settings.disk_path is not None else None
        """The questions to the disks of the ranks."""
        self.chunks = Chunks(vllm_config, shape, settings, roots, self.names, self.host, self.requests, self.asks)
        self.prefixes: NoPrefixes | Prefixes = NoPrefixes()
        if shape.prefix_blocks > 0:
            self.prefixes = Prefixes(shape, settings, roots, self.host, tier_events(vllm_config, self.host, shape), self.asks)

    def on_new_request(self, request: Request) -> None:
        known = self.requests.get(request.request_id)
        if known is not None and known.encode is not None:
            return
        salt = self.names.of_client(request.cache_salt)
        salt = self.adapters.salt(request.lora_request, salt, self.names)
        if salt != request.cache_salt:
            set_salt(request, salt)
        tracked = self.requests[request.request_id] = Tracked(request)
        self.chunks.begin(tracked)

    def matched_tokens(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """Returns the number of tokens to load after the first ``num_computed``, and true if steps run in
        parallel."""
        tracked = self.requests[request.request_id]
        tracked.awaits_step = False
        if tracked.is_stale and num_computed == 0:
            # vLLM has preempted the request since the last reset.
            tracked.is_stale = False
            set_salt(request, tracked.salt_before)
        answer = self.chunks.matched(tracked, num_computed)
        return self.prefixes.matched(tracked, num_computed) if answer is None else answer

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Orders the load of ``num_external`` tokens into a request's blocks."""
        tracked = self.requests[request.request_id]
        if tracked.chunks is not None:
            tracked.chunks.is_served = True
        if num_external == 0:
            tracked.awaits_step = False
            self._let_go(tracked)
            return
        owner = self.prefixes if tracked.chunks is None else self.chunks
        load = owner.load(tracked, blocks.get_block_ids(), num_external)
        tracked.is_receiving |= not load.at_once
        self.loads.append(load)

    def orders(self, output: SchedulerOutput) -> tuple[list[Load], list[Save]]:
        """Returns the workers' orders for this step."""
        self.chunks.submit()
        loads, self.loads = self.loads, []
        for load in loads:
            # Such rows are read in this step. Whoever takes their memory now writes to it in a later one.
            if load.at_once:
                self._let_go(self.requests[load.request_id])
        saves = []
        for name, count in output.num_scheduled_tokens.items():
            tracked = self.requests[name]
            owner = self.prefixes if tracked.encode is None else self.chunks
            for saving in owner.saves(tracked, count):
                self.saving[saving.name] = saving
                saves.append(saving.order)
        return loads, saves

    def disk_orders(self, output: SchedulerOutput, saves: list[Save]) -> DiskOrders | None:
        """Returns the orders about the disk for a step with these saves; None without a disk."""
        if self.asks is None:
            return None
        savings = [self.saving[save.name] for save in saves]
        records = {saving.name: saving.owner.records(saving) for saving in savings}
        return DiskOrders(records, self.asks.take_orders(), self.asks.take_used(), sum(output.num_scheduled_tokens.values()))

    # The workers report.

    def waits_for_disk(self) -> bool:
        return self.asks is not None and bool(self.asks.under_way)

    def fetched(self, answers: Answers | None) -> None:
        """Takes the workers' answers about records on the disk."""
        if self.asks is not None and answers:
            self.asks.answer(answers)
            self.chunks.submit()

    def saved(self, counts: dict[str, int]) -> None:
        """Records the number of workers that have saved each of the named rows."""
        for name, count in counts.items():
            saving = self.saving.get(name)
            if saving is None:
                continue
            saving.saved_by += count
            if saving.saved_by >= self.ranks:
                del self.saving[name]
                saving.owner.stored(saving)

    def not_saved(self, names: set[str]) -> None:
        """Drops rows that a worker could not save."""
        for name in names:
            saving = self.saving.pop(name, None)
            if saving is not None:
                saving.owner.lost(saving)

    def not_loaded(self, names: set[str]) -> None:
        """Lets vLLM compute the requests whose rows could not be copied in."""
        for name in names:
            tracked = self.requests.get(name)
            if tracked is None:
                continue
            if tracked.chunks is None:
                # Also after an abort, so that the copy is not counted.
                self.prefixes.bar(tracked)
                continue
            if tracked.has_ended:
                continue
            # vLLM has cached the blocks under the chunks' salt, and is about to write something else to them.
            for table in self.host.kv_cache_manager.get_block_ids(name):
                self.host.kv_cache_manager.evict_blocks(set(table))
            reason = "the chunks could not be copied: see the log of the worker"
            self.chunks.go_without(tracked, reason, after_chunks=True)

    def received(self, names: set[str]) -> None:
        """Records the loads that have ended."""
        for name in names:
            tracked = self.requests.get(name)
            if tracked is None:
                continue
            tracked.is_receiving, tracked.awaits_step = False, True
            self.prefixes.copied(tracked)
            self._let_go(tracked)
            if tracked.has_ended:
                self._forget(tracked)

    # A request ends.

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Ends a request. Returns the information about chunks for its answer."""
        tracked = self.requests[request.request_id]
        if tracked.encode is not None:
            del self.requests[request.request_id]
            if tracked.encode.order is None and not tracked.encode.is_over:
                self.chunks.aborted(tracked.encode)
            return None
        tracked.has_ended = True
        if not tracked.is_receiving:
            self._forget(tracked)
        return self.chunks.ended(tracked, was_answered=was_answered(request)) or self.prefixes.ended(tracked)

    def _let_go(self, tracked: Tracked) -> None:
        """Ends the holds of a request whose rows are in vLLM's blocks. After a preemption, vLLM asks again."""
        self.chunks.let_go(tracked)
        if tracked.prefix is not None:
            tracked.prefix.release()

    def _forget(self, tracked: Tracked) -> None:
        self._let_go(tracked)
        del self.requests[tracked.request.request_id]

    # Decision: docs/decisions/vllm.md#a-reset-leaves-nothing-of-what-was-computed-before-it
    def reset(self) -> bool:
        """Forgets everything that was computed so far: what is stored or held, encodes and copies under way,
        and what questions chose. Requests ask again. Returns true.
        """
        from vllm.v1.request import RequestStatus

        manager = self.host.kv_cache_manager
        # vLLM resets its connector also when requests have kept it from resetting its own cache.
        manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
        for tracked in self.requests.values():
            request = tracked.request
            self._let_go(tracked)
            tracked.prefix = None
            if (tracked.is_receiving or tracked.awaits_step) and not tracked.has_ended:
                if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    # As if the copy had failed: vLLM frees the blocks when the copy ends, and asks again.
                    self.host.failed_recving_kv_req_ids.add(request.request_id)
                else:
                    # vLLM has seen the end of the copy, and had no room to run the request.
                    manager.free(request)
                request.num_computed_tokens = 0
            elif request.num_computed_tokens > 0 and tracked.encode is None and not tracked.is_stale:
                # vLLM has not preempted the request, which goes on over its old blocks. No other request may find what
                # is computed from them.
                tracked.is_stale, tracked.salt_before = True, request.cache_salt
                set_salt(request, self.names.fresh_salt())
        if self.asks is not None:
            self.asks.reset()
        encodes = self.chunks.reset()
        self.prefixes.reset()
        self.saving.clear()
        self.loads.clear()
        self.was_reset = True
        self.host.finish_requests(encodes, RequestStatus.FINISHED_ABORTED)
        return True

    def take_reset(self) -> bool:
        """Returns true if there was a reset since the last call."""
        was_reset, self.was_reset = self.was_reset, False
        return was_reset

    def stats(self) -> ChunkStats | None:
        """Returns the counts since the last call."""
        chunks, prefixes = self.chunks.counts(), self.prefixes.counts()
        return self.counting.report(chunks[0] | prefixes[0], chunks[1] | prefixes[1])
