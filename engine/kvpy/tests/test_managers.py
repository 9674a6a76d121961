"""Blocks, sequences and requests by ID, ranks' caches and the profiler, against NumPy and plain lists.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import kvcache
import numpy as np
import pytest

LAYERS, HEADS, DIM, SIZE = 2, 3, 8, 4


def manager(num_blocks: int = 8) -> kvcache.BlockManager:
    return kvcache.BlockManager(LAYERS, HEADS, DIM, SIZE, num_blocks)


def drawn(tokens: int, seed: int, heads: int = HEADS) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values ``[heads, tokens, dim]``."""
    keys, values = np.random.default_rng(seed).standard_normal((2, heads, tokens, DIM), dtype=np.float32)
    return keys, values


def numpy_of(tensor: kvcache.Tensor) -> np.ndarray:
    array = np.from_dlpack(tensor)
    assert array.shape == tensor.shape
    return array


def same(pair: tuple[kvcache.Tensor, kvcache.Tensor], keys: np.ndarray, values: np.ndarray) -> bool:
    return np.array_equal(numpy_of(pair[0]), keys) and np.array_equal(numpy_of(pair[1]), values)


# BlockManager


def test_blocks_are_written_and_read_as_an_array_is() -> None:
    blocks = manager()
    dense = np.zeros((2, LAYERS, 8, HEADS, SIZE, DIM), np.float32)
    ids = blocks.allocate_blocks(3, seq_id=7)
    assert len(set(ids)) == 3 and blocks.num_free_blocks() == 5
    for seed, (layer, block, offset, tokens) in enumerate([(0, ids[2], 0, 4), (1, ids[0], 1, 2), (1, ids[2], 3, 1)]):
        keys, values = drawn(tokens, seed)
        blocks.write_kv(layer, block, offset, keys, values)
        dense[0, layer, block, :, offset : offset + tokens] = keys
        dense[1, layer, block, :, offset : offset + tokens] = values
    assert np.array_equal(numpy_of(blocks.k_storage), dense[0]) and np.array_equal(numpy_of(blocks.v_storage), dense[1])
    order = [ids[2], ids[0]]
    for layer in range(LAYERS):
        keys, values = (plane[layer, order].transpose(1, 0, 2, 3).reshape(HEADS, -1, DIM)[:, :7] for plane in dense)
        assert same(blocks.read_kv(layer, order, 7), keys, values)
    assert blocks.max_tokens_supported() == 8 * SIZE
    assert blocks.get_memory_usage() == dense.nbytes
    blocks.reset()
    assert blocks.num_free_blocks() == 8


def test_wrong_block_numbers_are_errors_that_change_nothing() -> None:
    blocks = manager(4)
    ids = blocks.allocate_blocks(3)
    with pytest.raises(RuntimeError, match="asked 2|2 blocks|out of blocks") as error:
        blocks.allocate_blocks(2)
    assert isinstance(error.value, kvcache.KvCacheError) and (error.value.asked, error.value.free) == (2, 1)
    (free,) = set(range(4)) - set(ids)
    keys, values = drawn(3, 0)
    for wrong in ([ids[0], free], [ids[0], ids[0]], [4]):
        with pytest.raises(kvcache.KvCacheError):
            blocks.free_blocks(wrong)
    for layer, block, offset in ((0, free, 0), (0, ids[0], 2), (2, ids[0], 0)):
        with pytest.raises(kvcache.KvCacheError):
            blocks.write_kv(layer, block, offset, keys, values)
    with pytest.raises(kvcache.KvCacheError):
        blocks.write_kv(0, ids[0], 0, keys[:2], values[:2])
    with pytest.raises(kvcache.KvCacheError):
        blocks.read_kv(0, ids, 13)
    assert blocks.num_free_blocks() == 1 and not numpy_of(blocks.k_storage).any()
    blocks.free_blocks(ids)
    with pytest.raises(kvcache.KvCacheError, match="not allocated"):
        blocks.free_blocks(ids[:1])
    with pytest.raises(kvcache.KvCacheError, match="block_size"):
        kvcache.BlockManager(1, 1, 8, 0, 1)
    with pytest.raises(ValueError, match="unknown element type"):
        kvcache.BlockManager(1, 1, 8, dtype="float64")
    with pytest.raises(ValueError, match="unknown device"):
        kvcache.BlockManager(1, 1, 8, device="tpu")


