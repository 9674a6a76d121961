"""``CpuTieringSpec``: vLLM's ``TieringOffloadingSpec``, with which vLLM offloads blocks on a CPU, too.

vLLM's own copies blocks with a GPU's streams, and refuses to start without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


class HostCopies(OffloadingWorker):
    """Copies blocks between vLLM's caches and its host memory, both of which are in this machine's memory."""

    def __init__(self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self.region, self.blocks_per_chunk = region, blocks_per_chunk
        self.groups = caches.group_data_refs
        self.caches: list[Any] = [cache.tensor.numpy() for cache in caches.tensors]
        """Per tensor, the bytes of each block."""
        self.host: list[Any] = []
        """Per tensor, the bytes of each block of each chunk."""
        for cache in self.caches:
            page = cache.shape[1]
            view = region.create_next_worker_view(page * blocks_per_chunk).numpy()
            shape = (view.shape[0], blocks_per_chunk, page)
            self.host.append(np.lib.stride_tricks.as_strided(view, shape, (view.strides[0], page, 1)))
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_load=True)

    def _copy(self, job_id: int, of_caches: GPULoadStoreSpec, of_host: CPULoadStoreSpec, is_load: bool) -> bool:
        began, size = time.perf_counter(), 0
        for group, blocks, chunks, places in self._places(of_caches, of_host):
            for ref in self.groups[group]:
                cache, host = self.caches[ref.tensor_idx], self.host[ref.tensor_idx]
                if is_load:
                    cache[blocks] = host[chunks, places]
                else:
                    host[chunks, places] = cache[blocks]
                size += len(blocks) * ref.page_size_bytes
        seconds = time.perf_counter() - began
        self.finished.append(TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=seconds))
        return True

    def _places(self, of_caches: GPULoadStoreSpec, of_host: CPULoadStoreSpec) -> Iterator[tuple[int, Any, Any, Any]]:
        """Yields for each group the IDs of its blocks, and the chunk and the place in the chunk of each block. The
        first block of a group may stand in the middle of a chunk.
        """
        block = chunk = 0
        for group, (count, first) in enumerate(zip(of_caches.group_sizes, of_caches.block_indices, strict=True)):
            if count == 0:
                continue
            places = np.arange(count) + first % self.blocks_per_chunk
            chunks = of_host.block_ids[chunk + places // self.blocks_per_chunk]
            yield group, of_caches.block_ids[block : block + count], chunks, places % self.blocks_per_chunk
            block += count
            chunk += places[-1] // self.blocks_per_chunk + 1

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        # A copy has ended when it has been submitted.
        return

    def shutdown(self) -> None:
        # The region frees its memory only if nothing refers to it.
        self.host.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """Offloads on a CPU. On other devices, it is vLLM's ``TieringOffloadingSpec``."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.config.canonical_layout:
                raise ValueError("CpuTieringSpec copies blocks as they are; remove canonical_layout from kv_connector_extra_config")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, self.blocks_per_chunk, region)
        return self._worker
