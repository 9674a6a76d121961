"""Counters and gauges count what was asked and answered."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_engine import ROW, SIZE, Engine
from test_pressure import prompt

from kvcache.vllm.stats import COUNTERS, ChunkStats

LENGTHS = [20, 30, 40]


class Counted:
    """An engine whose reports are added up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        self.engine = Engine(monkeypatch, **settings)
        self.sums: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        step = self.engine.step

        def counted() -> None:
            step()
            report = self.engine.side.stats()
            if report is not None and not report.is_empty():
                self.sums.update({name: value for name, value in report.data.items() if name in COUNTERS})
                self.gauges.update({name: value for name, value in report.data.items() if name not in COUNTERS})

        self.engine.step = counted  # type: ignore[method-assign]

    def ask(self, name: str, tokens: list[int], **more: object) -> dict | None:
        """Asks, and returns what the answer says."""
        self.engine.ask(name, tokens, **more)
        self.engine.run(100)
        return self.engine.answers[name][1]

    def counts(self) -> tuple[int, int]:
        return self.sums["chunk_tokens_reused"], self.sums["chunk_tokens_computed"]


def said(reused: int, computed: int, *new: int) -> dict[str, object]:
    """Returns what an answer says if the parts with the numbers ``new`` were not known."""
    counts = {"chunk_tokens_reused": reused, "chunk_tokens_computed": computed}
    return {**counts, "chunk_missed": {str(number): "new" for number in new}} if new else counts


def test_a_cold_request_is_computed_and_a_warm_one_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    assert counted.ask("cold", prompt(LENGTHS), chunk_lengths=LENGTHS) == said(0, 90, 0, 1, 2) and counted.counts() == (0, 90)
    assert counted.ask("warm", prompt(LENGTHS, question=9), chunk_lengths=LENGTHS) == said(90, 0) and counted.counts() == (90, 90)
    # The engine's own cache has everything, so nothing is copied.
    assert counted.ask("own", prompt(LENGTHS), chunk_lengths=LENGTHS) == said(90, 0) and counted.counts() == (180, 90)


def test_a_chunk_that_a_prompt_repeats_is_computed_once_and_reused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    one, two = list(range(10, 30)), list(range(40, 70))
    tokens, lengths = [*one, *two, *one, *two, 3, 4], [20, 30, 20, 30]
    assert counted.ask("twice", tokens, chunk_lengths=lengths) == said(50, 50, 0, 1) and counted.counts() == (50, 50)


def test_of_two_requests_one_computes_and_the_other_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, max_chunk_tokens=16)
    counted.engine.ask("first", prompt(LENGTHS), chunk_lengths=LENGTHS)
    counted.engine.ask("second", prompt(LENGTHS), chunk_lengths=LENGTHS)
    counted.engine.run(100)
    assert [counted.engine.answers[name][1] for name in ("first", "second")] == [said(0, 90, 0, 1, 2), said(90, 0)]
    assert counted.counts() == (90, 90)


def test_a_preempted_request_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, blocks=32, host_memory=(24 + 32 + 40) * ROW)
    for number in range(3):
        counted.engine.ask(f"{number}", prompt(LENGTHS, first=10 + 90 * number), count=60, chunk_lengths=LENGTHS)
    counted.engine.run(1_000)
    assert counted.engine.preemptions > 0 and counted.counts() == (0, 270)


