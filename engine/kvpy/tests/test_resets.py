"""Resets, at any moment: nothing that was computed before is used afterwards, and every request goes on."""

from __future__ import annotations

import itertools

import pytest
from fake_engine import ROW, Engine, Roomy, context
from test_pressure import nothing_held, prompt

ROOMY = Roomy()
LENGTHS = [20, 30, 40]


class Reset:
    """Requests of all kinds, a reset after some steps, and the answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int, **settings: object) -> None:
        delays = itertools.cycle([0, 3, 1])
        self.engine = Engine(monkeypatch, delay=lambda: next(delays), prefix_memory=200 * 8 * ROW, **settings)
        plain = [*range(300, 360), 4]
        self.asked = {
            "chunks": (prompt(LENGTHS), {"chunk_lengths": LENGTHS}),
            "linked": (prompt(LENGTHS), {"chunk_lengths": LENGTHS, "chunk_recompute": "link:4"}),
            "turned": ([*range(10, 30), *range(60, 100), *range(30, 60), 3, 4, 5], {"chunk_lengths": [20, 40, 30]}),
            "plain": (plain, None),
            "plain-again": ([*plain, 5, 6], None),
        }
        self.told: dict[str, list[int]] = {}
        # What the first requests leave is found by the others.
        for name in ("chunks", "plain"):
            self.engine.ask(f"before-{name}", self.asked[name][0], count=1, **(self.asked[name][1] or {}))
        self.engine.run(50)
        self.engine.kv_cache_manager.reset()
        for name, (tokens, params) in self.asked.items():
            self.engine.ask(name, tokens, count=6, **(params or {}))
        for _ in range(steps):
            self.engine.step()
        self.told = {name: list(request.output_token_ids) for name, request in self.engine.requests.items()}

    def check(self) -> None:
        """Checks that answers go on with the new weights."""
        self.engine.run(200)
        for name, (tokens, params) in self.asked.items():
            got, said = self.engine.answers[name]
            assert "chunk_error" not in (said or {}), f"{name}: {said}"
            if name in self.told:
                old = self.told[name]
                rest = ROOMY.answer(tokens, 6 - len(old), context(1, None, {}), params, old)
                assert got == [*old, *rest], f"{name} uses what was computed before the reset"


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"max_chunks": 2, "step_tokens": 40}])
def test_nothing_from_before_a_reset_is_used_after_it(steps: int, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = Reset(monkeypatch, steps, **settings)
    engine = reset.engine
    assert engine.reset(new_weights=True) is True
    # Everything is free at once, also what was held or on its way.
    counts = engine.side.prefixes.pool.counts()
    assert counts["free"] == counts["total"] and engine.side.chunks.cache.get_metrics().used_blocks == 0
    reset.check()
    for name, (tokens, params) in reset.asked.items():
        engine.ask(f"{name}-after", tokens, count=3, **(params or {}))
    engine.run(200)
    for name, (tokens, params) in reset.asked.items():
        assert engine.answers[f"{name}-after"][0] == ROOMY.answer(tokens, 3, context(1, None, {}), params)
    nothing_held(engine)


def test_two_resets_in_a_row_and_a_reset_of_nothing_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = Reset(monkeypatch, 3)
    assert reset.engine.reset(new_weights=True) and reset.engine.reset()
    reset.check()
    assert reset.engine.reset()
    nothing_held(reset.engine)


def test_blocks_of_a_request_that_runs_on_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset of the connector alone: vLLM keeps the old blocks of requests that run, and the tier must not get
    them."""
    engine = Engine(monkeypatch, prefix_memory=200 * 8 * ROW)
    engine.ask("plain", list(range(10, 50)), count=40)
    for _ in range(4):
        engine.step()
    assert engine.connector.reset_cache() is True
    engine.run(100)
    assert engine.side.prefixes.pool.counts()["cached"] == 0
    engine.kv_cache_manager.reset()
    engine.ask("again", list(range(10, 50)), count=40)
    engine.run(100)
    assert engine.side.prefixes.pool.counts()["cached"] > 0, "requests after the reset are saved as ever"


def test_a_reset_reaches_the_choices_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.ask("one", prompt(LENGTHS), chunk_lengths=LENGTHS, chunk_recompute="question:0.5")
    engine.run(50)
    assert engine.recomputer.chosen
    engine.reset()
    engine.ask("plain", [3, 4, 5])
    engine.run(50)
    assert not engine.recomputer.chosen
