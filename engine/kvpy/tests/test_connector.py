"""The connector for vLLM, without vLLM: it answers recorded calls as it did when they were recorded, and the bytes are right.

When the connector changes on purpose, ``python proof/vllm/record.py FOLDER`` records the files in ``golden/vllm`` anew from a real vLLM,
and their difference is the change.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import golden_calls
import pytest
from replay import Replay, configs
from vllm import SamplingParams
from vllm.v1.request import Request

from kvcache.vllm.host import Settings, geometry
from kvcache.vllm.orders import Load
from kvcache.vllm.scheduler import Encode, _no_recompute


@pytest.mark.parametrize("name", golden_calls.names())
def test_recorded_calls_are_answered_as_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(golden_calls.read(name), monkeypatch)
    replay.run()
    side = replay.side._scheduler
    kept = [side.states, side.encodes, side.unsaved, side.refused, side.receiving, side.ended, side.behind_chunks]
    if side.tier is not None:
        kept += [side.tier.holds, side.tier.saving, side.tier.on_their_way, side.tier.progress, side.tier.barred]
    assert not any(kept), "something is kept of requests that have ended"
    chunks = side.cache
    chunks.check_invariants()
    counted = side.stats()
    assert counted is not None and any(counted.data[what] for what in ("chunk_tokens_computed", "chunk_requests_refused"))
    side.reset()
    assert chunks.get_metrics().used_blocks == 0, "something stays held when no request runs"
    if side.tier is not None:
        side.tier.pool.check_invariants()
        counts = side.tier.pool.counts()
        assert counts["free"] == counts["total"], "a block of a prefix stays held when no request runs"


def test_what_one_rank_could_not_save_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves of an encode and of a block, of which one of two ranks reports success and the other failure."""
    side = Replay(golden_calls.read("prefixes"), monkeypatch, ranks=2).side._scheduler
    (missing,) = side.cache.acquire(bytes(32), "alone", [], list(range(40)), 0)
    side.encodes["encode"] = Encode("encode", 0, 40, [(0, missing)], scheduled=True)
    request = Request("plain", list(range(70)), SamplingParams(), None)
    places, names, blocks = zip(*side.tier.new_blocks(request, 70))
    assert places == (0, 1) and len(set(blocks)) == 2
    side.unsaved.update({"encode": 0, names[0]: 0, names[1]: 0})
    side.not_saved({"encode", names[0]})
    side.saved({"encode": 1, names[0]: 1, names[1]: 2})
    assert not side.encodes and not side.unsaved and not side.tier.saving
    assert side.tier.matched(request, 0) == 0 and side.tier.matched(request, 32) == 32, "the second block alone was saved"
    side.tier.finished("plain")
    side.reset()
    assert side.cache.get_metrics().used_blocks == 0 and side.tier.pool.counts()["free"] == side.tier.pool.counts()["total"]


def test_saves_of_before_a_reset_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Replay(golden_calls.read("prefixes"), monkeypatch).side._scheduler
    request = Request("plain", list(range(70)), SamplingParams(), None)
    names = [name for _, name, _ in side.tier.new_blocks(request, 70)]
    side.unsaved.update(dict.fromkeys(names, 0))
    assert side.reset() is False, "something is on its way"
    side.saved(dict.fromkeys(names, 1))
    assert side.tier.matched(request, 0) == 0 and side.reset() is True


def test_a_block_without_room_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Replay(golden_calls.read("prefixes"), monkeypatch).side._scheduler
    total = side.tier.pool.counts()["total"]
    held = side.tier.pool.allocate(total - 1)
    request = Request("plain", list(range(100)), SamplingParams(), None)
    assert [at for at, _, _ in side.tier.new_blocks(request, 100)] == [0], "there was room for one"
    held.release()
    assert [at for at, _, _ in side.tier.new_blocks(request, 100)] == [1, 2]
    assert side.tier.new_blocks(request, 100) == []


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt_embeds", object(), "text"),
        ("pooling_params", object(), "text"),
        ("mm_features", [object()], "text"),
        ("skip_reading_prefix_cache", True, "ordinary attention"),
    ],
)
def test_requests_that_are_no_plain_text_are_apart(field: str, value: object, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks nor, if their blocks do not follow from their tokens, the tier."""
    side = Replay(golden_calls.read("prefixes"), monkeypatch).side._scheduler
    params = {"kv_transfer_params": {"chunk_lengths": [3, 40]}}
    request = Request("odd", list(range(70)), SamplingParams(extra_args=params), None)
    setattr(request, field, value)
    side.on_new_request(request)
    assert reason in side.refused["odd"] and not side.states and request.cache_salt is None
    assert side._is_plain(request) is (field == "skip_reading_prefix_cache")


def test_nothing_is_computed_again_where_it_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(golden_calls.read("link"), monkeypatch)
    config, caches = configs(golden_calls.read("link")["config"], 1)
    shape = geometry(config, caches, Settings())
    assert _no_recompute(config, shape) is None
    config.lora_config = object()
    assert "adapters" in (_no_recompute(config, shape) or "")
    config.lora_config, config.device_config.device_type = None, "cuda"
    side = replay.side._scheduler
    side.no_recompute = _no_recompute(config, shape)
    params = {"kv_transfer_params": {"chunk_lengths": [3, 40], "chunk_recompute": "link:4"}}
    request = Request("odd", list(range(70)), SamplingParams(extra_args=params), None)
    side.on_new_request(request)
    assert "CPUs only" in side.refused["odd"]


def test_a_rank_whose_copy_fails_runs_the_model_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank waits for it in the collectives of the same pass."""
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
