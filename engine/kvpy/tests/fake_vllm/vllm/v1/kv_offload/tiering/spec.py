"""The offloading with secondary tiers."""

from __future__ import annotations

from typing import Any


class TieringOffloadingSpec:
    def __init__(self, config: Any) -> None:
        self.config = config
        self._worker: Any = None

    def get_worker(self, kv_caches: Any) -> Any:
        raise RuntimeError("vLLM's own copies")