def test_a_manager_is_made_of_configurations() -> None:
    model: dict[str, Any] = dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    engine = SimpleNamespace(device="cpu", dtype=np.float16)
    blocks = kvcache.BlockManager.from_config(SimpleNamespace(**model), engine)
    assert blocks.k_storage.shape == (3, 256, 2, 16, 8) and numpy_of(blocks.k_storage).dtype == np.float16
    short = SimpleNamespace(num_layers=1, num_kv_heads=2, head_dim=16, head_dims=None)
    assert kvcache.BlockManager.from_config(short, engine, 8, 4).v_storage.shape == (1, 4, 2, 8, 16)
    with pytest.raises(AttributeError, match="num_kv_heads"):
        kvcache.BlockManager.from_config(SimpleNamespace(num_layers=1, head_dim=16), engine)


def test_memory_of_a_tensor_outlives_its_manager() -> None:
    blocks = manager()
    (block,) = blocks.allocate_blocks(1)
    keys, values = drawn(4, 3)
    blocks.write_kv(0, block, 0, keys, values)
    storage, (read, _) = numpy_of(blocks.k_storage), blocks.read_kv(0, [block], 4)
    del blocks
    assert np.array_equal(storage[0, block], keys) and np.array_equal(numpy_of(read), keys)
    with pytest.raises(BufferError):
        np.from_dlpack(read, copy=True)


# PagedKVCache


