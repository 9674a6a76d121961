"""The connector's counts, for vLLM's log and its Prometheus endpoint.

vLLM itself counts the tokens that the connector supplies (``vllm:external_prefix_cache_hits`` and others).
All other counts are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from .disk import metrics as disk

COUNTERS = {
    "chunk_tokens_reused": "Tokens of chunks that an answered request did not have to compute.",
    "chunk_tokens_computed": "Tokens of chunks that were computed for an answered request.",
    "chunk_evictions": "Pieces of chunks evicted to make room.",
    "chunk_requests_refused": "Requests with chunks that were answered without them.",
    "prefix_tokens_found": "Tokens of ordinary prompts that were found in host memory.",
    "prefix_blocks_saved": "Blocks of ordinary prompts that were saved to host memory.",
    "prefix_blocks_evicted": "Blocks of ordinary prompts evicted to make room.",
    **{f"tier_{name}": text for name, text in disk.SLAB_COUNTERS.items()},
}
TIER_GAUGES = tuple(f"tier_{name}" for name in disk.GAUGES)
GAUGES = {
    "chunk_memory_usage_perc": "The share of the memory for chunks that is used, from 0 to 1.",
    "prefix_memory_usage_perc": "The share of the memory for prefixes that is used, from 0 to 1.",
    **{f"tier_{name}": text for name, text in disk.GAUGES.items()},
}


@dataclass
class ChunkStats(KVConnectorStats):
    """The counts since the last report, and the current gauges."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}


class ChunkMetrics(KVConnectorPromMetrics):
    """Counters and gauges for Prometheus, named ``vllm:kvcache_…``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def each(kind: Any, name: str, text: str) -> dict[int, Any]:
            metric = kind(name=f"vllm:kvcache_{name}", documentation=text, labelnames=labelnames)
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self.counters = {name: each(self._counter_cls, name, text) for name, text in COUNTERS.items()}
        self.gauges = {name: each(self._gauge_cls, name, text) for name, text in GAUGES.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self.counters:
                self.counters[name][engine_idx].inc(value)
            elif name in self.gauges:
                self.gauges[name][engine_idx].set(value)


class Counting:
    """Turns totals into differences between reports."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.gauges: dict[str, float] = {}

    def report(self, totals: dict[str, int], gauges: dict[str, float]) -> ChunkStats | None:
        """Returns the counts since the last report, and the gauges; None if nothing has changed."""
        if totals == self.totals and gauges == self.gauges:
            return None
        since = {name: total - self.totals.get(name, 0) for name, total in totals.items()}
        self.totals, self.gauges = totals, gauges
        return ChunkStats({**since, **gauges})
