"""The host memory of the offloading, which all workers share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np


class SharedOffloadRegion:
    def __init__(self, engine_id: str, num_chunks: int, rank: int, kv_bytes_per_chunk: int, cpu_page_size: int) -> None:
        self.base = np.zeros((num_chunks, kv_bytes_per_chunk), np.int8)
        self.offset = rank * cpu_page_size
        self.is_clean = False

    def create_next_worker_view(self, tensor_page_size: int) -> SimpleNamespace:
        view = self.base[:, self.offset : self.offset + tensor_page_size]
        self.offset += tensor_page_size
        return SimpleNamespace(numpy=lambda: view)

    def cleanup(self) -> None:
        self.is_clean = True
