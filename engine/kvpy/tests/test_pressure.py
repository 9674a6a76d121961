"""The connector under pressure: small limits, other requests' evictions, aborts. Every request is answered, and
as if there were room for everything.
"""

from __future__ import annotations

import hashlib
import itertools
import json

import pytest
from fake_engine import ROW, SIZE, Engine, context
from roomy import Roomy

from kvcache import BlockPool

ROOMY = Roomy()
HELD = 24 + 32 + 40
"""The number of tokens in host memory of parts of 20, 30 and 40 tokens."""


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
        where = context(engine.weights, None, {}, engine.salt_of(name))
        right = ROOMY.answer(tokens, len(got), where, None if error else params)
        assert got == right, f"{name} is answered {got} instead of {right}"


def nothing_held(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
    side = engine.side
    assert not side.requests and not side.saving and not side.loads, "something is kept of requests that have ended"
    assert len(engine.kv_cache_manager.unused) == len(engine.kv_cache_manager.holders) - 1, "blocks of the engine are held"
    side.chunks.cache.check_invariants()
    nothing_held_of_the_tier(engine)
    side.reset()
    assert side.chunks.cache.get_metrics().used_blocks == 0, "rows of chunks are held"
    pool = tier_of(engine)
    assert pool is None or pool.counts()["free"] == pool.counts()["total"], "blocks of the tier are held"


def tier_of(engine: Engine) -> BlockPool | None:
    """Returns the pool of the tier, if there is one."""
    return getattr(engine.side.prefixes, "pool", None)


def nothing_held_of_the_tier(engine: Engine) -> None:
    pool = tier_of(engine)
    if pool is None:
        return
    for _ in range(2_000):
        if not engine.side.waits_for_disk():
            break
        engine.step()
    assert not engine.side.prefixes.saving, "blocks of the tier are still being saved"
    counts = pool.counts()
    assert counts["mutable"] == counts["shared"] == 0, f"blocks of the tier are held: {counts}"
    pool.check_invariants()


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


@pytest.mark.parametrize("policy", ["lru", "tiny-lfu", "s3-fifo", "priority"])
def test_a_request_that_waits_for_room_evicts_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is being copied in holds most of the memory, and another chunk is there for later."""
    engine = Engine(monkeypatch, host_memory=(24 + 32 + 40 + 16) * ROW, cache_policy=policy, delay=lambda: 8)
    asked = {
        "kept": (prompt([8, 8], first=300), {"chunk_lengths": [8, 8]}),
        "large": (prompt([20, 30, 40]), {"chunk_lengths": [20, 30, 40]}),
        "waits": (prompt([8, 30], first=200), {"chunk_lengths": [8, 30]}),
    }
    engine.ask("kept", asked["kept"][0], **asked["kept"][1])
    engine.run(50)
    # An idle engine would wait for the copies.
    engine.ask("busy", [3, 4, 5], count=40)
    for name in ("large", "waits"):
        engine.ask(name, asked[name][0], **asked[name][1])
    for _ in range(8):
        engine.step()
        assert engine.side.chunks.cache.get_metrics().evictions == 0, "nothing is gained by an eviction"
    assert engine.side.chunks.pieces.queue, "the request waits"
    engine.run(100)
    answers(engine, asked)
    nothing_held(engine)


class Watched:
    """A chunk cache whose calls are noted."""

    def __init__(self, engine: Engine, calls: list[str]) -> None:
        self.cache, self.calls = engine.side.chunks.cache, calls
        engine.side.chunks.pieces.cache = self

    def __getattr__(self, name: str) -> object:
        self.calls.append(name)
        return getattr(self.cache, name)


@pytest.mark.parametrize("memory", [HELD, HELD - 8])
def test_the_parts_of_a_request_that_waits_for_room_are_hashed_once_more(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests that each need the whole memory, or more, and that try again whenever another one has let go."""
    engine, calls = Engine(monkeypatch, host_memory=memory * ROW), []
    Watched(engine, calls)
    asked = {}
    for number in range(8):
        asked[f"{number}"] = (prompt([20, 30, 40], first=10 + 50 * number), {"chunk_lengths": [20, 30, 40]})
        engine.ask(f"{number}", asked[f"{number}"][0], **asked[f"{number}"][1])
    engine.run(300)
    assert 0 < calls.count("compute_chunk_hash") <= 3 * 8, f"{calls.count('compute_chunk_hash')} parts of 24"
    answers(engine, asked, refused=() if memory == HELD else tuple(asked))
    nothing_held(engine)


def test_the_parts_of_a_request_are_hashed_once_in_each_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup itself hashes them, and returns the hashes."""
    engine, calls = Engine(monkeypatch, max_chunk_tokens=16), []
    Watched(engine, calls)
    asked = {}
    for name in ("cold", "warm"):
        lengths = [20, 30, 40] if name == "cold" else [20, 30, 40, 10]
        asked[name] = (prompt(lengths), {"chunk_lengths": lengths})
        engine.ask(name, asked[name][0], **asked[name][1])
        engine.run(50)
    assert calls.count("acquire_all") == 2 and "compute_chunk_hash" not in calls, calls
    answers(engine, asked)


@pytest.mark.parametrize(("memory", "fits"), [(103, False), (104, True), (0, False), (4096, True)])
def test_a_question_chooses_only_in_prompts_that_its_memory_can_hold(memory: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the prompt in which the question chooses has 13 blocks."""
    engine = Engine(monkeypatch, question_memory=memory * ROW)
    lengths = [20, 30, 40]
    params = {"chunk_lengths": lengths, "chunk_recompute": "question:0.5"}
    tokens = prompt(lengths, question=12)
    engine.ask("one", tokens, **params)
    engine.ask("linked", tokens, chunk_lengths=lengths, chunk_recompute="link:4")
    engine.run(50)
    if not fits:
        reason = engine.answers["one"][1]["chunk_error"]
        assert f"at most {memory // SIZE * SIZE} tokens" in reason and "this one has 102; raise question_memory" in reason
        assert not engine.recomputer.choices
    answers(engine, {"one": (tokens, params), "linked": (tokens, {**params, "chunk_recompute": "link:4"})}, refused=() if fits else ("one",))
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


def test_a_part_of_4096_pieces_is_answered_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, settings = [8, 4096, 5], {"positions": 8192, "blocks": 1200, "step_tokens": 2048}
    engine = Engine(monkeypatch, max_chunk_tokens=1, host_memory=4200 * SIZE * ROW, **settings)
    own = [10 + n % 480 for n in range(4096)]
    asked = {}
    for name, first in (("one", 3), ("other", 7)):
        tokens = [*range(first, first + 8), *own, 5, 6, 7, 8, 9, 3, 4]
        asked[name] = (tokens, {"chunk_lengths": lengths})
        engine.ask(name, tokens, count=1, **asked[name][1])
        engine.run(60)
    assert engine.answers["other"][1] == {"chunk_tokens_reused": 4096 + 5, "chunk_tokens_computed": 8, "chunk_missed": {"0": "other_context"}}
    assert engine.side.chunks.cache.get_metrics().cached_chunks > 4096
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


def old_salt(tokens: list[int], lengths: list[int]) -> str:
    """Returns a hash of everything that a request with chunks depends on, as a client can compute it."""
    ends = list(itertools.accumulate(lengths))
    what = json.dumps(["kvcache chunks v2", None, "alone", "none", ends, []])
    return "kvcache:" + hashlib.sha256(what.encode()).hexdigest()


@pytest.mark.parametrize("chunks_first", [True, False])
def test_no_salt_of_a_client_leads_to_blocks_of_the_connector(chunks_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give salts that the connector uses, that look like them, or that could be guessed."""
    engine = Engine(monkeypatch)
    tokens, params = prompt([20, 30, 40]), {"chunk_lengths": [20, 30, 40]}

    def chunks(name: str) -> str:
        engine.ask(name, tokens, **params)
        salt = engine.requests[name].cache_salt
        engine.run(50)
        return salt

    # A subscriber of vLLM's events sees the salt.
    seen = [chunks("seen")] if chunks_first else []
    engine.failing = lambda: chunks_first
    if chunks_first:
        engine.ask("mixed", prompt([20, 35, 40], first=200), chunk_lengths=[20, 35, 40])
        engine.step()
        engine.run(50)
    engine.failing = lambda: False
    guessed = [old_salt(tokens, [20, 30, 40]), "kvcache:", "kvcache:" + "0" * 64, *(f"kvcache-mixed-{n}" for n in range(30))]
    plain = {}
    for number, salt in enumerate([*seen, *guessed]):
        name = f"plain-{number}"
        engine.ask(name, tokens, salt=salt)
        # Clients with different salts share nothing, and clients with the same salt do.
        engine.ask(f"{name}-again", tokens, salt=salt)
        plain |= {name: (tokens, None), f"{name}-again": (tokens, None)}
        used = engine.requests[name].cache_salt
        assert used == engine.requests[f"{name}-again"].cache_salt and used not in seen
        engine.run(50)
    chunks("after")
    answers(engine, plain | {"after": (tokens, params)})
    nothing_held(engine)


def test_names_of_the_connector_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for _ in range(2):
        engine = Engine(monkeypatch)
        engine.ask("one", prompt([20, 30, 40]), chunk_lengths=[20, 30, 40])
        names.append({*engine.requests, engine.requests["one"].cache_salt} - {"one"})
    assert len(names[0]) == len(names[1]) == 4 and not names[0] & names[1], "another process has other names"


@pytest.mark.parametrize("later", [{}, {"chunk_lengths": [20, 30, 40]}, {"chunk_lengths": [20, 30, 40], "chunk_recompute": "question:0.5"}])
def test_a_client_may_use_ids_that_the_connector_has_used(later: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client knows them from a log. The encodes that had them have ended, and others run."""
    engine, tokens = Engine(monkeypatch, prefix_memory=64 * SIZE * ROW), prompt([20, 30, 40])
    engine.ask("one", tokens, chunk_lengths=[20, 30, 40])
    seen = [name for name in engine.requests if "encode" in name]
    saves: set[str] = set()
    engine.ordered.append(lambda orders: saves.update(save.name for save in orders.saves))
    engine.ask("plain", tokens[40:])
    engine.run(50)
    assert len(seen) == 3 and saves > set(seen), "the names of saves of the tier are known, too"
    asked = {name: (prompt([20, 30, 40], first=100 + number), later or None) for number, name in enumerate(sorted(saves))}
    asked["other"] = (prompt([20, 30, 40], first=300), {"chunk_lengths": [20, 30, 40]})
    for name, (own, params) in asked.items():
        engine.ask(name, own, **(params or {}))
    engine.run(100)
    answers(engine, asked)
    nothing_held(engine)


def test_a_client_may_use_the_ids_of_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    tokens, params = prompt([20, 30, 40]), {"chunk_lengths": [20, 30, 40]}
    asked = {f"kvcache-encode-{number}": (tokens[number:], None) for number in range(6)}
    asked |= {"kvcache-prefix-0": (tokens, None)}
    for name, (own, _) in asked.items():
        engine.ask(name, own)
    engine.ask("one", tokens, **params)
    engine.run(50)
    answers(engine, asked | {"one": (tokens, params)})
    nothing_held(engine)


@pytest.mark.parametrize("waits", ["alone", "with another"])
@pytest.mark.parametrize("delay", [1, 3, 6])
def test_rows_are_let_go_when_they_have_arrived_although_the_request_does_not_run(delay: int, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request takes the last place among those that run, while the rows are copied in."""
    engine = Engine(monkeypatch, max_running=1, delay=lambda: delay)
    asked = {"waits": (prompt([20, 30, 40]), {"chunk_lengths": [20, 30, 40]}), "busy": ([3, 4, 5], None)}
    if waits == "with another":
        asked["other"] = (prompt([20, 50], first=200), {"chunk_lengths": [20, 50]})
    for name in [name for name in asked if name != "busy"]:
        engine.ask(name, asked[name][0], **asked[name][1])
    while "waits" not in engine.receiving:
        engine.step()
    engine.ask("busy", asked["busy"][0], count=60)
    while "waits" not in engine.finished_recving_kv_req_ids:
        engine.step()
        assert engine.steps < 50
    state = engine.side.requests["waits"].chunks
    assert not state.pieces and state not in engine.side.chunks.pieces.states, "the rows are held although they are in the engine's blocks"
    assert "waits" not in engine.answers and not engine.requests["waits"].output_token_ids
    engine.run(300)
    answers(engine, asked)
    nothing_held(engine)


@pytest.mark.parametrize("policy", ["lru", "tiny-lfu", "s3-fifo", "priority"])
@pytest.mark.parametrize("held", [1, 48, HELD])
def test_a_wait_for_room_that_never_comes_ends(held: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no request of the connector's table holds are never let go, so nobody can tell when they will be."""
    engine = Engine(monkeypatch, host_memory=HELD * ROW, cache_policy=policy)
    (stuck,) = engine.side.chunks.cache.acquire(bytes(32), "alone", [], list(range(held)), 0)
    asked = {f"{number}": (prompt([20, 30, 40], first=10 + 90 * number), {"chunk_lengths": [20, 30, 40]}) for number in range(3)}
    for name, (tokens, params) in asked.items():
        engine.ask(name, tokens, **params)
    engine.run(100)
    for name in asked:
        reason = engine.answers[name][1]["chunk_error"]
        assert f"other requests use the host memory, which holds {HELD} tokens; raise host_memory" in reason, reason
    assert engine.encodes == 0
    answers(engine, asked, refused=tuple(asked))
    stuck.abandon()
    engine.ask("after", asked["0"][0], **asked["0"][1])
    engine.run(50)
    answers(engine, {"after": asked["0"]})
    nothing_held(engine)


@pytest.mark.parametrize("recompute", ["none", "link:4"])
def test_rows_are_let_go_when_they_are_in_the_blocks_of_the_engine(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory has room for one request, and three generate at the same time."""
    engine = Engine(monkeypatch, host_memory=(24 + 32 + 40) * ROW)
    lengths, asked = [20, 30, 40], {}
    for number in range(3):
        name, params = f"{number}", {"chunk_lengths": lengths, "chunk_recompute": recompute}
        asked[name] = (prompt(lengths, first=10 + 90 * number), params)
        engine.ask(name, asked[name][0], count=40, **params)
        for _ in range(6):
            engine.step()
        # The rows stay in memory, where later requests find them, but nobody holds them.
        assert not engine.side.chunks.pieces.states and len(engine.running) == number + 1
    engine.run(100)
    answers(engine, asked)
    nothing_held(engine)


def test_rows_are_asked_for_again_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, blocks=32, host_memory=(24 + 32 + 40) * ROW)
    lengths, asked = [20, 30, 40], {}
    for number in range(3):
        asked[f"{number}"] = (prompt(lengths, first=10 + 90 * number), {"chunk_lengths": lengths})
        engine.ask(f"{number}", asked[f"{number}"][0], count=60, **asked[f"{number}"][1])
    engine.run(1_000)
    assert engine.preemptions > 0
    answers(engine, asked)
    nothing_held(engine)


def test_a_request_that_finds_everything_in_the_engines_own_cache_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    lengths = [24, 32, 40]
    asked = {name: (prompt(lengths), {"chunk_lengths": lengths}) for name in ("first", "second")}
    for name, (tokens, params) in asked.items():
        engine.ask(name, tokens, count=20, **params)
        for _ in range(6):
            engine.step()
        assert not engine.side.chunks.pieces.states
    engine.run(50)
    answers(engine, asked)
    nothing_held(engine)


@pytest.mark.parametrize("recompute", ["none", "link:4", "question:0.5"])
@pytest.mark.parametrize("evicted", [1, 2, 3])
def test_chunks_that_the_engine_has_in_its_own_blocks_are_not_computed_again(evicted: int, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host memory has lost some or all of the chunks."""
    engine = Engine(monkeypatch)
    lengths = [24, 32, 40]
    params = {"chunk_lengths": lengths, "chunk_recompute": recompute}
    tokens = prompt(lengths, question=2 * SIZE)
    for name in ("first", "second"):
        engine.ask(name, tokens, count=12, **params)
        engine.run(50)
        if name == "first":
            assert sum(engine.side.chunks.cache.evict_lru() for _ in range(evicted)) == evicted
    assert engine.encodes == 3, "a chunk was computed again"
    assert engine.answers["second"][1] == {"chunk_tokens_reused": 96, "chunk_tokens_computed": 0}
    answers(engine, {name: (tokens, params) for name in ("first", "second")})
    nothing_held(engine)


@pytest.mark.parametrize("recompute", ["none", "link:4"])
def test_only_chunks_that_the_engine_lacks_are_fetched(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has lost the end of the prompt, and the host memory everything."""
    engine = Engine(monkeypatch)
    lengths = [24, 32, 40]
    params = {"chunk_lengths": lengths, "chunk_recompute": recompute}
    tokens = prompt(lengths)
    engine.ask("first", tokens, **params)
    engine.run(50)
    while engine.side.chunks.cache.evict_lru():
        pass
    # The engine asks before the blocks are evicted, and finds fewer of them later.
    engine.ask("second", tokens, **params)
    manager, request = engine.kv_cache_manager, engine.requests["second"]
    assert engine.encodes == 3, "the engine has everything"
    manager.evict_blocks({manager.block_of[0, key] for key in request.block_hashes[8:] if (0, key) in manager.block_of})
    engine.run(50)
    assert engine.encodes == 4, "more than the last chunk was computed"
    assert engine.answers["second"][1] == {"chunk_tokens_reused": 56, "chunk_tokens_computed": 40, "chunk_missed": {"2": "evicted"}}
    answers(engine, {"first": (tokens, params), "second": (tokens, params)})
    nothing_held(engine)


@pytest.mark.parametrize("step_tokens", [8, 20, 64, 256])
@pytest.mark.parametrize("mode", ["alone", "with-system"])
def test_what_a_question_chooses_does_not_depend_on_the_step(step_tokens: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests leave room for a few tokens of a long question, or for none."""
    engine, lengths, asked = Engine(monkeypatch, step_tokens=step_tokens, blocks=80), [20, 30, 40], {}
    for number in range(3):
        asked[f"plain-{number}"] = (list(range(100 + 50 * number, 137 + 50 * number)), None)
        engine.ask(f"plain-{number}", asked[f"plain-{number}"][0], count=30)
    params = {"chunk_lengths": lengths, "chunk_mode": mode, "chunk_recompute": "question:0.5"}
    for name in ("once", "again"):
        asked[name] = (prompt(lengths, question=80), params)
        engine.ask(name, asked[name][0], count=20, **params)
        for _ in range(9):
            engine.step()
    engine.run(500)
    answers(engine, asked)
    nothing_held(engine)


@pytest.mark.parametrize("recompute", ["none", "link:4", "question:0.5"])
def test_a_prompt_without_a_system_prompt_is_served(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = Engine(monkeypatch), {}
    for name, tokens in (("first", prompt([30, 40])), ("turned", [*range(40, 80), *range(10, 40), 3, 4])):
        lengths = [0, 30, 40] if name == "first" else [0, 40, 30]
        asked[name] = (tokens, {"chunk_lengths": lengths, "chunk_recompute": recompute})
        engine.ask(name, tokens, **asked[name][1])
        engine.run(50)
    assert engine.encodes == 2
    answers(engine, asked)
    nothing_held(engine)


def test_misspelt_fields_are_told_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.ask("one", prompt([20, 30]), chunk_length=[20, 30])
    engine.run(50)
    assert "did you mean chunk_lengths?" in engine.answers["one"][1]["chunk_error"]
    answers(engine, {"one": (prompt([20, 30]), None)}, refused=("one",))
