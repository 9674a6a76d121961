"""Resets, at any moment: nothing that was computed before is used afterwards, and every request goes on."""

from __future__ import annotations

import itertools

import pytest
from fake_engine import ROW, Engine, context
from roomy import Roomy
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
            "chosen": (prompt(LENGTHS), {"chunk_lengths": LENGTHS, "chunk_recompute": "question:0.5"}),
            "plain": (plain, None),
            "plain-again": ([*plain, 5, 6], None),
        }
        self.told: dict[str, list[int]] = {}
        self.keeps: set[str] = set()
        """The requests that go on over old blocks."""
        self.refused = 0
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

    def reset(self, *, running: bool) -> None:
        """Loads new weights. vLLM refuses to reset its own cache while it copies rows in."""
        engine = self.engine
        if not running:
            # vLLM keeps the old blocks of requests that run.
            self.keeps = {request.request_id for request in engine.running}
            engine.reset(running=False, new_weights=True)
            return
        for _ in range(50):
            try:
                self.told = {name: list(request.output_token_ids) for name, request in engine.requests.items()}
                assert engine.reset(new_weights=True) is True
                return
            except RuntimeError:
                self.refused += 1
                engine.step()
        raise AssertionError("vLLM never resets its cache")

    def check(self) -> None:
        """Checks that answers go on with the new weights."""
        self.engine.run(200)
        for name, (tokens, params) in self.asked.items():
            got, said = self.engine.answers[name]
            assert "chunk_error" not in (said or {}), f"{name}: {said}"
            if name in self.told and name not in self.keeps:
                old = self.told[name]
                rest = ROOMY.answer(tokens, 6 - len(old), context(1, None, {}), params, old)
                assert got == [*old, *rest], f"{name} uses what was computed before the reset"


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("settings", [{}, {"step_tokens": 16}, {"max_chunks": 2, "step_tokens": 40}])
@pytest.mark.parametrize("running", [True, False])
def test_nothing_from_before_a_reset_is_used_after_it(running: bool, steps: int, settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """``running``: whether vLLM preempts the requests that run."""
    reset = Reset(monkeypatch, steps, **settings)
    engine = reset.engine
    reset.reset(running=running)
    # Everything is free at once, also what was held or on its way.
    assert is_empty(engine)
    reset.check()
    asked_again(reset)


def test_two_resets_in_a_row_and_a_reset_of_nothing_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = Reset(monkeypatch, 3)
    reset.reset(running=True)
    assert reset.engine.reset()
    reset.check()
    assert reset.engine.reset()
    nothing_held(reset.engine)


def test_a_reset_that_vllm_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are being copied in. vLLM has preempted the requests that ran, and has not asked the connector."""
    refused = 0
    for steps in range(8):
        reset = Reset(monkeypatch, steps)
        engine = reset.engine
        if not engine.receiving:
            continue
        before = engine.side.chunks.cache.get_metrics().used_blocks, engine.side.prefixes.pool.counts()
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            engine.reset(new_weights=True)
        assert before == (engine.side.chunks.cache.get_metrics().used_blocks, engine.side.prefixes.pool.counts())
        engine.run(200)
        for name, (tokens, params) in reset.asked.items():
            assert engine.answers[name][0] == ROOMY.answer(tokens, 6, context(0, None, {}), params)
        nothing_held(engine)
        refused += 1
    assert refused > 2


def is_empty(engine: Engine) -> bool:
    """Returns whether the connector has nothing, also on the worker's side."""
    counts = engine.side.prefixes.pool.counts()
    return counts["free"] == counts["total"] and engine.side.chunks.cache.get_metrics().used_blocks == 0


def asked_again(reset: Reset) -> None:
    """Checks that new requests find nothing from before the reset."""
    engine = reset.engine
    for name, (tokens, params) in reset.asked.items():
        engine.ask(f"{name}-after", tokens, count=3, **(params or {}))
    engine.run(200)
    for name, (tokens, params) in reset.asked.items():
        assert engine.answers[f"{name}-after"][0] == ROOMY.answer(tokens, 3, context(1, None, {}), params)
    nothing_held(engine)


@pytest.mark.parametrize("steps", range(10))
def test_sleep_resets_the_connector(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM aborts all requests, also those whose rows are on their way, and wakes up with new weights."""
    reset = Reset(monkeypatch, steps)
    engine = reset.engine
    engine.pause("abort")
    assert is_empty(engine) and not engine.requests and not engine.side.requests
    engine.weights += 1
    engine.resume()
    asked_again(reset)


def test_a_pause_that_keeps_requests_succeeds_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows are copied in, vLLM refuses, and no step ends the copy: only after a step of a resumed vLLM, the pause can
    succeed. Answers go on with the new weights."""
    refused = 0
    for steps in range(10):
        reset = Reset(monkeypatch, steps)
        engine = reset.engine
        if engine.receiving:
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                engine.pause("keep")
            engine.run(50)
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                engine.pause("keep")
            refused += 1
        for _ in range(10):
            try:
                engine.pause("keep")
                break
            except RuntimeError:
                engine.resume()
                engine.step()
        assert is_empty(engine) and engine.is_paused
        reset.told = {name: list(request.output_token_ids) for name, request in engine.requests.items()}
        engine.weights += 1
        engine.resume()
        reset.check()
        asked_again(reset)
    assert refused > 2


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


@pytest.mark.parametrize("params", [{"chunk_lengths": LENGTHS}, {"chunk_lengths": LENGTHS, "chunk_recompute": "link:4"}, None])
@pytest.mark.parametrize("preempted", [False, True])
def test_no_other_request_finds_what_was_computed_over_old_blocks(preempted: bool, params: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request runs on through a reset, and its answer fills new blocks."""
    engine = Engine(monkeypatch, prefix_memory=200 * 8 * ROW)
    tokens = prompt(LENGTHS)
    engine.ask("runs-on", tokens, count=40, **(params or {}))
    while len(engine.requests.get("runs-on").output_token_ids) < 3:
        engine.step()
    assert engine.reset(running=False, new_weights=True) is False, "vLLM keeps its own cache"
    for _ in range(16):
        engine.step()
    if preempted:
        engine._preempt(engine.running.pop())
    engine.run(100)
    answer, _ = engine.answers["runs-on"]
    # A conversation goes on: the blocks of the answer have the same tokens.
    going_on = [*tokens, *answer, 3]
    for name in ("next", "again", "from-the-tier"):
        if name == "from-the-tier":
            engine.kv_cache_manager.reset()
        engine.ask(name, going_on, count=3, **(params or {}))
        engine.run(50)
        assert engine.answers[name][0] == ROOMY.answer(going_on, 3, context(1, None, {}), params), f"{name} found old rows"
    nothing_held(engine)


def test_a_reset_reaches_the_choices_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.ask("one", prompt(LENGTHS), chunk_lengths=LENGTHS, chunk_recompute="question:0.5")
    engine.run(50)
    assert engine.recomputer.choices
    engine.reset()
    engine.ask("plain", [3, 4, 5])
    engine.run(50)
    assert not engine.recomputer.choices


@pytest.mark.parametrize("share", ["0.1", "0.5", "0.9"])
@pytest.mark.parametrize("running", [True, False])
def test_a_question_chooses_anew_after_a_reset(running: bool, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt, over other weights, of which the question attends to other tokens."""
    engine = Engine(monkeypatch)
    params = {"chunk_lengths": LENGTHS, "chunk_recompute": f"question:{share}"}
    for weights in range(3):
        for name in ("first", "again"):
            engine.ask(f"{name}-{weights}", prompt(LENGTHS), count=4, **params)
            engine.run(50)
            right = ROOMY.answer(prompt(LENGTHS), 4, context(weights, None, {}), params)
            assert engine.answers[f"{name}-{weights}"][0] == right, f"{name}, weights {weights}"
        assert len(engine.recomputer.choices) == 1, "a question chooses once"
        assert engine.reset(running=running, new_weights=True) is True
    nothing_held(engine)


def test_a_request_that_waits_for_room_after_its_copy_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has seen the end of the copy, and has no block for the rest of the request."""
    for params in ({"chunk_lengths": LENGTHS}, None):
        engine = Engine(monkeypatch, blocks=40, prefix_memory=200 * 8 * ROW)
        # The question needs blocks that the rows do not.
        tokens = prompt(LENGTHS, question=30)
        engine.ask("before", tokens[:100], count=1, **(params or {}))
        engine.run(50)
        engine.kv_cache_manager.reset()
        engine.ask("one", tokens, count=3, **(params or {}))
        engine.step()
        assert "one" in engine.receiving
        engine.kv_cache_manager.tables["other"] = [taken] = [list(engine.kv_cache_manager.unused)]
        engine.kv_cache_manager.unused.clear()
        engine.step()
        engine.step()
        assert "one" not in engine.receiving and not engine.running, "it has been promoted, and does not run"
        assert engine.connector.reset_cache() is True
        engine.weights += 1
        del engine.kv_cache_manager.tables["other"]
        engine.kv_cache_manager.unused.update(dict.fromkeys(taken))
        engine.run(50)
        assert engine.answers["one"][0] == ROOMY.answer(tokens, 3, context(1, None, {}), params)
        nothing_held(engine)


@pytest.mark.parametrize("params", [{"chunk_lengths": LENGTHS}, {"chunk_lengths": LENGTHS, "chunk_mode": "with-system"}, None])
def test_nothing_old_is_found_when_vllm_refused_its_own_reset(params: dict | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request runs on, so vLLM keeps its cache, and resets the connector all the same."""
    engine = Engine(monkeypatch, prefix_memory=200 * 8 * ROW)
    tokens = prompt(LENGTHS)
    engine.ask("before", tokens, count=1, **(params or {}))
    engine.run(50)
    engine.ask("runs-on", list(range(300, 340)), count=30)
    for _ in range(3):
        engine.step()
    assert not engine.kv_cache_manager.reset() and engine.connector.reset_cache() is True
    engine.weights += 1
    for name in ("after", "again"):
        engine.ask(name, tokens, count=3, **(params or {}))
        for _ in range(12):
            engine.step()
        assert engine.answers[name][0] == ROOMY.answer(tokens, 3, context(1, None, {}), params)
    engine.run(50)
    engine.kv_cache_manager.reset()
    engine.ask("from-the-tier", tokens, count=3, **(params or {}))
    engine.run(50)
    assert engine.answers["from-the-tier"][0] == ROOMY.answer(tokens, 3, context(1, None, {}), params)
    nothing_held(engine)
