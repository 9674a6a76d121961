"""The connector under pressure: small limits, other requests' evictions, aborts. Every request is answered, and
as if there were room for everything.
"""

from __future__ import annotations

import pytest
from fake_engine import ROW, SIZE, Engine, Roomy, context

ROOMY = Roomy()


def prompt(lengths: list[int], first: int = 10, question: int = 6) -> list[int]:
    """Returns a prompt whose parts, of these lengths, are consecutive tokens from ``first`` on, with a question."""
    return [*range(first, first + sum(lengths)), *range(3, 3 + question)]


def answers(engine: Engine, asked: dict[str, tuple[list[int], dict | None]], *, refused: tuple[str, ...] = ()) -> None:
    """Checks the answers of requests, given as their prompts and parameters. The ones in ``refused`` must have
    been answered without chunks."""
    for name, (tokens, params) in asked.items():
        got, said = engine.answers[name]
        error = (said or {}).get("chunk_error")
        assert (error is not None) == (name in refused), f"{name}: {said}"
        right = ROOMY.answer(tokens, len(got), context(engine.weights, None, {}), None if error else params)
        assert got == right, f"{name} is answered {got} instead of {right}"


def nothing_held(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    side = engine.side
    assert not side.requests and not side.saving and not side.loads, "something is kept of requests that have ended"
    assert len(engine.kv_cache_manager.free) == len(engine.kv_cache_manager.holders) - 1, "blocks of the engine are held"
    side.chunks.cache.check_invariants()
    side.reset()
    assert side.chunks.cache.get_metrics().used_blocks == 0, "rows of chunks are held"


@pytest.mark.parametrize(
    ("settings", "lengths", "encodes"),
    [
        ({"max_chunks": 1}, [20, 30, 40], 3),
        ({"max_chunks": 2}, [20, 30, 40, 50], 4),
        # Each chunk has several pieces, and the index holds one.
        ({"max_chunks": 1, "max_chunk_tokens": 8}, [20, 30, 40], 3),
        ({"max_chunks": 3, "max_chunk_tokens": 16}, [5, 100], 2),
        # The arena has exactly as many blocks as the request needs.
        ({"host_memory": (24 + 32 + 40) * ROW}, [20, 30, 40], 3),
        ({"host_memory": (24 + 32 + 40) * ROW, "max_chunks": 1}, [20, 30, 40], 3),
    ],
)
def test_a_request_ends_however_few_pieces_are_kept(settings: dict, lengths: list[int], encodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, **settings)
    tokens, params = prompt(lengths), {"chunk_lengths": lengths}
    engine.ask("one", tokens, **params)
    engine.run(100)
    assert engine.encodes == encodes
    answers(engine, {"one": (tokens, params)})
    nothing_held(engine)


def test_requests_that_fill_the_index_together_both_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has six parts, and the index holds eight."""
    engine = Engine(monkeypatch, max_chunks=8)
    asked = {}
    for number, name in enumerate(("first", "second")):
        lengths = [7, 9, 11, 13, 15, 17]
        asked[name] = (prompt(lengths, first=10 + 100 * number), {"chunk_lengths": lengths})
        engine.ask(name, asked[name][0], count=20, **asked[name][1])
    for _ in range(10):
        engine.step()
    assert len(engine.running) == 2, "one waits until the other has ended"
    engine.run(100)
    assert engine.encodes == 12
    answers(engine, asked)
    nothing_held(engine)


def test_what_others_evict_between_two_steps_is_handed_over_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, everything that is not held is evicted."""
    engine = Engine(monkeypatch, step_tokens=16)
    asked = {}
    for number, lengths in enumerate(([20, 30, 40], [20, 30, 60], [20, 40])):
        asked[f"{number}"] = (prompt(lengths), {"chunk_lengths": lengths})
        engine.ask(f"{number}", asked[f"{number}"][0], **asked[f"{number}"][1])
    for _ in range(100):
        engine.step()
        while engine.side.chunks.cache.evict_lru():
            pass
    assert not engine.requests and engine.encodes == 5, f"{sorted(engine.requests)}, {engine.encodes} encodes"
    answers(engine, asked)
    nothing_held(engine)


def test_a_request_waits_for_room_until_others_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of five requests needs the whole memory."""
    engine = Engine(monkeypatch, host_memory=(24 + 32 + 40) * ROW, delay=lambda: 3)
    asked = {}
    for number in range(5):
        lengths = [20, 30, 40]
        asked[f"{number}"] = (prompt(lengths, first=10 + 90 * number), {"chunk_lengths": lengths})
        engine.ask(f"{number}", asked[f"{number}"][0], count=4, **asked[f"{number}"][1])
    engine.run(300)
    assert engine.encodes == 15
    answers(engine, asked)
    nothing_held(engine)


@pytest.mark.parametrize(
    ("settings", "lengths", "reason"),
    [
        ({"host_memory": 40 * ROW}, [20, 30, 40], "the chunks take 96 tokens of host memory, which holds 40"),
        ({"host_memory": SIZE * ROW}, [5, 9], "the chunks take 24 tokens of host memory, which holds 8"),
        ({"host_memory": 88 * ROW, "max_chunk_tokens": SIZE}, [20, 30, 40], "take 96 tokens of host memory, which holds 88"),
    ],
)
def test_a_request_that_never_fits_goes_on_without_chunks_at_once(settings: dict, lengths: list[int], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, **settings)
    engine.ask("one", prompt(lengths), chunk_lengths=lengths)
    engine.run(10)
    assert engine.encodes == 0 and reason in engine.answers["one"][1]["chunk_error"]
    answers(engine, {"one": (prompt(lengths), None)}, refused=("one",))
    nothing_held(engine)


def test_a_request_whose_encodes_are_aborted_twice_goes_on_without_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, step_tokens=8)
    for name in ("one", "two"):
        engine.ask(name, prompt([20, 30, 40]), chunk_lengths=[20, 30, 40])
    for _ in range(2):
        engine.step()
        engine.abort(*[name for name in list(engine.requests) if "encode" in name])
    engine.run(100)
    reason = engine.answers["one"][1]["chunk_error"]
    assert "aborted" in reason
    answers(engine, {name: (prompt([20, 30, 40]), None) for name in ("one", "two")}, refused=("one", "two"))
    nothing_held(engine)


@pytest.mark.parametrize(
    ("lengths", "first"),
    [
        ([4] + [1] * 400, 10),
        ([400, 40], 10),
    ],
)
def test_prompts_of_very_many_or_very_long_parts_are_answered(lengths: list[int], first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, max_chunk_tokens=1 if lengths[0] == 400 else 4096, host_memory=8192 * ROW)
    asked = {"one": (prompt(lengths, first), {"chunk_lengths": lengths})}
    engine.ask("one", asked["one"][0], **asked["one"][1])
    engine.run(300)
    answers(engine, asked)
    nothing_held(engine)


def test_a_chunk_may_equal_the_system_prompt_or_another_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    one = list(range(10, 30))
    tokens, params = [*one, *one, *range(40, 50), *one, 3, 4, 5], {"chunk_lengths": [20, 20, 10, 20]}
    engine.ask("one", tokens, **params)
    engine.run(50)
    assert engine.encodes == 2
    answers(engine, {"one": (tokens, params)})
    nothing_held(engine)
