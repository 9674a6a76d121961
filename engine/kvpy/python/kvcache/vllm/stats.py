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
HISTOGRAMS = {f"tier_{name}": text for name, text in disk.TIMES.items()}


@dataclass
class ChunkStats(KVConnectorStats):
    """The counts and the measured times since the last report, and the current gauges."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if name in HISTOGRAMS:
                self.data[name] = [*self.data.get(name, ()), *value]
            else:
                self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced = {name: round(value, 3) for name, value in self.data.items() if name not in HISTOGRAMS}
        for name in HISTOGRAMS:
            if times := self.data.get(name):
                reduced |= {f"{name}_mean": round(sum(times) / len(times), 4), f"{name}_max": round(max(times), 4)}
        return reduced


class ChunkMetrics(KVConnectorPromMetrics):
    """Counters, gauges and histograms for Prometheus, named ``vllm:kvcache_…``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def each(kind: Any, name: str, text: str, **more: Any) -> dict[int, Any]:
            metric = kind(name=f"vllm:kvcache_{name}", documentation=text, labelnames=labelnames, **more)
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self.counters = {name: each(self._counter_cls, name, text) for name, text in COUNTERS.items()}
        self.gauges = {name: each(self._gauge_cls, name, text) for name, text in GAUGES.items()}
        self.histograms = {name: each(self._histogram_cls, name, text, buckets=disk.BUCKETS) for name, text in HISTOGRAMS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self.counters:
                self.counters[name][engine_idx].inc(value)
            elif name in self.gauges:
                self.gauges[name][engine_idx].set(value)
            elif name in self.histograms:
                for seconds in value:
                    self.histograms[name][engine_idx].observe(seconds)


class Counting:
    """Turns totals into differences between reports."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.gauges: dict[str, float] = {}

    def report(self, totals: dict[str, int], gauges: dict[str, float], times: dict[str, list[float]] | None = None) -> ChunkStats | None:
        """Returns the counts since the last report, the gauges, and the measured ``times``; None if nothing has changed."""
        times = {name: measured for name, measured in (times or {}).items() if measured}
        if totals == self.totals and gauges == self.gauges and not times:
            return None
        since = {name: total - self.totals.get(name, 0) for name, total in totals.items()}
        self.totals, self.gauges = totals, gauges
        return ChunkStats({**since, **gauges, **times})
