"""Random requests under random limits: with and without chunks, aborts, preemption, resets, failing copies, salts
and adapters. Every request is answered as in an engine with room for everything, nothing stays held, and every
counter is the one that follows from what was asked, what ran, and what was saved.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from fake_engine import ROW, SIZE, Engine, context
from ledger import Ledger
from roomy import Roomy
from test_pressure import nothing_held
from traffic import finish

from kvcache.vllm.chunks import LOSSES
from kvcache.vllm.stats import COUNTERS

REQUESTS = 260
SEEDS = 8
LARGE = (16, 17)
"""The seeds of hosts that have room for everything, so that nothing is computed twice."""
DISKS = (8, 9, 12, 13)
"""The seeds of hosts with a disk, whose copies do not fail: when a disk answers is not drawn."""
ROOMY = Roomy()
REASONS = {"new", "evicted", "other_context"}
OF_ROOM = {"chunk_evictions", "prefix_blocks_evicted"}
"""Counters that the ledger knows only if no memory was filled from a disk."""
HAPPENED: Counter[str] = Counter()
"""How often each thing happened, over all seeds."""
RAN: set[int] = set()
"""The seeds that have run."""
SALTS = [None, None, None, "alice", "bob", "kvcache:", "kvcache:" + "0" * 64]


class Traffic:
    """Requests and everything that happens to them."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.draw = draw = random.Random(seed)
        self.with_adapters, self.has_failures = seed % 2 == 1, seed % 4 >= 2
        self.folder, self.has_disk = folder, seed in DISKS
        disk = {"disk_path": str(folder / "disk"), "disk_limit": ["1200KiB", "8MiB"][seed % 2], "disk_loads": "always"}
        max_chunks, pieces = draw.choice([1, 4, 100]), draw.choice([SIZE, 24, 4096])
        has_room = seed in LARGE
        if has_room:
            max_chunks = 10_000
        self.engine = Engine(
            monkeypatch,
            blocks=draw.choice([34, 40, 64]),
            step_tokens=draw.choice([16, 40, 128]),
            max_running=draw.choice([3, 8]),
            delay=lambda: draw.choice([0, 0, 1, 4]),
            lora=object() if self.with_adapters else None,
            host_memory=draw.choice([2_000] if has_room else [9, 20, 28, 60]) * SIZE * ROW,
            max_chunks=max_chunks,
            max_chunk_tokens=pieces,
            cache_policy=draw.choice(["lru", "tiny-lfu", "s3-fifo", "priority"]),
            prefix_memory=draw.choice([2_000] if has_room else [0, 20, 60, 60]) * SIZE * ROW,
            **(disk if self.has_disk else {}),
        )
        if self.with_adapters:
            for name in ("a", "b"):
                (folder / name).mkdir()
            self.engine.adapters = {"a": 0, "b": 0}
        if self.has_failures:
            self.engine.failing = lambda: draw.random() < 0.1
        self.ledger = Ledger(self.engine, monkeypatch, min(max_chunks, self.engine.side.chunks.shape.num_blocks), pieces)
        self.asked: dict[str, tuple[list[int], dict | None, str | None]] = {}
        self.turns: dict[str, list[tuple[int, tuple[int, ...], int | None]]] = {}
        """The number of answer tokens of each request when something changed, and what holds from then on: the weights and
        the adapter, and how many tokens are as the request asks, if not all are."""
        self.sums: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.happened: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        """The number of encodes of each request's parts that were aborted before it ran."""
        self.hot: list[list[list[int]]] = []
        """Prompts that are asked again and again."""
        self.documents = [[draw.randrange(10, 500) for _ in range(draw.choice([3, 8, 13, 24, 40]))] for _ in range(7)]

    def parts(self) -> list[list[int]]:
        if len(self.hot) < 4:
            self.hot.append([self.draw.choice(self.documents) for _ in range(self.draw.randrange(2, 5))])
        elif self.draw.random() < 0.5:
            return self.draw.choice(self.hot)
        return [self.draw.choice(self.documents) for _ in range(self.draw.randrange(2, 5))]

    def params(self, parts: list[list[int]]) -> dict | None:
        draw = self.draw
        if draw.random() < 0.4:
            return None
        params = {"chunk_lengths": [len(part) for part in parts], "chunk_mode": draw.choice(["alone", "alone", "with-system", "sink:2"])}
        params["chunk_recompute"] = draw.choice(["none"] * 3 + ["link:3", "question:0.3"] * (1 if self.with_adapters else 2))
        if draw.random() < 0.05:
            params["chunk_lengths"] = [1, 900]
        return params

    def ask(self) -> None:
        draw, name, parts = self.draw, f"{len(self.asked)}", self.parts()
        tokens = [token for part in parts for token in part] + [draw.randrange(10, 500) for _ in range(draw.choice([1, 5, 20]))]
        params, adapter = self.params(parts), draw.choice(["a", "b", None]) if self.with_adapters else None
        self.asked[name] = (tokens, params, adapter)
        lora = SimpleNamespace(lora_name=adapter, lora_path=str(self.folder / adapter), lora_int_id=1) if adapter else None
        self.engine.ask(name, tokens, count=draw.choice([1, 3, 12, 30]), salt=draw.choice(SALTS), adapter=lora, **(params or {}))
        self.turn(name)

    def turn(self, name: str) -> None:
        """Notes what holds for a request from now on."""
        request, (_, params, adapter) = self.engine.requests[name], self.asked[name]
        refused = self.engine.side.requests[name].refused is not None
        where = context(self.engine.weights, adapter, self.engine.adapters, self.engine.salt_of(name))
        until = 0 if params is None else self.engine.broken.get(name, 0) if refused else None
        turns, now = self.turns.setdefault(name, []), (where, until)
        if not turns or turns[-1][1:] != now:
            turns.append((len(request.output_token_ids), *now))

    def turns_of_all(self) -> None:
        for name in self.engine.requests:
            if name in self.asked and name not in self.engine.aborted:
                self.turn(name)

    def step(self) -> None:
        self.engine.step()
        self.turns_of_all()
        report = self.engine.side.stats()
        if report is not None:
            self.sums.update({name: value for name, value in report.data.items() if name in COUNTERS})
            self.gauges.update({name: value for name, value in report.data.items() if name not in COUNTERS})

    def reset(self) -> None:
        """Resets the caches, with new weights if no request goes on over old blocks."""
        engine, running = self.engine, self.draw.random() < 0.5
        kept = engine.side.chunks.cache.get_metrics().cached_chunks
        try:
            engine.reset(running=running, new_weights=running or not engine.running)
        except RuntimeError:
            # Rows are being copied in, or were, for a request that does not run yet. vLLM has preempted what ran.
            assert running and engine.kv_cache_manager.tables
            self.happened["refused resets"] += 1
        else:
            self.ledger.reset(kept)
            self.happened["resets with preemption" if running else "resets beside running requests"] += 1
        self.turns_of_all()

    def abort(self, name: str) -> None:
        engine, request = self.engine, self.engine.requests[name]
        waits = "copies" if name in engine.receiving else "running" if request in engine.running else "waiting"
        state = waits if name in self.asked else "encodes"
        self.happened[f"aborts of {state}"] += 1
        if name not in self.asked:
            for other in engine.requests:
                if other not in engine.ran and other in self.asked and self.has_part(other, request.prompt_token_ids):
                    self.losses[other] += 1
        engine.abort(name)

    def has_part(self, name: str, computed: list[int]) -> bool:
        """Returns whether a request has a part that these tokens compute, perhaps after others that it sees."""
        tokens, params, _ = self.asked[name]
        ends = list(itertools.accumulate(params["chunk_lengths"])) if params else []
        return any(tokens[end - length : end] == computed[-length:] for end, length in zip(ends, params["chunk_lengths"])) if params else False

    def is_refused(self, name: str) -> bool:
        """Returns whether a request must be answered without chunks, whatever happens meanwhile."""
        tokens, params, _ = self.asked[name]
        if sum(params["chunk_lengths"]) >= len(tokens):
            self.happened["wrong parts"] += 1
            return True
        if self.with_adapters and params["chunk_recompute"] != "none":
            self.happened["recomputation beside adapters"] += 1
            return True
        # What vLLM has in its own blocks takes no room in host memory.
        memory, total = self.engine.side.chunks.shape.num_blocks, sum(params["chunk_lengths"])
        least = min((self.ledger.needed(tokens, params, total - loaded) for loaded in self.ledger.loaded.get(name, ())), default=None)
        assert least is None or least <= memory, "chunks were copied that have no room together"
        if self.ledger.needed(tokens, params, 0) > memory and least is None:
            self.happened["chunks without room"] += 1
            return True
        return False

    def run(self) -> None:
        draw, engine = self.draw, self.engine
        while len(self.asked) < REQUESTS:
            for _ in range(draw.choice([1, 1, 2, 4])):
                self.ask()
            for _ in range(draw.randrange(12)):
                self.step()
            running = [name for name in engine.requests if name not in engine.aborted]
            if running and draw.random() < 0.15:
                # Also an encode of the connector, now and then.
                receiving = sorted(engine.receiving - engine.aborted)
                self.abort(draw.choice(receiving if receiving and draw.random() < 0.5 else running))
                self.turns_of_all()
            if draw.random() < 0.03:
                self.reset()
        finish(engine, self.step)

    def expected(self, name: str, count: int) -> list[int]:
        tokens, params, _ = self.asked[name]
        answer: list[int] = []
        turns = [*self.turns[name], (count, (), None)]
        for (_, where, until), (end, *_) in zip(turns, turns[1:]):
            if end > len(answer):
                served = params if until is None else {**params, "until": until} if until > 0 else None
                answer += ROOMY.answer(tokens, end - len(answer), where, served, answer)
        return answer