def test_aborted_and_refused_requests_count_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    counted.engine.ask("aborted", prompt(LENGTHS), chunk_lengths=LENGTHS)
    counted.engine.step()
    counted.engine.abort("aborted")
    counted.engine.run(50)
    assert counted.engine.answers["aborted"][1] is None
    assert "chunk_error" in counted.ask("refused", prompt(LENGTHS), chunk_lengths=[20, 300])
    counted.engine.failing = lambda: True
    assert "chunk_error" in counted.ask("failed", prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert counted.counts() == (0, 0) and counted.sums["chunk_requests_refused"] == 2


@pytest.mark.parametrize("params", [{"chunk_lengths": LENGTHS}, {"chunk_lengths": LENGTHS, "chunk_recompute": "link:4"}, {"chunk_lengths": [20, 300]}])
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_request_that_is_aborted_counts_nowhere(steps: int, params: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any state: waiting, receiving, running, and refused."""
    counted = Counted(monkeypatch, delay=lambda: 1)
    counted.engine.ask("one", prompt(LENGTHS), count=50, **params)
    for _ in range(steps):
        counted.engine.step()
    counted.engine.abort("one")
    counted.engine.run(50)
    assert counted.counts() == (0, 0) and counted.sums["chunk_requests_refused"] == 0
    # What it left is found by the next request, which is counted.
    assert counted.ask("two", prompt(LENGTHS), **params) is not None
    refused = "chunk_recompute" not in params and params["chunk_lengths"] != LENGTHS
    assert sum(counted.counts()) == (0 if refused else 90) and counted.sums["chunk_requests_refused"] == refused


def test_tokens_that_another_request_computed_are_reused_also_if_the_own_encode_was_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, step_tokens=8)
    engine = counted.engine
    engine.ask("first", prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine.step()
    engine.abort(next(name for name in engine.requests if "encode" in name))
    # Both need the system prompt now, and the second one asks first.
    engine.ask("second", prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine.run(200)
    assert [engine.answers[name][1] for name in ("first", "second")] == [said(20, 70, 1, 2), said(70, 20, 0)]
    assert counted.counts() == (90, 90)


def test_tokens_of_the_tier_count_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, prefix_memory=64 * SIZE * ROW)
    tokens = list(range(10, 10 + 4 * SIZE))
    counted.ask("first", [*tokens, 3])
    assert (counted.sums["prefix_blocks_saved"], counted.sums["prefix_tokens_found"]) == (4, 0)
    counted.engine.kv_cache_manager.reset()
    counted.engine.failing = lambda: True
    counted.ask("failed", [*tokens, 3])
    assert counted.sums["prefix_tokens_found"] == 0
    counted.engine.failing = lambda: False
    counted.engine.kv_cache_manager.reset()
    counted.ask("found", [*tokens, 3])
    assert (counted.sums["prefix_blocks_saved"], counted.sums["prefix_tokens_found"]) == (4, 4 * SIZE)


def test_gauges_follow_a_reset_although_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, prefix_memory=64 * SIZE * ROW)
    counted.ask("chunks", prompt(LENGTHS), chunk_lengths=LENGTHS)
    counted.ask("plain", list(range(10, 60)))
    assert all(0 < value <= 1 for value in counted.gauges.values()) and len(counted.gauges) == 2
    before = dict(counted.sums)
    assert not counted.engine.has_requests()
    counted.engine.reset()
    # vLLM is idle, and runs a step only if it has something to do.
    counted.engine.run(5)
    assert not counted.engine.has_requests()
    assert set(counted.gauges.values()) == {0} and counted.sums == before


def test_reports_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChunkStats({"chunk_evictions": 2, "chunk_memory_usage_perc": 0.5})
    first.aggregate(ChunkStats({"chunk_evictions": 3, "chunk_memory_usage_perc": 0.25}))
    assert first.data == {"chunk_evictions": 5, "chunk_memory_usage_perc": 0.25} and not first.is_empty()
    for waits in ([0.5], [1.0, 0.25, 0.25]):
        first.aggregate(ChunkStats({"tier_wait_seconds": waits}))
    assert first.data["tier_wait_seconds"] == [0.5, 1.0, 0.25, 0.25]
    reduced = {"chunk_evictions": 5, "chunk_memory_usage_perc": 0.25, "tier_wait_seconds_mean": 0.5, "tier_wait_seconds_max": 1.0}
    assert first.reduce() == reduced
    first.reset()
    assert first.is_empty()


def test_evictions_count_what_made_room_and_refusals_count_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, host_memory=(24 + 32 + 40) * ROW, prefix_memory=4 * SIZE * ROW)
    counted.ask("first", prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert counted.sums["chunk_evictions"] == 0
    counted.ask("second", prompt(LENGTHS, first=200), chunk_lengths=LENGTHS)
    assert counted.sums["chunk_evictions"] == 3
    counted.ask("plain", [*range(10, 10 + 4 * SIZE), 3], count=1)
    assert (counted.sums["prefix_blocks_saved"], counted.sums["prefix_blocks_evicted"]) == (4, 0)
    counted.ask("another", [*range(300, 300 + 3 * SIZE), 3], count=1)
    assert (counted.sums["prefix_blocks_saved"], counted.sums["prefix_blocks_evicted"]) == (7, 3)
    for number, lengths in enumerate(([20, 300], [20], [50, 50, 50])):
        assert "chunk_error" in counted.ask(f"refused-{number}", prompt([50, 50, 50]), chunk_lengths=lengths)
        assert counted.sums["chunk_requests_refused"] == number + 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("delay", [1, 3, 5])
def test_a_copy_that_fails_after_an_abort_has_found_nothing(delay: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch, prefix_memory=100 * SIZE * ROW, delay=lambda: delay)
    engine, tokens = counted.engine, list(range(10, 90))
    counted.ask("first", tokens, count=1)
    engine.kv_cache_manager.reset()
    engine.failing = lambda: fails
    engine.ask("other", list(range(200, 230)), count=20)
    engine.ask("aborted", tokens, count=1)
    engine.step()
    assert "aborted" in engine.receiving
    engine.abort("aborted")
    engine.run(100)
    assert counted.sums["prefix_tokens_found"] == engine.arrived == (0 if fails else 72)
