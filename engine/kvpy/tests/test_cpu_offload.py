"""``CpuTieringSpec`` copies blocks between vLLM's caches and its host memory, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm.v1.kv_offload.cpu.shared_offload_region as region
from vllm.platforms import Platform
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvcache.vllm import CpuTieringSpec
from kvcache.vllm.disk.cpu import HostCopies

BLOCKS, CHUNKS = 30, 12


class Host:
    """Two groups of layers: the first has two tensors, and the second shares one of them."""

    def __init__(self, blocks_per_chunk: int, rank: int = 0) -> None:
        self.per_chunk = blocks_per_chunk
        draw = np.random.default_rng(blocks_per_chunk)
        self.tensors = [draw.integers(-128, 127, (BLOCKS, page), np.int8) for page in (64, 96)]
        self.groups = [[0, 1], [1]]
        refs = [[SimpleNamespace(tensor_idx=i, page_size_bytes=self.tensors[i].shape[1]) for i in group] for group in self.groups]
        caches = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=SimpleNamespace(numpy=lambda own=tensor: own)) for tensor in self.tensors],
            group_data_refs=refs,
        )
        page = blocks_per_chunk * (64 + 96)
        self.region = region.SharedOffloadRegion("engine", CHUNKS, rank, 4096, page)
        self.copies = HostCopies(caches, blocks_per_chunk, self.region)
        self.start = rank * page

    def naive(self, blocks: GPULoadStoreSpec, chunks: list[int]) -> list[tuple[int, int, slice]]:
        """Returns the tensor, the block, and the bytes of a row of host memory, for each copy."""
        found, block, chunk = [], 0, 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices)):
            place = first % self.per_chunk
            for i in range(count):
                row, inside = chunks[chunk + (place + i) // self.per_chunk], (place + i) % self.per_chunk
                for tensor in self.groups[group]:
                    size = self.tensors[tensor].shape[1]
                    begin = self.start + (self.per_chunk * 64 if tensor else 0) + inside * size
                    found.append((tensor, int(blocks.block_ids[block + i]), row, slice(begin, begin + size)))
            block += count
            chunk += -(-(place + count) // self.per_chunk) if count else 0
        return found


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("sizes", "firsts"), [((4, 0), (0, 0)), ((0, 3), (0, 7)), ((7, 5), (3, 4)), ((1, 1), (14, 1)), ((0, 0), (0, 0))])
def test_blocks_go_and_come_as_by_a_plain_loop(blocks_per_chunk: int, rank: int, sizes: tuple[int, int], firsts: tuple[int, int]) -> None:
    host, draw = Host(blocks_per_chunk, rank), np.random.default_rng(3)
    blocks = GPULoadStoreSpec(draw.permutation(BLOCKS)[: sum(sizes)].tolist(), sizes, firsts)
    chunks = draw.permutation(CHUNKS).tolist()
    places = host.naive(blocks, chunks)
    before = host.region.base.copy()
    assert host.copies.submit_store(7, blocks, SimpleNamespace(block_ids=np.array(chunks, np.int32)))
    for tensor, block, row, bytes_ in places:
        before[row, bytes_] = host.tensors[tensor][block]
    assert np.array_equal(host.region.base, before), "other bytes of host memory changed"
    expected = [tensor.copy() for tensor in host.tensors]
    for tensor, block, _, _ in places:
        host.tensors[tensor][block] = 0
    host.copies.submit_load(8, SimpleNamespace(block_ids=np.array(chunks, np.int32)), blocks)
    assert all(np.array_equal(got, wanted) for got, wanted in zip(host.tensors, expected))
    size = sum(host.tensors[tensor].shape[1] for tensor, *_ in places)
    ended = host.copies.get_finished()
    assert [(one.job_id, one.success, one.transfer_size) for one in ended] == [(7, True, size), (8, True, size)]
    assert host.copies.get_finished() == [] and host.copies.wait({7, 8}) is None
    host.copies.shutdown()
    assert host.region.is_clean and host.copies.host == []


def spec(**changes: Any) -> CpuTieringSpec:
    made = CpuTieringSpec(SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0), **changes))
    made._engine_id, made.num_chunks, made.kv_bytes_per_chunk, made.cpu_page_size_per_worker = "engine", CHUNKS, 4096, 64
    made.blocks_per_chunk = 1
    return made


def test_a_gpu_gets_vllms_own_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = SimpleNamespace(tensors=[], group_data_refs=[])
    with pytest.raises(RuntimeError, match="vLLM's own copies"):
        spec().get_worker(caches)
    monkeypatch.setattr(Platform, "is_cpu", lambda _: True)
    made = spec()
    assert isinstance(made.get_worker(caches), HostCopies) and made.get_worker(caches) is made.get_worker(caches)
    made.config.canonical_layout, made._worker = True, None
    with pytest.raises(ValueError, match="remove canonical_layout"):
        made.get_worker(caches)