@pytest.mark.parametrize("seed", [*range(SEEDS), *DISKS, *LARGE])
def test_random_requests_are_answered_as_if_there_were_room(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert REQUESTS * SEEDS >= 2_000
    traffic = Traffic(seed, monkeypatch, tmp_path)
    traffic.run()
    engine, ledger, expected = traffic.engine, traffic.ledger, Counter()
    for name, (tokens, params, _) in traffic.asked.items():
        got, said = engine.answers[name]
        # Of an aborted request, what has been answered.
        assert got == traffic.expected(name, len(got)), f"{name}: {json.dumps(params)}, {traffic.turns[name]}, {said}"
        if name in engine.aborted:
            traffic.happened["aborts of answers that have begun"] += len(got) > 0
            continue
        assert (said is None) == (params is None), f"{name}: {said}"
        if params is None:
            continue
        # Whether a request waited for the encodes that were aborted depends on the step, so it may be refused.
        must, lost = traffic.is_refused(name), traffic.losses[name] >= LOSSES
        assert ("chunk_error" in said) == must or name in engine.broken or lost, f"{name}: {json.dumps(params)}, {said}"
        if must or name in engine.broken or (lost and "chunk_error" in said):
            assert set(said) == {"chunk_error"}
            expected["chunk_requests_refused"] += 1
            continue
        computed = ledger.computed_for(name)
        counts = {"chunk_tokens_reused": sum(params["chunk_lengths"]) - computed, "chunk_tokens_computed": computed}
        missed = said.pop("chunk_missed", {})
        assert bool(missed) == (computed > 0) and set(missed.values()) <= REASONS, f"{name}: {missed}"
        assert said == counts, f"{name}: {json.dumps(params)}"
        expected.update(counts)
    assert len(engine.answers) - engine.encodes == len(traffic.asked)
    expected["prefix_tokens_found"] = engine.arrived
    expected["prefix_blocks_saved"] = ledger.saved_blocks
    expected["prefix_blocks_evicted"] = ledger.overwritten_blocks
    lost = ledger.lost_pieces(engine.side.chunks.cache.get_metrics().cached_chunks)
    expected["chunk_evictions"] = lost
    known = [name for name in COUNTERS if not name.startswith("tier_") and not (traffic.has_disk and name in OF_ROOM)]
    assert {name: traffic.sums[name] for name in known} == {name: expected[name] for name in known}
    if not traffic.has_disk:
        ledger.check_gauges(traffic.gauges)
    nothing_held(engine)
    if traffic.has_disk:
        # How much it finds depends on when it is asked.
        assert engine.disk.usage()["misses"] > 0 and engine.disk.usage()["records"] > 0
        assert not engine.side.asks.under_way and not engine.disk.reads.fetches
        engine.close()
    HAPPENED.update(traffic.happened)
    if not traffic.has_disk:
        HAPPENED.update(ledger.happened())
    RAN.add(seed)


def test_everything_has_happened() -> None:
    """The requests above have met each of these, some of them often."""
    if RAN != {*range(SEEDS), *DISKS, *LARGE}:
        pytest.skip("only some of the seeds have run")
    often = {"preemptions", "evictions of pieces", "evictions of blocks", "pieces used and not kept", "resets with preemption", "wrong parts"}
    often |= {"resets beside running requests", "aborts of waiting", "aborts of running", "failed copies", "recomputation beside adapters"}
    often |= {"aborts of answers that have begun", "pieces saved while nothing has left"}
    seldom = {"refused resets", "aborts of encodes", "aborts of copies", "failed copies after own blocks", "chunks without room"}
    assert not {name for name in often if HAPPENED[name] < 10} | {name for name in seldom if HAPPENED[name] < 1}, HAPPENED
