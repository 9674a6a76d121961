"""``SlabTier``: a secondary tier for vLLM's ``OffloadingConnector``, with vLLM's blocks in a file of limited size.

vLLM copies blocks to its host memory, and gives the rows of that memory to the tier. All methods run in vLLM's
scheduler and return at once.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvcache._native import Slab

from ..host import caller_of
from .identity import identity
from .jobs import Job, Jobs
from .metrics import BUCKETS, COUNTERS, GAUGES, SLAB_TIMES
from .prefill import FirstSteps, PrefillRate
from .settings import SlabSettings, check_room

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

logger = init_logger("vllm.kvcache")

PREFIX = "vllm:kvcache_tier_"


class SlabTier(SecondaryTierManager):
    """Keeps vLLM's offloaded blocks as records in a folder, which survives a restart and a crash."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        chosen = SlabSettings.of(settings)
        self.locality = Locality(chosen.locality) if chosen.locality else None
        row_bytes = self.block_size_bytes
        check_room("limit", settings["limit"], chosen.limit, row_bytes)
        vllm_config = caller_of(KVConnectorBase_V1, "its connector")._vllm_config
        described = identity(offloading_spec, vllm_config, row_bytes, chosen.version)
        parallel = offloading_spec.config.parallel
        # Each replica has its own scheduler, and a folder has one owner.
        replica = [f"replica-{parallel.data_parallel_index}"] if parallel.data_parallel_size > 1 else []
        self.folder = os.path.join(chosen.path, *replica)
        self._slab: Slab | None = Slab(self.folder, described, limit=chosen.limit, row_bytes=row_bytes, policy=chosen.policy)
        self._deadline = chosen.write_deadline
        config = offloading_spec.config
        self._most_tokens = config.cache.blocks_per_chunk * max(group.tokens_per_block for group in config.groups)
        """The number of tokens in a block."""
        prefill = PrefillRate()
        self._first_steps = FirstSteps(prefill, getattr(vllm_config, "max_concurrent_batches", 1))
        # vLLM frees its host memory after this tier has been shut down, and nothing may refer to it then.
        table = np.asarray(primary_kv_view)
        self._jobs = Jobs(self._slab, table, row_bytes, chosen, prefill)
        self._missed: dict[str, set[OffloadKey]] = {}
        """The blocks that could not be loaded, by request. A request asks for a block only once."""
        self._counts: Counter[str] = Counter()
        self._reported: dict[str, int] = {}
        usage = self._slab.usage()
        logger.info("SlabTier opened %s: %d blocks of at most %d bytes", self.folder, usage["records"], usage["limit_bytes"])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._slab is None or self._jobs.loads.reads.rest.is_resting() or key in self._missed.get(req_context.req_id, ()):
            return LookupResult.MISS
        return LookupResult.HIT if self._slab.contains(key) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, is_load=True)

    def _submit(self, given: TransferJob, is_load: bool) -> None:
        context = given.req_context
        # The keys of a store are a set. The beginning of a prompt comes first, and leaves last.
        places = [(context.get_offload_key_position(key) or 0, key, row) for key, row in zip(given.keys, given.chunk_ids.tolist(), strict=True)]
        places.sort(key=lambda place: place[0])
        names, rows = [key for _, key, _ in places], [row for _, _, row in places]
        tokens, before = [], 0
        for end, _, _ in places:
            # Groups of layers have blocks of the same tokens.
            tokens.append(min(self._most_tokens, end - before))
            before = end
        job = Job(given.job_id, names, rows, tokens, is_load, context.req_id)
        if not is_load:
            job.costs = self._first_steps.stored(context.req_id, tokens)
        elif places:
            job.lacks = max(_positions(context).values(), default=0) - (places[0][0] - tokens[0])
        self._jobs.submit(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(job) for job in self._jobs.take_finished()]

    def _result(self, job: Job) -> JobResult:
        is_complete = len(job.done) == len(job.names)
        if not is_complete:
            done = set(job.done)
            failed = [name for name in job.names if name not in done]
            self._counts["loads_failed" if job.is_load else "stores_failed"] += len(failed)
            what = "read" if job.is_load else "written"
            # Computing what a disk is too slow for is no fault.
            level = logging.DEBUG if job.is_slower else logging.WARNING
            logger.log(level, "SlabTier: %d of %d blocks were not %s: %s", len(failed), len(job.names), what, job.reason)
            # The request may have ended.
            if job.is_load and job.request in self._missed:
                self._missed[job.request].update(failed)
        return JobResult(
            job_id=job.number,
            success=is_complete,
            successful_keys=tuple(job.done) if job.is_load and job.done and not is_complete else None,
            transfer_time=job.seconds,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._missed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._missed.pop(req_context.req_id, None)
        # vLLM has the beginning of a prompt that is asked often, so it never asks for it here.
        if positions := _positions(req_context):
            self._jobs.touch(dict(positions))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._jobs.touch({key: req_context.get_offload_key_position(key) or 0 for key in keys})

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._first_steps.step(context.new_req_ids)

    def drain_jobs(self) -> None:
        self._jobs.drain()

    def shutdown(self) -> None:
        slab, self._slab = self._slab, None
        if slab is None:
            return
        self._jobs.close()
        self._jobs.table = None
        if not slab.close(deadline=self._deadline):
            logger.warning("SlabTier: %s did not take its last blocks in %s s", self.folder, self._deadline)

    def usage(self) -> dict[str, int]:
        """Returns what the tier contains, and what it has done since vLLM started, by name."""
        if self._slab is None:
            return {}
        own = {name: self._counts[name] for name in ("loads_failed", "stores_failed")}
        return {**self._slab.usage(), **own, "stores_refused": self._jobs.blocks_refused}

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        gauges = {PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}
        counters = {PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()}
        times = {PREFIX + name: OffloadingHistogramMetadata(documentation=text, buckets=BUCKETS) for name, text in SLAB_TIMES.items()}
        return {**gauges, **counters, **times}

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats, usage = OffloadingConnectorStats(), self.usage()
        for name, value in usage.items():
            change = value - self._reported.get(name, 0)
            if name in GAUGES and (change or name not in self._reported):
                stats.set_gauge(PREFIX + name, value)
            elif name in COUNTERS and change:
                stats.increase_counter(PREFIX + name, change)
        for name, times in (self._slab.take_times() if self._slab is not None else {}).items():
            for seconds in times:
                stats.observe_histogram(PREFIX + name, seconds)
        self._reported = usage or self._reported
        return None if stats.is_empty() else stats


def _positions(context: ReqContext) -> dict[OffloadKey, int]:
    """Returns the number of tokens up to the end of each block of a request."""
    return getattr(context, "_offload_key_positions", {})
