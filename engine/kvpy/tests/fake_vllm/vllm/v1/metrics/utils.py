"""Metrics of each engine."""

from typing import Any


def create_metric_per_engine(metric: Any, labels: dict[int, list[object]]) -> dict[int, Any]:
    return {engine: metric.labels(*values) for engine, values in labels.items()}
