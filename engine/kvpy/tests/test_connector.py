"""The connector for vLLM, without vLLM: it answers recorded calls as it did when they were recorded, and the
bytes must be right.

When the connector changes on purpose, ``python proof/vllm/record.py FOLDER`` records the files in
``golden/vllm`` again from a real vLLM, and their difference is the change.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import golden_calls
import pytest
from replay import Replay, configs
from vllm import SamplingParams
from vllm.v1.request import Request

from kvcache.vllm.host import Settings, UnsupportedHostError, geometry
from kvcache.vllm.chunks import no_recompute
from kvcache.vllm.orders import Load
from kvcache.vllm.prefix import NoPrefixes, Prefixes
from kvcache.vllm.requests import BlockSaving, Tracked
from kvcache.vllm.scheduler import ChunkScheduler


@pytest.mark.parametrize("name", golden_calls.names())
def test_recorded_calls_are_answered_as_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(golden_calls.read(name), monkeypatch)
    replay.run()
    side = replay.side._scheduler
    assert not side.requests and not side.saving and not side.loads, "something is kept of requests that have ended"
    has_prefixes = golden_calls.read(name)["config"]["extra_config"].get("prefix_memory") is not None
    assert isinstance(side.prefixes, Prefixes if has_prefixes else NoPrefixes)
    chunks = side.chunks.cache
    chunks.check_invariants()
    counted = side.stats()
    assert counted is not None and any(counted.data[what] for what in ("chunk_tokens_computed", "chunk_requests_refused"))
    side.reset()
    assert chunks.get_metrics().used_blocks == 0, "something stays held when no request runs"
    if has_prefixes:
        assert not side.prefixes.saving
        side.prefixes.pool.check_invariants()
        counts = side.prefixes.pool.counts()
        assert counts["free"] == counts["total"], "a block of a prefix stays held when no request runs"


def prefixes_side(monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> ChunkScheduler:
    """Returns the scheduler's side of a connector with a tier for prefixes."""
    return Replay(golden_calls.read("prefixes"), monkeypatch, ranks).side._scheduler


