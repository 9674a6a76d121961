"""The connector on models with several kinds of layers: full attention and sliding windows, each with its own table of
blocks. The engine's prefix cache knows the blocks of a window only at the end of a prompt, as vLLM's does.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_engine import ROW, SIZE, Engine, context, model_of, spec_of
from replay import configs
from roomy import Roomy, seen
from test_pressure import nothing_held
from traffic import finish

from kvcache import KvCacheError, Ropes, prefix_keys
from kvcache.vllm.host import Roots, Settings, UnsupportedHostError, geometry, ropes_for

# Windows that end within blocks and at their ends, that are smaller than a block, and that differ; groups with full
# attention first, last, and twice; and no group with full attention.
WINDOWS = [(None, 20), (20, None), (17, 17, None), (None, 4, 40), (SIZE + 1, None, None, SIZE), (12, 30)]
ROOMIES = {windows: Roomy(windows) for windows in WINDOWS}
ORDERS = [(0, 1, 2), (0, 2), (0, 1, 3), (1, 0), (0, 1, 2, 3), (2,)]
TEXTS = [list(range(20 + 100 * n, 20 + 100 * n + length)) for n, length in enumerate((40, 33, 50, 24))]
windows_of = pytest.mark.parametrize("windows", WINDOWS, ids=lambda windows: "-".join(str(window) for window in windows))


def engine_of(monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...], tier: int = 400, **settings: object) -> Engine:
    """Returns an engine with a tier of this many blocks."""
    layers = 2 * len(windows) - 1
    return Engine(monkeypatch, windows=windows, prefix_memory=tier * SIZE * ROW * layers, **settings)


def prompt(order: tuple[int, ...], question: int = 5) -> list[int]:
    return [token for number in order for token in TEXTS[number]] + list(range(450, 450 + question))


MODES = ["alone", "with-system", "sink:2"]


def with_chunks(order: tuple[int, ...], mode: str, **more: str) -> tuple[list[int], dict[str, object]]:
    system = list(range(5, 17))
    return system + prompt(order), {"chunk_lengths": [len(system), *(len(TEXTS[number]) for number in order)], "chunk_mode": mode, **more}


def answered(engine: Engine, name: str, tokens: list[int]) -> None:
    """Checks that a request was answered as in an engine with room for everything."""
    got = engine.answers[name][0]
    assert got == ROOMIES[engine.windows].answer(tokens, len(got), context(engine.weights, None, {}, engine.salt_of(name)), None), name


@windows_of
@pytest.mark.parametrize("step_tokens", [SIZE, 20, 256])
def test_prompts_that_share_beginnings_are_found(windows: tuple[int | None, ...], step_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, windows, step_tokens=step_tokens)
    tier, asked = engine.side.prefixes, []
    for round_ in range(2):
        for number, order in enumerate(ORDERS):
            # The engine forgets, so that everything comes from the tier.
            engine.kv_cache_manager.reset()
            tokens, name, before = prompt(order), f"{round_}-{number}", tier.tokens_found
            engine.ask(name, tokens, count=12)
            engine.run(100)
            answered(engine, name, tokens)
            # The longest beginning of whole blocks that the prompt shares with an earlier prompt and its answer.
            shared = max((_shared(tokens[:-1], other) for other in asked), default=0) // SIZE * SIZE
            assert tier.tokens_found - before == shared, f"prompt {name}"
            asked.append(tokens + engine.answers[name][0][:-1])
    nothing_held(engine)


def _shared(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@windows_of
def test_blocks_that_a_window_has_passed_are_not_written(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine checks that every block that is written is the request's own."""
    engine, tokens = engine_of(monkeypatch, windows), prompt((0, 1, 2))
    engine.ask("first", tokens)
    engine.run(50)
    engine.kv_cache_manager.reset()
    orders = []
    engine.ordered.append(orders.append)
    engine.ask("second", tokens)
    engine.run(50)
    (load,) = [load for one in orders for load in one.loads]
    ((source, targets, distance),) = load.rows
    end = (len(tokens) - 1) // SIZE
    assert source[2] == end * SIZE and distance == 0 and len(targets) == len(windows)
    for (blocks, first, count), window in zip(targets, windows):
        passed = 0 if window is None else (end * SIZE - window + 1) // SIZE
        assert (first, count) == (0, end * SIZE) and blocks[:passed] == [-1] * passed and min(blocks[passed:]) > 0
    written = [block for blocks, _, _ in targets for block in blocks if block > 0]
    assert len(written) == len(set(written)), "groups share a block"
    answered(engine, "second", tokens)