def test_a_paged_sequence_is_a_dense_one() -> None:
    """Tokens are appended in pieces across blocks, with another sequence in between, and rolled
    back once."""
    blocks = manager(16)
    cache = kvcache.PagedKVCache(blocks)
    other, seq = cache.create_sequence(), cache.create_sequence()
    one = kvcache.PagedKVCacheWrapper(cache, seq)
    dense = [(np.zeros((HEADS, 0, DIM), np.float32),) * 2 for _ in range(LAYERS)]
    at = 0
    for seed, (back, tokens) in enumerate([(0, 5), (0, 1), (2, 4), (0, 3)]):
        at -= back
        for layer in (1, 0):
            new = drawn(tokens, 10 * seed + layer)
            k, v = (np.concatenate([old[:, :at], rows], 1) for old, rows in zip(dense[layer], new))
            dense[layer] = (k, v)
            if back == 0 and layer == 0:
                cache.append_kv(seq, layer, *new)
                assert same(cache.get_kv(seq, layer), k, v)
            elif layer == 0:
                assert same(cache.update(seq, layer, *new, at), k, v)
            else:
                assert same(one.update(layer, *new, at), k, v)
        cache.append_kv(other, 0, *drawn(3, 99))
        at += tokens
        assert cache.get_seq_len(seq) == at, "the length grows once per token, not once per layer"
    for length in (0, 1, 7, at):
        k, v = dense[1]
        assert same(one.get_layer_kv(1, length), k[:, :length], v[:, :length])
    with pytest.raises(kvcache.KvCacheError):
        one.get_layer_kv(0, at + 1)
    assert 16 - blocks.num_free_blocks() == -(-at // SIZE) + 3, "layers share blocks"
    cache.delete_sequence(seq)
    cache.delete_sequence(other)
    assert blocks.num_free_blocks() == 16


def test_wrong_calls_of_sequences_change_nothing() -> None:
    blocks = manager(4)
    cache = kvcache.PagedKVCache(blocks, max_blocks_per_seq=2)
    assert cache.create_sequence(7) == 7 and cache.create_sequence() == 8
    with pytest.raises(kvcache.KvCacheError, match="exists"):
        cache.create_sequence(7)
    rows = drawn(6, 0)
    cache.append_kv(7, 0, *rows)
    with pytest.raises(kvcache.KvCacheError, match="3 blocks, but the limit is 2"):
        cache.append_kv(7, 0, *rows)
    with pytest.raises(kvcache.KvCacheError):
        cache.append_kv(7, 2, *rows)
    with pytest.raises(kvcache.KvCacheError):
        cache.append_kv(7, 0, *drawn(1, 0, HEADS + 1))
    with pytest.raises(kvcache.KvCacheError):
        cache.update(7, 0, *drawn(1, 0), 7)
    with pytest.raises(kvcache.KvCacheError):
        kvcache.PagedKVCacheWrapper(cache, 9)
    assert cache.get_seq_len(7) == 6 and blocks.num_free_blocks() == 2 and same(cache.get_kv(7, 0), *rows)
    blocks.reset()
    assert blocks.num_free_blocks() == 2, "blocks of sequences stay with them"
    held = blocks.allocate_blocks(2)
    with pytest.raises(RuntimeError):
        cache.append_kv(8, 0, *rows)
    blocks.free_blocks(held)
    cache.append_kv(8, 0, *rows)


# KVCache


def computed(layers: range, tokens: range) -> np.ndarray:
    """A model's results, ``[layers, batch, heads, tokens, dim]``. All elements differ."""
    whole = np.arange(36 * 2 * 3 * 21 * 4, dtype=np.float32).reshape(36, 2, 3, 21, 4)
    return whole[layers.start : layers.stop, :, :, tokens.start : tokens.stop]


def test_every_rank_ends_with_36_layers_of_21_tokens() -> None:
    """The example from the specification: 3 stages of 12 layers, 3 chunks of 7 tokens."""
    own = [kvcache.KVCache(2, 3, 21, 4, num_layers=12) for _ in range(3)]
    merged, piecewise = (kvcache.KVCache(2, 3, 21, 4, num_layers=36) for _ in range(2))
    piecewise.expect_chunks(21, 7, 3)
    for chunk in range(3):
        tokens = range(7 * chunk, 7 * chunk + 7)
        pieces = [computed(range(12 * stage, 12 * stage + 12), tokens) for stage in range(3)]
        for stage, piece in enumerate(pieces):
            appended = numpy_of(own[stage].append_sequence(piece))
            assert np.array_equal(appended, computed(range(12 * stage, 12 * stage + 12), range(tokens.stop)))
        assert np.array_equal(numpy_of(merged.merge_from_ranks(pieces)), computed(range(36), range(tokens.stop)))
        assert merged.current_length == own[0].current_length == tokens.stop, "merging by layer adds no tokens"
    # The same pieces in another order. Tokens after a gap are not readable.
    for n, (stage, chunk) in enumerate([(2, 1), (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (1, 2), (2, 2), (0, 2)]):
        piecewise.receive(computed(range(12 * stage, 12 * stage + 12), range(7 * chunk, 7 * chunk + 7)), chunk, stage)
        assert piecewise.current_length == (0 if n < 5 else 14 if n < 8 else 21)
    for cache in (merged, piecewise):
        data = numpy_of(cache.get_data())
        assert data.flags.c_contiguous and np.array_equal(data, computed(range(36), range(21)))
    received = piecewise.cache_received_indicator
    assert received is not None and (np.array(received.tolist()) == 1).all() and received.is_complete()
    assert str(received).splitlines() == [
        "Chunk    |  PP0  PP1  PP2",
        "-------------------------",
        "Chunk0   |    1    1    1",
        "Chunk1   |    1    1    1",
        "Chunk2   |    1    1    1",
        "received: 9/9 (100.0 %)",
    ]


def test_a_cache_of_one_layer_grows_along_the_sequence() -> None:
    layer = kvcache.KVCache(2, 3, 10, 4)
    parts = [computed(range(1), range(start, end))[0] for start, end in ((0, 4), (4, 5), (5, 8))]
    assert layer.append_sequence(parts[0]).shape == (2, 3, 4, 4)
    both = numpy_of(layer.merge_from_ranks(parts[1:], dim=2))
    assert np.array_equal(both, np.concatenate(parts, 2))
    data = layer.get_data()
    assert data.is_contiguous and np.array_equal(numpy_of(data), both) and layer.current_length == 8
    with pytest.raises(kvcache.KvCacheError, match="tokens of the cache"):
        layer.append_sequence(parts[2])
    with pytest.raises(kvcache.KvCacheError, match="layers of all ranks"):
        layer.merge_from_ranks([parts[1], parts[1]])
    with pytest.raises(ValueError, match="dim must be"):
        layer.merge_from_ranks(parts[1:2], dim=1)
    assert np.array_equal(numpy_of(layer.get_data()), both), "errors change nothing"
    address = np.from_dlpack(layer.append_sequence(parts[1])).ctypes.data
    layer.reset()
    assert layer.current_length == 0 and layer.get_data().shape == (2, 3, 0, 4)
    assert np.from_dlpack(layer.append_sequence(parts[0])).ctypes.data == address, "the memory stays"


def test_wrong_pieces_are_errors_that_change_nothing() -> None:
    cache = kvcache.KVCache(2, 3, 21, 4, num_layers=5)
    piece = computed(range(3), range(3))
    with pytest.raises(kvcache.KvCacheError, match="chunk"):
        cache.receive(piece, 0, 0)
    assert cache.cache_received_indicator is None
    with pytest.raises(kvcache.KvCacheError, match="tokens of the plan"):
        cache.expect_chunks(22, 3, 2)
    cache.expect_chunks(7, 3, 2)
    cache.receive(piece, 0, 0)
    for wrong, chunk, stage in ((piece, 0, 0), (piece, 0, 1), (piece, 3, 0), (piece, 0, 2), (piece.astype(np.float16), 1, 0)):
        with pytest.raises(kvcache.KvCacheError):
            cache.receive(wrong, chunk, stage)
    with pytest.raises(kvcache.KvCacheError, match="pieces received"):
        cache.append_sequence(computed(range(5), range(1)))
    received = cache.cache_received_indicator
    assert received is not None and received.tolist() == [[1, 0], [0, 0], [0, 0]] and cache.current_length == 0
    assert received.missing() == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] and received.completion == 1 / 6


def test_a_matrix_counts_by_piece_chunk_and_stage() -> None:
    matrix = kvcache.ReceivedMatrix(2, 3)
    for chunk, stage in ((0, 0), (0, 1), (0, 2), (1, 1)):
        matrix.record(chunk, stage)
    assert matrix.shape == (2, 3) and matrix.tolist() == [[1, 1, 1], [0, 1, 0]]
    assert (matrix.is_chunk_complete(0), matrix.is_chunk_complete(1)) == (True, False)
    assert (matrix.is_stage_complete(1), matrix.is_stage_complete(2)) == (True, False)
    assert matrix.is_received(1, 1) and not matrix.is_received(1, 0) and not matrix.is_complete()
    with pytest.raises(kvcache.KvCacheError, match="already"):
        matrix.record(1, 1)
    with pytest.raises(kvcache.KvCacheError):
        matrix.record(2, 0)
    with pytest.raises(kvcache.KvCacheError):
        kvcache.ReceivedMatrix(0, 1)


# KvStorageManager


def test_a_second_reservation_adds_to_the_first() -> None:
    storage = kvcache.KvStorageManager(10, 16)
    first, second = storage.reserve_blocks(1, 2), storage.reserve_blocks(1, 3)
    assert storage.get_blocks(1) == first + second and len(set(first + second)) == 5 and storage.block_size == 16
    with pytest.raises(kvcache.KvCacheError) as error:
        storage.reserve_blocks(2, 6)
    assert (error.value.asked, error.value.free) == (6, 5)
    metrics = storage.export_metrics()
    assert (metrics.available_blocks, metrics.inflight_blocks, metrics.total_blocks, metrics.utilization) == (5, 5, 10, 0.5)
    assert storage.release_blocks(1) == 5, "none is lost"
    assert (storage.available_count(), storage.inflight_count()) == (10, 0)
    for call in (storage.release_blocks, storage.get_blocks, storage.take_blocks):
        with pytest.raises(kvcache.KvCacheError, match="unknown request 1"):
            call(1)


def test_shared_blocks_of_a_request_are_found_and_evicted() -> None:
    storage = kvcache.KvStorageManager(4, 16)
    keys = [bytes([i]) * 32 for i in range(3)]
    storage.reserve_blocks(1, 3)
    assert storage.export_metrics().states == {"available": 1, "reserved": 3, "in_use": 0, "cached": 0}
    shared = storage.take_blocks(1).register(keys)
    assert storage.export_metrics().states == {"available": 1, "reserved": 0, "in_use": 3, "cached": 0}
    shared.release()
    assert storage.export_metrics().states == {"available": 1, "reserved": 0, "in_use": 0, "cached": 3}
    assert storage.pool.cached_prefix(keys) == 3 and storage.available_count() == 4
    storage.reserve_blocks(2, 4)
    assert storage.pool.cached_prefix(keys) == 0 and storage.export_metrics().to_dict()["evictions"] == 3


def test_metrics_are_compared_with_their_goals_and_exported() -> None:
    storage = kvcache.KvStorageManager(10, 16)
    nothing = storage.export_metrics()
    assert nothing.goals()["allocation_latency_p99"] is None
    storage.reserve_blocks(1, 9)
    storage.reserve_blocks(2, 0)
    storage.release_blocks(2)
    goals = storage.export_metrics().goals()
    assert (goals["available_blocks"], goals["inflight_blocks"]) == (False, False)
    assert set(map(type, goals.values())) == {bool}
    metrics = storage.export_metrics()
    assert (metrics.to_dict()["reservations"], metrics.to_dict()["releases"]) == (2, 1)
    assert 'kvcore_pool_in_flight_blocks{pool="gpu"} 9.0\n' in metrics.prometheus("gpu")


def test_thresholds_say_how_many_blocks_to_move() -> None:
    tiers = kvcache.StorageTierConfig()
    assert (tiers.gpu_offload_threshold, tiers.cpu_offload_threshold, tiers.prefetch_threshold) == (0.85, 0.9, 0.7)
    for used in range(101):
        assert tiers.blocks_to_offload("gpu", used, 100) == max(0, used - 85)
        assert tiers.blocks_to_offload("cpu", used, 100) == max(0, used - 90)
        assert tiers.blocks_to_prefetch(0.8, 20, used, 100) == min(20, max(0, 85 - used))
        assert tiers.blocks_to_prefetch(0.7, 20, used, 100) == 0
    with pytest.raises(kvcache.KvCacheError, match="between 0 and 1"):
        kvcache.StorageTierConfig(gpu_offload_threshold=1.5)
    with pytest.raises(ValueError, match="unknown tier"):
        tiers.blocks_to_offload("disk", 1, 2)  # type: ignore[arg-type]


# SimpleProfiler


def test_spans_and_counters_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = kvcache.SimpleProfiler()
    for pause in (0.002, 0.004):
        with profiler.record("outer"), profiler.record("inner"):
            time.sleep(pause)
    with pytest.raises(ZeroDivisionError), profiler.record("inner"):
        1 / 0  # noqa: B018
    profiler.increment("tokens", 512)
    profiler.increment("tokens")
    found = profiler.summary()
    inner, outer = found["inner"], found["outer"]
    assert (inner["count"], outer["count"], found["tokens"]) == (3, 2, {"value": 513})
    # Lower limits only: the machine may be busy.
    assert inner["max_time"] >= 0.004 and outer["min_time"] >= 0.002 and outer["max_time"] >= 0.004
    assert outer["total_time"] >= 0.006 and inner["avg_time"] == inner["total_time"] / 3
    profiler.print_summary()
    lines = capsys.readouterr().out.splitlines()
    longest_first = sorted(("inner", "outer"), key=lambda name: -found[name]["total_time"])
    assert [line.split()[0] for line in lines] == ["span", *longest_first, "counter", "tokens"]
    profiler.reset()
    assert profiler.summary() == {}


def test_a_profiler_that_is_off_records_nothing() -> None:
    off = kvcache.SimpleProfiler(enabled=False)
    with off.record("a"):
        off.increment("b")
    assert off.summary() == {}