def plain_request(side: ChunkScheduler, tokens: int) -> Tracked:
    """Returns a new ordinary request."""
    request = Request("plain", list(range(tokens)), SamplingParams(), None)
    side.host.tables["plain"] = [list(range(1, 1 + tokens // 32))]
    side.on_new_request(request)
    return side.requests["plain"]


def new_saves(side: ChunkScheduler, tracked: Tracked) -> list[BlockSaving]:
    """Reserves memory for the blocks of a request, as if the workers had orders to save
    them."""
    new = side.prefixes.new_blocks(tracked, tracked.request.num_tokens)
    side.saving |= {saving.name: saving for saving in new}
    return new


def test_rows_that_one_rank_could_not_save_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two ranks reports that it has saved an encode and a block, and the other that it has not."""
    side = prefixes_side(monkeypatch, ranks=2)
    monkeypatch.setattr(side.host, "add_request", lambda request: None)
    params = {"kv_transfer_params": {"chunk_lengths": [3, 40]}}
    side.on_new_request(Request("chunks", list(range(70)), SamplingParams(extra_args=params), None))
    encode = side.saving["encode"] = next(one for one in side.chunks.pieces.encodes if one.prompt_tokens == 40)
    plain = plain_request(side, 70)
    first, second = new_saves(side, plain)
    assert (first.index, second.index) == (0, 1) and first.blocks.ids != second.blocks.ids
    side.not_saved({"encode", first.name})
    side.saved({"encode": 1, first.name: 1, second.name: 2})
    assert encode.is_over and not side.saving and not side.prefixes.saving
    assert "could not be copied to host memory" in side.requests["chunks"].refused
    assert side.prefixes.pool.counts()["cached"] == 0, "the second block is kept without the first one"
    matched = side.prefixes.matched
    assert matched(plain, 0) == matched(plain, 32) == (0, False), "the second block cannot be found without the first one"
    for tracked in list(side.requests.values()):
        side.finished(tracked.request)
    side.reset()
    counts = side.prefixes.pool.counts()
    assert side.chunks.cache.get_metrics().used_blocks == 0 and counts["free"] == counts["total"]


def test_rows_saved_before_a_reset_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    side = prefixes_side(monkeypatch)
    plain = plain_request(side, 70)
    names = [saving.name for saving in new_saves(side, plain)]
    assert side.reset() is True
    side.saved(dict.fromkeys(names, 1))
    assert side.prefixes.matched(plain, 0) == (0, False) and side.reset() is True


def test_a_block_without_room_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = prefixes_side(monkeypatch)
    held = side.prefixes.pool.allocate(side.prefixes.pool.counts()["total"] - 1)
    plain = plain_request(side, 100)
    assert [saving.index for saving in new_saves(side, plain)] == [0], "there was room for one"
    held.release()
    assert [saving.index for saving in new_saves(side, plain)] == [1, 2]
    assert new_saves(side, plain) == []


@pytest.mark.parametrize(
    ("given", "size"),
    [(1000, 1000), ("1000", 1000), ("2 KiB", 2048), ("1.5GiB", 3 << 29), ("0.5 TiB", 1 << 39), ("2TiB", 2 << 40), (8e9, 8_000_000_000)],
)
def test_sizes_may_be_fractions_and_have_units(given: object, size: int) -> None:
    assert Settings.of({"host_memory": given, "prefix_memory": given}) == Settings(host_memory=size, prefix_memory=size)


@pytest.mark.parametrize("given", ["1 GB", "GiB", "-1GiB", "1e9", 0, 0.5, float("nan"), float("inf"), True, None, [1]])
def test_sizes_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="host_memory is"):
        Settings.of({"host_memory": given})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt_embeds", object(), "text"),
        ("pooling_params", object(), "text"),
        ("mm_features", [object()], "text"),
        ("skip_reading_prefix_cache", True, "ordinary attention"),
    ],
)
def test_requests_that_are_not_plain_text_are_kept_apart(field: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such requests get no chunks. They use the tier only if their blocks depend on their tokens
    alone."""
    side = prefixes_side(monkeypatch)
    params = {"kv_transfer_params": {"chunk_lengths": [3, 40]}}
    request = Request("odd", list(range(70)), SamplingParams(extra_args=params), None)
    setattr(request, field, value)
    side.on_new_request(request)
    odd = side.requests["odd"]
    assert reason in (odd.refused or "") and odd.chunks is None and request.cache_salt is None
    assert odd.is_plain() is (field == "skip_reading_prefix_cache")


def test_nothing_is_recomputed_where_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(golden_calls.read("link"), monkeypatch)
    config, caches = configs(golden_calls.read("link")["config"], 1)
    shape = geometry(config, caches, Settings())
    assert no_recompute(config, shape) is None
    config.lora_config = object()
    assert "adapters" in (no_recompute(config, shape) or "")
    config.lora_config, config.device_config.device_type = None, "cuda"
    side = replay.side._scheduler
    side.chunks.no_recompute = no_recompute(config, shape)
    params = {"kv_transfer_params": {"chunk_lengths": [3, 40], "chunk_recompute": "link:4"}}
    request = Request("odd", list(range(70)), SamplingParams(extra_args=params), None)
    side.on_new_request(request)
    assert "CPUs only" in side.requests["odd"].refused


def test_a_rank_whose_copy_fails_still_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, other ranks would wait for this rank in the same pass's
    collectives."""
    worker = Replay(golden_calls.read("link"), monkeypatch).worker._worker
    ran: list[object] = []

    def broken(*_: object) -> None:
        raise MemoryError("no memory for rows")

    worker.arena = SimpleNamespace(load=broken)
    worker.recomputer = SimpleNamespace(run=ran.append)
    again = object()
    worker.start_loads([Load("one", [], [3, 4], at_once=True, again=again)], False)  # type: ignore[arg-type]
    assert ran == [again] and worker.failed_blocks() == {3, 4} and worker.report()[2] == {"one"}


def test_copies_are_waited_for_only_when_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Replay(golden_calls.read("reordered"), monkeypatch).worker._worker
    go_on = threading.Event()
    worker.arena = SimpleNamespace(load=lambda *_: go_on.wait(10))
    worker.start_loads([Load("slow", [], [])], False)
    assert worker.loaded() is None, "others go on"
    go_on.set()
    worker.start_loads([], True)
    assert worker.loaded() == {"slow"}


def test_an_encode_is_stored_when_all_ranks_have_saved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Replay(golden_calls.read("together"), monkeypatch, ranks=2).run()
    one_is_silent = Replay(golden_calls.read("together"), monkeypatch, ranks=2)
    one_is_silent.ranks = 1
    with pytest.raises(AssertionError, match=r"get_num_new_matched_tokens .* returns \[None, False\] instead of \[\d+, True\]"):
        one_is_silent.run()