@windows_of
def test_the_rest_of_a_prompt_is_found_behind_the_engines_own(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = engine_of(monkeypatch, windows), prompt((0, 1, 2))
    engine.ask("first", tokens)
    engine.run(50)
    for length in (SIZE + 1, 40, 72):
        engine.kv_cache_manager.reset()
        engine.ask(f"short-{length}", tokens[:length], count=1)
        engine.run(50)
        before, own = engine.side.prefixes.tokens_found, (length - 1) // SIZE * SIZE
        engine.ask(f"again-{length}", tokens)
        engine.run(50)
        answered(engine, f"again-{length}", tokens)
        assert engine.side.prefixes.tokens_found - before == (len(tokens) - 1) // SIZE * SIZE - own


@windows_of
def test_nothing_after_a_block_that_a_window_has_passed_is_saved(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the beginning of a prompt that the tier has lost."""
    engine, tokens = engine_of(monkeypatch, windows), prompt((0, 1, 2))
    engine.ask("first", tokens, count=1)
    engine.run(50)
    engine.side.prefixes.reset()
    engine.ask("second", [*tokens, *TEXTS[3]], count=1)
    engine.run(50)
    counts, own = engine.side.prefixes.pool.counts(), (len(tokens) - 1) // SIZE * SIZE
    passed = [0 if window is None else (own - window + 1) // SIZE for window in windows]
    assert counts["cached"] == (0 if max(passed) > 0 else (len(tokens) + len(TEXTS[3])) // SIZE)
    engine.kv_cache_manager.reset()
    for name, later in (("third", [*tokens, *TEXTS[3], 7]), ("fourth", [*tokens, *TEXTS[3], 7])):
        engine.ask(name, later, count=1)
        engine.run(50)
        answered(engine, name, later)
    nothing_held(engine)


@pytest.mark.parametrize("windows", [*WINDOWS, (20,)], ids=lambda windows: "-".join(str(window) for window in windows))
@pytest.mark.parametrize("step_tokens", [20, 256])
def test_no_prompt_leaves_for_blocks_that_cannot_be_saved(windows: tuple[int | None, ...], step_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has the long beginning of a prompt, the tier lacks it, and is full of another prompt."""
    engine, tokens, other = engine_of(monkeypatch, windows, 10, step_tokens=step_tokens), prompt((0, 1, 2)), [7] * (10 * SIZE)
    engine.ask("first", tokens, count=1)
    engine.run(50)
    tier = engine.side.prefixes
    tier.reset()
    engine.ask("other", other, count=1)
    engine.run(50)
    assert (before := tier.pool.counts())["free"] == 0
    for name, later in (("second", [*tokens, *TEXTS[3]]), ("third", [*tokens, *TEXTS[3][::-1]])):
        engine.ask(name, later, count=12)
        engine.run(50)
    own = (len(tokens) - 1) // SIZE * SIZE
    has_passed = any(window is not None and own - window + 1 >= SIZE for window in windows)
    assert has_passed and tier.pool.counts()["evictions"] == before["evictions"] and tier.pool.counts()["cached"] == 10
    # The beginning of another prompt, which no window has passed, is saved as ever.
    engine.ask("fourth", TEXTS[1], count=1)
    engine.run(50)
    assert tier.pool.counts()["evictions"] - before["evictions"] == len(TEXTS[1]) // SIZE
    nothing_held(engine)


HAPPENED: Counter[str] = Counter()
"""How often each thing happened under random traffic, over all seeds."""
RAN: set[int] = set()
"""The seeds that have run."""


class Traffic:
    """Random requests under small limits: aborts, preemption, late copies, resets, salts. Either some of them have chunks,
    or copies fail."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.draw = draw = random.Random(seed)
        windows = WINDOWS[seed % len(WINDOWS)]
        self.engine = engine_of(
            monkeypatch,
            windows,
            draw.choice([12, 40, 200]),
            blocks=1 + len(windows) * draw.choice([26, 40]),
            step_tokens=draw.choice([16, 40, 128]),
            max_running=draw.choice([3, 8]),
            delay=lambda: draw.choice([0, 0, 1, 4]),
            cache_policy=draw.choice(["lru", "tiny-lfu", "s3-fifo", "priority"]),
        )
        self.has_chunks = seed % 4 >= 2
        if not self.has_chunks:
            self.engine.failing = lambda: draw.random() < 0.1
        self.asked: dict[str, tuple[list[int], dict[str, object]]] = {}
        self.happened: Counter[str] = Counter()
        self.changed: set[str] = set()
        """The requests during which weights changed, so that they have old and new rows."""

    def ask(self) -> None:
        draw, name = self.draw, f"{len(self.asked)}"
        order = tuple(draw.randrange(4) for _ in range(draw.randrange(1, 4)))
        tokens, params = prompt(order, draw.choice([1, 5, 20])), {}
        if self.has_chunks and draw.random() < 0.4:
            tokens, params = with_chunks(order, draw.choice(MODES))
        self.asked[name] = tokens, params
        self.engine.ask(name, tokens, count=draw.choice([1, 3, 12, 30]), salt=draw.choice([None, None, "alice"]), **params)

    def reset(self) -> None:
        running, names = self.draw.random() < 0.5, set(self.engine.requests)
        try:
            self.engine.reset(running=running, new_weights=True)
        except RuntimeError:
            self.happened["refused resets"] += 1
            return
        self.happened["resets with preemption" if running else "resets beside running requests"] += 1
        self.changed |= names

    def run(self, requests: int) -> None:
        draw, engine = self.draw, self.engine
        while len(self.asked) < requests:
            for _ in range(draw.choice([1, 1, 2, 4])):
                self.ask()
            for _ in range(draw.randrange(12)):
                self.step()
            if engine.requests and draw.random() < 0.15:
                name = draw.choice(list(engine.requests))
                self.happened["aborts" if name in self.asked else "aborts of encodes"] += 1
                self.happened["aborts of copies"] += name in engine.receiving
                engine.abort(name)
            if draw.random() < 0.05:
                self.reset()
        finish(engine, self.step)

    def step(self) -> None:
        weights, ended = self.engine.weights, set(self.engine.answers)
        self.engine.step()
        for name in (set(self.engine.answers) & set(self.asked)) - ended - self.engine.aborted - self.changed:
            (got, said), (tokens, params) = self.engine.answers[name], self.asked[name]
            served = params if params and "chunk_error" not in said else None
            assert got == ROOMIES[self.engine.windows].answer(tokens, len(got), context(weights, None, {}, self.engine.salt_of(name)), served), name


@pytest.mark.parametrize("seed", range(2 * len(WINDOWS)))
def test_random_requests_are_answered_as_if_there_were_room(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(seed, monkeypatch)
    traffic.run(150)
    engine, tier = traffic.engine, traffic.engine.side.prefixes
    assert tier.tokens_found == engine.arrived > 0 and tier.blocks_saved > 0
    assert len(engine.answers) - engine.encodes == len(traffic.asked) and (engine.encodes > 0) == traffic.has_chunks
    reachable = set()
    for salt in (None, "alice"):
        root = tier.roots.of(SimpleNamespace(lora_request=None, cache_salt=salt))
        for name, (tokens, _) in traffic.asked.items():
            hold = tier.pool.lookup(prefix_keys(root, [*tokens, *engine.answers[name][0]], SIZE))
            reachable.update(hold.ids)
            hold.release()
    assert tier.pool.counts()["cached"] == len(reachable), "blocks are kept that nothing finds"
    nothing_held(engine)
    HAPPENED.update(traffic.happened)
    HAPPENED.update({"preemptions": engine.preemptions, "failed copies": len(engine.broken), "evictions": tier.pool.counts()["evictions"]})
    RAN.add(seed)


def test_everything_has_happened() -> None:
    if RAN != set(range(2 * len(WINDOWS))):
        pytest.skip("only some of the seeds have run")
    often = {"preemptions", "evictions", "failed copies", "aborts", "resets with preemption", "resets beside running requests"}
    seldom = {"refused resets", "aborts of encodes", "aborts of copies"}
    assert not {name for name in often if HAPPENED[name] < 10} | {name for name in seldom if HAPPENED[name] < 1}, HAPPENED


@windows_of
def test_requests_are_preempted_and_go_on(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, windows, blocks=1 + 26 * len(windows), step_tokens=64)
    asked = {f"{number}": prompt(order) for number, order in enumerate(ORDERS * 2)}
    for name, tokens in asked.items():
        # Nothing is shared, so that blocks run short.
        engine.ask(name, tokens, count=50, salt=name)
    engine.run(2_000)
    assert engine.preemptions > 0 and engine.side.prefixes.tokens_found > 0
    for name, tokens in asked.items():
        answered(engine, name, tokens)
    nothing_held(engine)


@windows_of
def test_salts_and_resets_hold_for_all_groups(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = engine_of(monkeypatch, windows), prompt((0, 1))

    def found(name: str, salt: str | None) -> int:
        engine.kv_cache_manager.reset()
        before = engine.side.prefixes.tokens_found
        engine.ask(name, tokens, salt=salt)
        engine.run(50)
        answered(engine, name, tokens)
        return engine.side.prefixes.tokens_found - before

    full = (len(tokens) - 1) // SIZE * SIZE
    assert [found("alice", "alice"), found("bob", "bob"), found("alice-again", "alice"), found("nobody", None)] == [0, 0, full, 0]
    assert engine.reset(new_weights=True)
    assert [found("alice-reset", "alice"), found("alice-then", "alice")] == [0, full]
    nothing_held(engine)


@windows_of
def test_routers_are_told_of_the_blocks_of_each_group(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = engine_of(monkeypatch, windows, 6, has_events=True), prompt((0,))
    known: dict[int, set[bytes]] = {group: set() for group in range(len(windows))}

    def follow() -> None:
        for event in engine.connector.take_events():
            if hasattr(event, "token_ids"):
                window = windows[event.group_idx]
                assert event.kv_cache_spec_kind == ("full_attention" if window is None else "sliding_window")
                assert event.kv_cache_spec_sliding_window == window and event.medium == "CPU"
                known[event.group_idx].update(event.block_hashes)
            else:
                known[event.group_idx].difference_update(event.block_hashes)

    for name, asked in (("first", tokens), ("second", prompt((1, 2)))):
        engine.ask(name, asked, count=1)
        engine.run(50)
        follow()
        assert {len(blocks) for blocks in known.values()} == {min(6, len(asked) // SIZE)} == {engine.side.prefixes.pool.counts()["cached"]}
    engine.reset()
    follow()
    assert not any(known.values())


@windows_of
@pytest.mark.parametrize("step_tokens", [SIZE, 20, 256])
@pytest.mark.parametrize("mode", MODES)
def test_chunks_are_found_at_any_position(windows: tuple[int | None, ...], mode: str, step_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, windows, step_tokens=step_tokens)
    for number, order in enumerate([(0, 1, 2), (2, 0), (1, 2, 0), (2, 3, 1), (0, 1, 2)]):
        tokens, params = with_chunks(order, mode)
        engine.ask(f"{number}", tokens, count=12, **params)
        engine.run(300)
        got, said = engine.answers[f"{number}"]
        assert got == ROOMIES[windows].answer(tokens, 12, context(0, None, {}), params), f"{order}"
        # Only the first request and the fourth one lack a chunk.
        assert (said["chunk_tokens_computed"] > 0) == (number in (0, 3)) and "chunk_error" not in said
    engine.ask("plain", tokens, count=12)
    engine.run(300)
    answered(engine, "plain", tokens)
    nothing_held(engine)


@windows_of
@pytest.mark.parametrize("mode", MODES)
def test_keys_of_chunks_are_rotated_by_each_layers_own_embedding(windows: tuple[int | None, ...], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, windows)
    for name, order in (("first", (0, 1, 2)), ("turned", (2, 1, 0))):
        tokens, params = with_chunks(order, mode)
        engine.ask(name, tokens, count=12, **params)
        while name not in (request.request_id for request in engine.running):
            engine.step()
        tables, where = engine.kv_cache_manager.tables[name], context(0, None, {})
        rows = {position: (*where, *seen(tokens, position, params)) for position in range(sum(params["chunk_lengths"]))}
        assert engine.model.fault(tables, rows) is None, name
        engine.run(300)
        assert engine.answers[name][0] == ROOMIES[windows].answer(tokens, 12, where, params)


@windows_of
@pytest.mark.parametrize("recompute", ["link:4", "question:0.5"])
def test_nothing_is_recomputed_behind_a_window(windows: tuple[int | None, ...], recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(monkeypatch, windows)
    tokens, params = with_chunks((0, 1), "alone", chunk_recompute=recompute)
    engine.ask("one", tokens, **params)
    engine.run(50)
    answered(engine, "one", tokens)
    assert engine.answers["one"][1] == {
        "chunk_error": "layers with a sliding window have freed blocks that recomputed tokens would see; use chunk_recompute none"
    }


def described(windows: tuple[int | None, ...], *changes: dict[str, object]) -> tuple[object, object]:
    """Returns the configurations of a model with these windows, with changes to the descriptions of its groups."""
    model, groups = model_of(windows)
    specs = [spec_of(window) for window in windows]
    for spec, change in zip(specs, changes):
        spec.update(change)
    told = [{"layers": layers, "spec": spec} for layers, spec in zip(groups, specs)]
    return configs({"model": model, "max_model_len": 512, "extra_config": {}, "groups": told, "num_blocks": 64}, 1)


def test_keys_depend_on_the_kinds_of_layers_and_their_windows() -> None:
    """The same model with other windows, with other groups, and with one table for all layers has other keys."""
    plain, roots = SimpleNamespace(lora_request=None, cache_salt=None), set()
    changes: list[tuple[dict[str, object], ...]] = [(), ({}, {"sliding_window": 24}), ({"sliding_window": 64},), ({}, {"kind": "FullAttentionSpec"})]
    for change in changes:
        config, caches = described((None, 20), *change)
        roots.add(Roots(config, geometry(config, caches, Settings())).of(plain))
    config, caches = described((None, 20))
    first, second = caches.kv_cache_groups
    first.layer_names, second.layer_names = second.layer_names[:1], [*first.layer_names]
    roots.add(Roots(config, geometry(config, caches, Settings())).of(plain))
    assert len(roots) == len(changes) + 1


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("MambaSpec", "use a model with ordinary attention"),
        ("MLAAttentionSpec", "use a model with ordinary attention"),
        ("UniformTypeKVCacheSpecs", "use a model with ordinary attention"),
        ("ChunkedLocalAttentionSpec", "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_layers_of_unknown_kinds_are_refused_by_name(kind: str, advice: str) -> None:
    for changes in (({"kind": kind},), ({}, {"kind": kind})):
        config, caches = described((None, 20), *changes)
        with pytest.raises(UnsupportedHostError, match=rf"layers of the kind {kind} \(layer.\d\) are not supported; .*{advice}"):
            geometry(config, caches, Settings())


def test_a_tier_needs_no_rotary_embeddings() -> None:
    """Their numbers are part of the keys all the same. ``golden/vllm/two_tables.json`` has such a model."""
    plain, roots = SimpleNamespace(lora_request=None, cache_salt=None), set()
    for theta in (1e4, 1e6):
        for windows in ((None, 20), (None,)):
            config, caches = described(windows)
            own = {**config.model_config.hf_text_config.to_dict(), "model_type": "unheard-of", "rope_theta": theta}
            config.model_config.hf_text_config = SimpleNamespace(to_json_string=lambda own=own: json.dumps(own), to_dict=lambda own=own: own)
            with pytest.raises(UnsupportedHostError, match='model_type "unheard-of" is not supported'):
                geometry(config, caches, Settings())
            shape = geometry(config, caches, Settings(prefix_memory=1 << 20))
            assert "unheard-of" in shape.no_chunks and ropes_for(config, shape).num_layers == own["num_hidden_layers"]
            roots.add(Roots(config, shape).of(plain))
    assert len(roots) == 4


def test_a_model_without_keys_and_values_is_refused() -> None:
    config, caches = described((None, 20))
    caches.kv_cache_groups.clear()
    with pytest.raises(UnsupportedHostError, match="no layers with keys and values"):
        geometry(config, caches, Settings())


@pytest.mark.parametrize("change", [{"head_size": 64}, {"num_kv_heads": 2}, {"block_size": 16}, {"dtype": "torch.bfloat16"}])
def test_groups_with_blocks_of_different_shapes_are_refused(change: dict[str, object]) -> None:
    config, caches = described((None, 20), {}, change)
    with pytest.raises(UnsupportedHostError, match=r"different shapes .* use a model whose layers all have the same heads"):
        geometry(config, caches, Settings())


def test_a_block_in_the_tier_has_the_rows_of_all_groups() -> None:
    config, caches = described((None, 20))
    row = 3 * ROW
    shape = geometry(config, caches, Settings(prefix_memory=10 * SIZE * row, host_memory=20 * 32 * row))
    assert (shape.prefix_blocks, shape.num_blocks) == (10, 20)
    with pytest.raises(ValueError, match=f"less than one block, which takes {SIZE * row} bytes"):
        geometry(config, caches, Settings(prefix_memory=SIZE * row - 1))


def test_ropes_of_some_layers_are_those_of_the_model() -> None:
    model, _ = model_of((None, 20))
    text = json.dumps(model)
    every, some = Ropes(text, 512), Ropes(text, 512, [2, 1])
    assert some.num_layers == 2 and every.at(0, 5) == every.at(2, 5) != every.at(1, 5)
    assert some.at(0, 5) == every.at(2, 5) and some.at(1, 5) == every.at(1, 5)
    with pytest.raises(KvCacheError, match="layer"):
        Ropes(text, 512, [3])
