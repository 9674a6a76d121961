"""Counts of the offloading."""

from __future__ import annotations

from typing import Any


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.data: dict[str, Any] = {"types": {}, "data": {}}

    def is_empty(self) -> bool:
        return not self.data["data"]

    def increase_counter(
        self, counter_name: str, counter_increase_value: float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        self.data["types"][counter_name] = "counter"
        values = self.data["data"].setdefault(counter_name, {})
        values[labelvalues] = values.get(labelvalues, 0) + counter_increase_value

    def set_gauge(self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.data["types"][gauge_name] = "gauge"
        self.data["data"].setdefault(gauge_name, {})[labelvalues] = gauge_value

    def observe_histogram(
        self, histogram_name: str, histogram_value: float, labelvalues: tuple[str, ...] = ()
    ) -> None:
        self.data["types"][histogram_name] = "histogram"
        self.data["data"].setdefault(histogram_name, {}).setdefault(labelvalues, []).append(histogram_value)
