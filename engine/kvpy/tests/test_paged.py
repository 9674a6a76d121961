"""The paged cache on NumPy arrays: pools, tables, slots, and the operations of an arena, against plain
NumPy."""

import json

import kvcache
import numpy as np
import pytest
from test_native import CONFIG, DIM, HEADS, LAYERS, ropes, turned

QUERY_HEADS = 4


def arena(blocks: int = 16) -> kvcache.Arena:
    return kvcache.Arena(
        num_layers=LAYERS, num_blocks=blocks, block_size=16, num_heads=HEADS, head_dim=DIM, dtype_name="float32"
    )


def rows(count: int, seed: int, heads: int = HEADS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, heads, DIM), dtype=np.float32)


def stored(own: kvcache.Arena, layer: int, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.zeros((2, len(slots), HEADS, DIM), np.float32)
    own.gather(layer, slots, k, v)
    return k, v


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Plain attention with grouped heads. ``visible`` has one row per query."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    logits = np.einsum("qhd,thd->hqt", q, k) / np.sqrt(DIM)
    logits = np.where(visible[None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqt,thd->qhd", weights / weights.sum(-1, keepdims=True), v)


def test_rows_are_scattered_to_the_slots_of_a_table_and_gathered_back() -> None:
    own, pool = arena(), kvcache.BlockPool(16)
    table = kvcache.BlockTable(pool, 16)
    slots = table.grow(20)
    assert slots.tolist() == table.slots(0, 20) and len(table) == len(slots) == 20
    k, v = rows(20, 1), rows(20, 2)
    own.scatter(1, k, v, slots)
    got = stored(own, 1, table.slots(0, 20))
    assert np.array_equal(got[0], k) and np.array_equal(got[1], v)
    own.scatter(0, k, v, slots, ropes=ropes(), positions=np.arange(100, 120))
    keys, _ = stored(own, 0, table.slots(0, 20))
    expected = np.stack([turned(row, 0, 100 + i) for i, row in enumerate(k)])
    assert np.allclose(keys, expected, atol=1e-5)
    back = np.zeros((2, 20, HEADS, DIM), np.float32)
    own.gather(0, table.slots(0, 20), back[0], back[1], ropes=ropes(), distance=-100)
    assert np.allclose(back[0], np.stack([turned(row, 0, i) for i, row in enumerate(k)]), atol=1e-5)
    table.release()
    assert pool.counts()["free"] == 16


def test_attention_over_a_table_is_that_of_plain_arrays() -> None:
    own, pool = arena(), kvcache.BlockPool(16)
    table = kvcache.BlockTable(pool, 16)
    k, v, q = rows(37, 1), rows(37, 2), rows(5, 3, QUERY_HEADS)
    own.scatter(1, k, v, table.grow(37))
    work = kvcache.AttendWork([(5, [table.segment()])])
    out, lse = np.empty_like(q), np.empty((5, QUERY_HEADS), np.float32)
    own.attend(1, q, work, out, lse=lse)
    visible = np.arange(37)[None] <= np.arange(32, 37)[:, None]
    assert np.allclose(out, attention(q, k, v, visible), atol=1e-5) and np.isfinite(lse).all()
    own.attend(1, q, work, out, window=8)
    near = visible & (np.arange(37)[None] > np.arange(32, 37)[:, None] - 8)
    assert np.allclose(out, attention(q, k, v, near), atol=1e-5)


def test_a_prefix_is_found_by_its_keys_and_a_fork_copies_what_it_writes() -> None:
    own, pool = arena(), kvcache.BlockPool(16)
    root = kvcache.key_root("m", b"1", ropes(), dtype_name="float32", num_heads=HEADS, head_dim=DIM, block_size=16)
    tokens = list(range(40))
    keys = kvcache.prefix_keys(root, tokens, 16)
    assert len(keys) == 2 and kvcache.prefix_keys(root, tokens[:32], 16) == keys
    table = kvcache.BlockTable(pool, 16)
    old = table.grow(40)
    own.scatter(0, rows(40, 1), rows(40, 2), old)
    table.share_full(keys)
    with pytest.raises(kvcache.KvCacheError, match="permit|void|slots"):
        own.scatter(0, rows(40, 1), rows(40, 2), old)
    assert pool.cached_prefix(keys) == 2
    found = pool.lookup(keys)
    twin = kvcache.BlockTable(pool, 16, found)
    assert twin.block_ids == table.block_ids[:2] and len(twin) == 32
    with pytest.raises(RuntimeError, match="released"):
        found.ids  # noqa: B018
    fork = table.fork()
    copy = fork.unshare_tail()
    assert copy is not None and copy.pairs == [(table.block_ids[2], fork.block_ids[2])]
    own.copy(copy)
    assert np.array_equal(stored(own, 0, fork.slots(32, 40))[0], stored(own, 0, table.slots(32, 40))[0])
    for one in (table, twin, fork):
        one.release()
    assert pool.counts()["cached"] == 2 and pool.clear_cached() == 2
    pool.check_invariants()


def test_blocks_are_filled_registered_and_evicted_when_room_is_needed() -> None:
    pool = kvcache.BlockPool(4, start=8, policy="s3-fifo")
    blocks = pool.allocate(3)
    assert blocks.ids == [8, 9, 10] and len(blocks) == 3
    with pytest.raises(kvcache.KvCacheError) as error:
        pool.allocate(2)
    assert (error.value.kind, error.value.asked, error.value.free) == ("OutOfBlocks", 2, 1)
    with pytest.raises(kvcache.KvCacheError, match="keys of the blocks"):
        blocks.register([bytes(32)])
    keys = kvcache.vllm_keys(list(range(48)), 16)
    shared = blocks.register(keys)
    shared.release()
    assert pool.counts()["cached"] == 3
    pool.allocate(4).release()
    counts = pool.counts()
    assert (counts["cached"], counts["evictions"]) == (0, 3)
    with pytest.raises(ValueError, match="policy"):
        kvcache.BlockPool(1, policy="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ttl"):
        kvcache.BlockPool(1, ttl=-1.0)


def test_keys_for_vllm_equal_vllms() -> None:
    # vLLM's `sha256_cbor`: its parent for first blocks, and the salt in the first block only.
    plain, salted = kvcache.vllm_keys(list(range(32)), 16), kvcache.vllm_keys(list(range(32)), 16, cache_salt="alice")
    assert len(plain) == 2 and plain != salted and kvcache.vllm_keys(list(range(32)), 16, cache_salt="") == plain
    assert kvcache.vllm_keys(list(range(32)), 16, seed="0") != plain


def test_a_chunk_is_attended_to_at_any_position_without_a_copy() -> None:
    """Two documents computed separately and used in the other order give the same attention as plain arrays
    with rotated keys.
    """
    own, chunks = arena(), kvcache.ChunkCacheManager(kvcache.ChunkCacheConfig(), 8, 16)
    pool, turn = kvcache.BlockPool(8, start=8), ropes()
    root = kvcache.key_root("m", b"1", turn, dtype_name="float32", num_heads=HEADS, head_dim=DIM, block_size=16)
    raw, holds = {}, {}
    for name, count in (("a", 20), ("b", 33)):
        (missing,) = chunks.acquire(root, "alone", [], list(range(count)), 0)
        raw[name] = rows(count, count), rows(count, count + 1)
        own.scatter(0, *raw[name], missing.write_slots(), ropes=turn, positions=range(count))
        holds[name] = missing.store()
    question = kvcache.BlockTable(pool, 16)
    k, v, q = rows(3, 7), rows(3, 8), rows(3, 9, QUERY_HEADS)
    own.scatter(0, k, v, question.grow(3), ropes=turn, positions=[53, 54, 55])
    segments = [
        holds["b"].segment(0, 0),
        holds["a"].segment(33, 33),
        question.segment(logical_start=53, stored_start=53),
    ]
    assert [segment.position for segment in segments] == [0, 33, 53]
    out = np.empty_like(q)
    own.attend(0, q, kvcache.AttendWork([(3, segments)]), out, ropes=turn)

    def rotated(values: np.ndarray) -> np.ndarray:
        return np.stack([turned(row, 0, i) for i, row in enumerate(values)])

    keys = rotated(np.concatenate([raw["b"][0], raw["a"][0], k]))
    queries = np.stack([turned(row, 0, 53 + i) for i, row in enumerate(q)])
    visible = np.arange(56)[None] <= np.arange(53, 56)[:, None]
    values = np.concatenate([raw["b"][1], raw["a"][1], v])
    assert np.allclose(out, attention(queries, keys, values, visible), atol=1e-4)
    with pytest.raises(kvcache.KvCacheError, match="offset"):
        own.attend(0, q, kvcache.AttendWork([(3, segments)]), out)


def test_whole_blocks_are_rotated_from_their_originals() -> None:
    own = arena()
    k, v = rows(16, 1), rows(16, 2)
    own.scatter(1, k, v, range(32, 48))
    own.rotate([(2, 5)], ropes(), 7)
    keys, values = stored(own, 1, list(range(80, 96)))
    assert np.allclose(keys, np.stack([turned(row, 1, 7) for row in k]), atol=1e-5) and np.array_equal(values, v)
    with pytest.raises(kvcache.KvCacheError, match="twice|source and destination"):
        own.rotate([(2, 2)], ropes(), 7)


def test_prompts_have_places_and_hashes() -> None:
    prompt = kvcache.ChunkedPrompt([1, 2, 3], [[4] * 5, [5] * 8], [6])
    assert prompt.get_total_tokens() == 17 and prompt.chunks == [[4] * 5, [5] * 8]
    assert (prompt.sys_prompt, prompt.user_question) == ([1, 2, 3], [6])
    plan = prompt.positions()
    assert plan.question_position == 3 + 8 and [place.used_start for place in plan.chunks] == [3, 3]
    apart = prompt.positions("alone", "sequential")
    assert [(p.logical_start, p.stored_start, p.used_start, p.num_tokens) for p in apart.chunks] == [(3, 0, 3, 5), (8, 0, 8, 8)]
    with pytest.raises(kvcache.KvCacheError) as error:
        prompt.positions(max_positions=11)
    assert error.value.kind == "TooLong"
    with pytest.raises(kvcache.KvCacheError, match="chunk 1"):
        kvcache.ChunkedPrompt([1], [[]], [2])
    chunks = kvcache.ChunkCacheManager(kvcache.ChunkCacheConfig(), 8, 16)
    hashes = [chunks.compute_chunk_hash(bytes(32), "alone", system, [1, 2, 3]) for system in ([], [9])]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 1 and hashes[0][0].token_count == 3
    assert chunks.compute_chunk_hash(bytes(32), "with-system", [9], [1, 2, 3]) != hashes[0]
    assert len({*hashes[0], *hashes[1]}) == 1 and len(hashes[0][0].hash_bytes) == 32


def test_wrong_operands_are_refused_and_nothing_is_written() -> None:
    own = arena()
    k = rows(2, 1)
    frozen = rows(2, 1)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, BufferError), match="read-?only"):
        own.gather(0, [0, 1], frozen, k)
    for slots, reason in (([0], "rows|slots"), ([0, 16 * 16], "out of range"), ([0, 1, 2], "rows|slots")):
        with pytest.raises(kvcache.KvCacheError, match=reason):
            own.scatter(0, k, k, slots)
    with pytest.raises(kvcache.KvCacheError, match="layer"):
        own.scatter(LAYERS, k, k, [0, 1])
    with pytest.raises(kvcache.KvCacheError, match="dim|extent|shape"):
        own.scatter(0, k[:, :, :16], k, [0, 1])
    with pytest.raises(ValueError, match="both ropes and positions"):
        own.scatter(0, k, k, [0, 1], ropes=ropes())
    with pytest.raises(ValueError, match="last tokens"):
        kvcache.AttendWork([(3, [kvcache.Segment([0], 2)])])
    keys, _ = stored(own, 0, [0, 1])
    assert not keys.any()
    # Strided rows are used in place.
    wide = rows(4, 5)
    own.scatter(0, wide[::2], wide[1::2], [3, -1])
    assert np.array_equal(stored(own, 0, [3])[0][0], wide[0])


def test_a_model_without_a_known_rope_is_refused() -> None:
    odd = CONFIG | {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}
    with pytest.raises(kvcache.KvCacheError):
        kvcache.Ropes(json.dumps(odd))
