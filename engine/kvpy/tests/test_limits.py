"""Limits that requests fill exactly, and aborts in every state."""

from __future__ import annotations

import itertools

import pytest
from fake_engine import ROW, SIZE, Engine
from test_pressure import answers, nothing_held, prompt

LENGTHS = [20, 30, 40]
# The blocks of these parts in host memory.
HELD = 24 + 32 + 40


@pytest.mark.parametrize("recompute", ["none", "link:4", "question:0.5"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_chunks": 6},
        {"max_chunks": 6, "max_chunk_tokens": 40},
        {"max_chunk_tokens": 20, "max_chunks": 10},
        {"max_chunk_tokens": SIZE, "max_chunks": 24},
        {"host_memory": 2 * HELD * ROW},
        {"host_memory": 2 * HELD * ROW, "max_chunks": 6},
        # Both run at once: 90 tokens, a question of 6 and an answer of 8.
        {"blocks": 1 + 2 * 13},
        {"max_running": 2},
        {"step_tokens": 2 * 6},
        {"question_memory": 96 * ROW},
    ],
)
def test_two_requests_that_fill_a_limit_exactly_are_served_with_chunks(settings: dict, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(monkeypatch, **settings), {}
    params = {"chunk_lengths": LENGTHS, "chunk_recompute": recompute}
    for number, name in enumerate(("first", "second")):
        asked[name] = (prompt(LENGTHS, first=10 + 100 * number), params)
        engine.ask(name, asked[name][0], count=8, **params)
    engine.run(200)
    assert engine.encodes == 6 and engine.side.chunks.cache.get_metrics().evictions == 0
    # Everything is still there, in another order and for another question.
    for number, name in enumerate(("third", "fourth")):
        first = 10 + 100 * number
        tokens = [*range(first, first + 20), *range(first + 50, first + 90), *range(first + 20, first + 50), 7, 8, 9]
        asked[name] = (tokens, {**params, "chunk_lengths": [20, 40, 30]})
        engine.ask(name, tokens, **asked[name][1])
    engine.run(200)
    assert engine.encodes == 6
    answers(engine, asked)
    nothing_held(engine)


def test_two_ordinary_prompts_that_fill_the_tier_exactly_are_both_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(monkeypatch, prefix_memory=2 * 5 * SIZE * ROW), {}
    for number in range(2):
        asked[f"{number}"] = ([*range(10 + 100 * number, 50 + 100 * number), 3], None)
    for again in range(2):
        for name, (tokens, _) in asked.items():
            engine.kv_cache_manager.reset()
            engine.ask(f"{name}-{again}", tokens, count=2)
            engine.run(50)
    counts = engine.side.prefixes.pool.counts()
    assert (counts["free"], counts["evictions"], engine.side.prefixes.tokens_found) == (0, 0, 80)
    answers(engine, {f"{name}-{again}": one for name, one in asked.items() for again in range(2)})
    nothing_held(engine)


@pytest.mark.parametrize("recompute", ["none", "link:4", "question:0.5", None])
@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"host_memory": HELD * ROW}, {"blocks": 20}, {"blocks": 24}, {"blocks": 26}])
@pytest.mark.parametrize("whom", ["first", "both", "encode"])
def test_aborts_in_every_state_leave_nothing_and_harm_nobody(whom: str, settings: dict, recompute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests share a chunk, or the memory, or vLLM's blocks, and a third one comes afterwards."""
    states = set()
    for steps in range(16):
        engine = Engine(monkeypatch, delay=lambda: 2, prefix_memory=64 * SIZE * ROW, **settings)
        params = {"chunk_lengths": LENGTHS, "chunk_recompute": recompute} if recompute else None
        asked = {"first": (prompt(LENGTHS), params), "second": ([*range(10, 30), *range(60, 100), *range(200, 230), 3, 4], params and {**params, "chunk_lengths": [20, 40, 30]})}
        for name, (tokens, own) in asked.items():
            engine.ask(name, tokens, count=8, **(own or {}))
        for _ in range(steps):
            engine.step()
        names = {"first": ["first"], "both": ["first", "second"], "encode": [name for name in engine.requests if "encode" in name][:1]}[whom]
        states |= {(engine.requests[name].status.name, name in engine.receiving) for name in names if name in engine.requests}
        engine.abort(*names)
        engine.run(300)
        asked = {name: one for name, one in asked.items() if name not in engine.aborted}
        asked["after"] = (prompt(LENGTHS), params)
        engine.ask("after", asked["after"][0], count=3, **(params or {}))
        engine.run(300)
        answers(engine, asked)
        nothing_held(engine)
    if whom == "encode":
        reached = {"WAITING"} | ({"RUNNING"} if settings == {"step_tokens": 16} else set())
        assert {status for status, _ in states} == (reached if recompute else set()), "only chunks are encoded"
    else:
        assert {status for status, _ in states} >= {"WAITING", "RUNNING"}
        assert ("WAITING_FOR_REMOTE_KVS", True) in states or recompute != "none"
        # Both run at first, and their answers need one block too many. Ordinary prompts share blocks.
        preempts = whom == "both" and settings == {"blocks": 26 if recompute else 24}
        assert any(status == "PREEMPTED" for status, _ in states) or not preempts


@pytest.mark.parametrize("recompute", ["none", "link:4", "question:0.5"])
@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"max_chunk_tokens": SIZE}, {"host_memory": HELD * ROW}])
@pytest.mark.parametrize("failed", range(6))
def test_chunks_that_could_not_be_saved_are_computed_by_the_engine(failed: int, settings: dict, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save with the number ``failed`` fails, of two requests that share the system prompt. A third one comes afterwards."""
    engine, saves, asked = Engine(monkeypatch, **settings), itertools.count(), {}
    engine.failing_saves = lambda: next(saves) == failed
    params = {"chunk_lengths": LENGTHS, "chunk_recompute": recompute}
    asked["first"] = (prompt(LENGTHS), params)
    asked["second"] = ([*range(10, 30), *range(200, 270), 3, 4], params)
    for name, (tokens, _) in asked.items():
        engine.ask(name, tokens, count=4, **params)
    engine.run(300)
    refused = tuple(name for name in asked if "chunk_error" in engine.answers[name][1])
    # With one encode for each part, there are five saves.
    assert bool(refused) == (failed < next(saves)), "whoever waits for the rows goes on without them"
    assert all("could not be copied to host memory" in engine.answers[name][1]["chunk_error"] for name in refused)
    answers(engine, asked, refused=refused)
    engine.ask("after", asked["first"][0], **params)
    engine.run(100)
    answers(engine, {"after": asked["first"]})
    nothing_held(engine)
