"""The native module, on NumPy arrays."""

import json
import resource
import sys
from pathlib import Path

import kvcache
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

LAYERS, HEADS, DIM = 2, 2, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def ropes() -> kvcache.Ropes:
    return kvcache.Ropes(json.dumps(CONFIG))


def arena(blocks: int = 8) -> kvcache.Arena:
    return kvcache.Arena(
        num_layers=LAYERS, num_blocks=blocks, block_size=16, num_heads=HEADS, head_dim=DIM, dtype_name="float32"
    )


def layers() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal((3, HEADS, 32, 2 * DIM), dtype=np.float32) for _ in range(LAYERS)]


def rows(layer: np.ndarray, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of a token's keys and values in the layout of vLLM's CPU backend."""
    block = layer[slot // 32].reshape(HEADS, 2 * 32 * DIM)
    keys, values = block[:, : 32 * DIM].reshape(HEADS, DIM, 32), block[:, 32 * DIM :].reshape(HEADS, 32, DIM)
    return keys[:, :, slot % 32], values[:, slot % 32]


def turned(keys: np.ndarray, layer: int, distance: int) -> np.ndarray:
    cos, sin, _ = ropes().at(layer, distance)
    cos, sin = np.array(cos * 2, np.float32), np.array(sin * 2, np.float32)
    return keys * cos + np.concatenate([-keys[:, DIM // 2 :], keys[:, : DIM // 2]], 1) * sin


@pytest.mark.parametrize("distance", [0, 1, 700, -5])
def test_rows_are_saved_and_loaded_where_they_belong(distance: int) -> None:
    theirs, own = layers(), arena()
    cache = kvcache.ForeignCache.interleaved(theirs, "columns")
    before = [[rows(layer, slot) for slot in (5, 6, 7)] for layer in theirs]
    before = [[(k.copy(), v.copy()) for k, v in of_layer] for of_layer in before]
    own.save(cache, [20, 21, 22], [5, 6, 7])
    own.load(cache, [([20, 21, 22], [70, -1, 71], distance)], ropes())
    for layer, of_layer in enumerate(before):
        for slot, (keys, values) in ((70, of_layer[0]), (71, of_layer[2])):
            got = rows(theirs[layer], slot)
            assert np.allclose(got[0], turned(keys, layer, distance), atol=1e-6)
            assert np.array_equal(got[1], values)


def test_runs_of_tokens_are_their_slots() -> None:
    """A run of tokens stands for the same rows as its slots. Tokens in a negative block are
    skipped."""
    caches, owns = [layers() for _ in range(2)], [arena(), arena()]
    described = [kvcache.ForeignCache.interleaved(cache, "columns") for cache in caches]
    # The engine's blocks have 32 tokens, the arena's 16.
    owns[0].save(described[0], ([3, 1], 5, 20), ([2, 0], 30, 20))
    owns[1].save(described[1], [*range(53, 64), *range(16, 25)], [94, 95, *range(18)])
    owns[0].load(described[0], [(([3, 1], 5, 20), ([-1, 1], 28, 20), 7)], ropes())
    owns[1].load(described[1], [([*range(53, 64), *range(16, 25)], [-1] * 4 + [*range(32, 48)], 7)], ropes())
    for run, slots, untouched in zip(*caches, layers()):
        assert np.array_equal(run, slots) and not np.array_equal(run, untouched)
    for wrong, match in ((([0], 30, 3), "end of a run"), (([3], 0, 1), "out of range"), (([-1], 0, 1), "out of range")):
        with pytest.raises(kvcache.KvCacheError, match=match):
            owns[0].save(described[0], ([0], 0, wrong[2]), wrong)
    with pytest.raises(kvcache.KvCacheError, match="end of a run"):
        owns[0].load(described[0], [(([0], 0, 1), ([0], 0, 2**60), 0)], ropes())
    with pytest.raises(kvcache.KvCacheError, match="block"):
        owns[0].save(described[0], ([0], 0, 1), ([2**62], 0, 1))


def test_rows_of_device_layouts_are_described_by_their_axes() -> None:
    own = arena()
    flash = [np.random.default_rng(1).standard_normal((2, 3, 16, HEADS, DIM), dtype=np.float32) for _ in range(LAYERS)]
    cache = kvcache.ForeignCache.rows(flash, "kbtho")
    own.save(cache, [3], [17])
    own.load(cache, [([3], [40], 0)], ropes())
    for layer in flash:
        assert np.array_equal(layer[:, 2, 8], layer[:, 1, 1])


def test_errors_carry_their_numbers() -> None:
    own, cache = arena(), kvcache.ForeignCache.interleaved(layers(), "columns")
    with pytest.raises(kvcache.KvCacheError, match="out of range") as error:
        own.load(cache, [([0], [96], 0)], ropes())
    assert (error.value.kind, error.value.value, error.value.limit) == ("OutOfRange", 96, 96)
    with pytest.raises(kvcache.KvCacheError, match="twice"):
        own.load(cache, [([0, 1], [4, 4], 0)], ropes())
    with pytest.raises(TypeError, match="kernels do not support"):
        kvcache.ForeignCache.interleaved([np.zeros((3, 2, 32, 64), np.float64)], "columns")
    with pytest.raises(ValueError, match="4 axes"):
        kvcache.ForeignCache.interleaved([np.zeros((3, 32, 64), np.float32)], "columns")
    with pytest.raises(ValueError, match="contiguous"):
        kvcache.ForeignCache.interleaved([np.zeros((3, 2, 32, 128), np.float32)[..., ::2]], "columns")
    with pytest.raises(ValueError, match="unknown order"):
        kvcache.ForeignCache.interleaved(layers(), "diagonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown element type"):
        kvcache.Arena(num_layers=1, num_blocks=1, block_size=1, num_heads=1, head_dim=2, dtype_name="float64")
    with pytest.raises(kvcache.KvCacheError, match="rope|config|RoPE|alibi|model"):
        kvcache.Ropes(json.dumps(CONFIG | {"model_type": "unheard-of", "architectures": ["Unheard"]}))


def test_layers_over_one_memory_are_refused() -> None:
    """Two threads would write the same elements, each of them for a layer of its own."""
    (one, two), row = layers(), 2 * DIM * 4
    block, head, _, element = one.strides
    for theirs in (
        [one, one],
        [one, two, one],
        [one[:2], one[1:]],
        [one[:, :1], one[:, :1]],
        [as_strided(one, one.shape, (block, head, row // 2, element)), two],
    ):
        with pytest.raises(kvcache.KvCacheError, match="operands share memory"):
            kvcache.ForeignCache.interleaved(theirs, "rows")
    with pytest.raises(kvcache.KvCacheError, match="operands share memory"):
        kvcache.ForeignCache.interleaved([one[:2], one[1:]], "columns")
    for strides in ((0, head, row, element), (head, head, row, element), (block, 0, row, element)):
        with pytest.raises(kvcache.KvCacheError, match="stride"):
            kvcache.ForeignCache.interleaved([as_strided(one, one.shape, strides)], "columns")
    apart = kvcache.ForeignCache.interleaved([one[:1], one[2:]], "columns")
    arena().save(apart, [0], [5])


def test_keys_and_values_over_one_memory_are_refused() -> None:
    flash = np.zeros((2, 4, 16, HEADS, DIM), np.float32)
    _, block, token, head, element = flash.strides
    for between in (0, element, element * DIM // 2, token, block, 3 * block):
        both = as_strided(flash, flash.shape, (between, block, token, head, element))
        with pytest.raises(kvcache.KvCacheError, match="operands share memory"):
            kvcache.ForeignCache.rows([both], "kbtho")
    for layer in ([flash, flash], [flash[:, :3], flash[:, 1:]]):
        with pytest.raises(kvcache.KvCacheError, match="operands share memory"):
            kvcache.ForeignCache.rows(layer, "kbtho")
    kvcache.ForeignCache.rows([flash[:, :2], flash[:, 2:]], "kbtho")


def test_memory_lives_as_long_as_it_is_used() -> None:
    theirs, own = layers(), arena()
    cache = kvcache.ForeignCache.interleaved(theirs, "columns")
    expected = rows(theirs[0], 5)[1].copy()
    own.save(cache, [0], [5])
    del theirs
    other = layers()
    own.load(cache, [([0], [9], 0)], ropes())
    own.load(kvcache.ForeignCache.interleaved(other, "columns"), [([0], [9], 0)], ropes())
    assert np.array_equal(rows(other[0], 9)[1], expected)


def root(**changes: object) -> bytes:
    settings = {"dtype_name": "float32", "num_heads": HEADS, "head_dim": DIM, "block_size": 16} | changes
    return kvcache.key_root("m", b"revision", ropes(), **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux provides memory ahead of its use")
def test_memory_is_provided_ahead_of_its_use_and_keeps_its_contents() -> None:
    blocks = 4_000
    own, theirs = arena(blocks), layers()
    cache = kvcache.ForeignCache.interleaved(theirs, "columns")
    slots, last = [5, 6, 7], [16 * blocks - 3 + at for at in range(3)]
    expected = [part.copy() for layer in theirs for slot in slots for part in rows(layer, slot)]
    own.save(cache, last, slots)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    own.provide()
    whole = blocks * 16 * LAYERS * HEADS * DIM * 2 * 4
    assert resident() - before > 0.9 * whole
    after = resident()
    own.provide()
    assert resident() - after < 0.1 * whole
    for layer in theirs:
        layer[:] = 0
    own.load(cache, [(last, slots, 0)], ropes())
    found = [part for layer in theirs for slot in slots for part in rows(layer, slot)]
    assert all(map(np.array_equal, found, expected))


def test_roots_depend_on_everything_that_bytes_depend_on() -> None:
    roots = [
        root(),
        root(dtype_name="bfloat16"),
        root(salt=b"alice"),
        root(adapter=("lora", b"1")),
        root(adapter=("lora", b"2")),
        kvcache.key_root("m", b"other", ropes(), dtype_name="float32", num_heads=HEADS, head_dim=DIM, block_size=16),
    ]
    assert len(set(roots)) == len(roots) and all(len(key) == 32 for key in roots)
    assert root(salt=b"") == root()


def test_a_chunk_is_computed_once_and_found_by_all_that_it_depends_on() -> None:
    cache = kvcache.ChunkCacheManager(kvcache.ChunkCacheConfig(max_chunk_tokens=32), 6, 16)
    key, tokens = root(), list(range(40))
    first = cache.acquire(key, "alone", [1, 2], tokens, 0)
    assert [type(piece).__name__ for piece in first] == ["ChunkReservation", "ChunkReservation"]
    assert [piece.num_tokens for piece in first] == [32, 8] and first[1].stored_start == 32
    (waiting, _) = cache.acquire(key, "alone", [9], tokens, 0)
    assert isinstance(waiting, kvcache.ChunkWaiter) and not waiting.is_over
    holds = [piece.store() for piece in first]
    assert waiting.is_over and [hold.num_tokens for hold in holds] == [32, 8]
    again = cache.acquire(key, "alone", [7, 7], tokens, 0)
    assert [piece.slots for piece in again] == [hold.slots for hold in holds]
    other = cache.acquire(key, "with-system", [1, 2], tokens, 2)
    assert all(isinstance(piece, kvcache.ChunkReservation) for piece in other)
    assert cache.acquire(root(salt=b"alice"), "alone", [], tokens, 0) == [None, None], "no room, all is in use"
    for piece in other:
        piece.abandon()
    for hold in (*holds, *again):
        hold.release()
    with pytest.raises(RuntimeError, match="released"):
        holds[0].slots  # noqa: B018
    with pytest.raises(ValueError, match="at least one token"):
        cache.acquire(key, "alone", [], [], 0)
    metrics = cache.get_metrics()
    assert (metrics.cached_chunks, metrics.hit_count) == (2, 2)
    cache.check_invariants()
    cache.clear_cache()
    assert cache.get_metrics().used_blocks == 0


def test_settings_have_the_names_of_the_design() -> None:
    config = kvcache.ChunkCacheConfig(chunk_separator="@@", chunk_hash_algo="xxhash", position_strategy="virtual")
    assert config.to_dict()["separator"] == "@@"
    with pytest.raises(ValueError, match="max_chunk"):
        kvcache.ChunkCacheConfig(max_chunk=3)
    with pytest.raises(kvcache.KvCacheError, match="at least 1"):
        kvcache.ChunkCacheConfig(max_chunks=0)


@pytest.mark.parametrize("blocks", [2**31, 2**32 - 1, 2**24 + 1])
def test_a_pool_of_too_many_blocks_is_refused(blocks: int) -> None:
    with pytest.raises(kvcache.KvCacheError, match="16777216"):
        kvcache.BlockPool(blocks)
