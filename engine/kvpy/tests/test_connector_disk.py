"""The connector's disk: chunks and ordinary prompts are found after a restart, and nothing wrong is ever served."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from fake_engine import ROW, SIZE, Engine, Roomy, context
from fake_offloading import model_in
from test_pressure import nothing_held, prompt

from kvcache import KvCacheError
from kvcache._native import Slab
from kvcache.vllm.disk.asks import Asks
from kvcache.vllm.orders import Record

ROOMY = Roomy()
LENGTHS = [20, 30, 40]
FILE = "records.kvslab"
MIB = 1 << 20


class Disk:
    """A folder, and vLLM with a connector over it, which can be restarted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.monkeypatch, self.folder, self.model = monkeypatch, folder / "disk", model_in(folder / "model")
        self.open: list[Engine] = []
        self.asked = 0

    def start(self, **settings: Any) -> Engine:
        given = {
            "disk_path": str(self.folder),
            "disk_limit": "8MiB",
            "disk_loads": "always",
            "prefix_memory": 64 * SIZE * ROW,
            "path": str(self.model),
            **settings,
        }
        engine = Engine(self.monkeypatch, **given)
        self.open.append(engine)
        return engine

    def stop(self) -> None:
        for engine in self.open:
            engine.close()
        self.open.clear()

    def restart(self, **settings: Any) -> Engine:
        self.stop()
        return self.start(**settings)

    def ask(self, engine: Engine, tokens: list[int], *, salt: str | None = None, count: int = 2, **params: Any) -> dict[str, Any] | None:
        """Asks a prompt. The answer must be right. Returns what the connector says about it."""
        name = f"ask-{self.asked}"
        self.asked += 1
        engine.ask(name, tokens, salt=salt, count=count, **params)
        engine.run()
        got, said = engine.answers[name]
        assert got == ROOMY.answer(tokens, count, context(engine.weights, None, {}), params or None), f"{params}, {said}"
        return said

    @property
    def file(self) -> Path:
        return self.folder / FILE


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(monkeypatch, tmp_path)
    yield disk
    disk.stop()


def reused(said: dict[str, Any] | None) -> int:
    assert said is not None
    return said["chunk_tokens_reused"]


def missed(said: dict[str, Any] | None) -> dict[str, str]:
    assert said is not None
    return said.get("chunk_missed", {})


def settle(engine: Engine) -> None:
    """Waits until everything is on the disk."""
    until = time.monotonic() + 20
    while engine.disk.is_busy():
        assert time.monotonic() < until, "the disk never gets everything"
        time.sleep(0.005)
    assert engine.disk.slab.flush(deadline=20)


def usage(engine: Engine, *names: str) -> tuple[int, ...]:
    counts = engine.disk.usage()
    return tuple(counts[name] for name in names)


PARAMS: list[dict[str, Any]] = [
    {},
    {"chunk_mode": "with-system"},
    {"chunk_mode": "sink:3"},
    {"chunk_recompute": "link:4"},
    {"chunk_recompute": "question:0.5"},
]


@pytest.mark.parametrize("settings", [{}, {"max_chunk_tokens": 16}, {"host_memory": 14 * SIZE * ROW}])
@pytest.mark.parametrize("params", PARAMS)
def test_chunks_are_found_after_a_restart_in_any_order(disk: Disk, params: dict[str, Any], settings: dict[str, Any]) -> None:
    one, two, system = list(range(100, 130)), list(range(200, 240)), list(range(10, 30))
    engine = disk.start(**settings)
    first = disk.ask(engine, [*system, *one, *two, 3, 4], chunk_lengths=LENGTHS, **params)
    assert reused(first) == 0 and missed(first) == {"0": "new", "1": "new", "2": "new"}
    nothing_held_but_the_disk(engine)
    for _ in range(2):
        engine = disk.restart(**settings)
        said = disk.ask(engine, [*system, *two, *one, 3, 4], chunk_lengths=[20, 40, 30], **params)
        assert (reused(said), missed(said), engine.encodes) == (90, {}, 0)
        hits, misses = usage(engine, "hits", "misses")
        assert hits == usage(engine, "records")[0] > 0 and misses == 0
        nothing_held_but_the_disk(engine)


def nothing_held_but_the_disk(engine: Engine) -> None:
    """As ``nothing_held``, without a reset, which would forget the disk, too."""
    for _ in range(3):
        engine.step()
    side = engine.side
    assert not side.requests and not side.saving and not side.loads, "something is kept of requests that have ended"
    assert not side.asks.under_way and not side.asks.sums and not side.asks.orders, "an answer is waited for"
    assert len(engine.kv_cache_manager.unused) == len(engine.kv_cache_manager.holders) - 1, "blocks of the engine are held"
    side.chunks.cache.check_invariants()
    assert not side.chunks.pieces.under_way and not side.chunks.pieces.states and not side.chunks.pieces.queue
    counts = side.prefixes.counts() and side.prefixes.pool.counts()
    assert not counts or (counts["mutable"], counts["shared"]) == (0, 0), f"blocks of prefixes are held: {counts}"
    settle(engine)
    assert not engine.disk.fetches and not engine.disk.copying and not engine.disk.stores


def test_the_bytes_in_host_memory_are_those_that_were_computed(disk: Disk) -> None:
    seen = []
    for _ in range(2):
        engine = disk.restart()
        disk.ask(engine, [*range(10, 30), *range(100, 130), 3], chunk_lengths=[20, 30])
        side, rows = engine.side.chunks, [np.zeros((30, 1, 32), np.float32) for _ in range(2)]
        root = side.roots.of(SimpleNamespace(lora_request=None, cache_salt=None))
        (hold,) = side.cache.acquire(root, "alone", [], list(range(100, 130)), 0)
        engine.worker._worker.arena.own.gather(0, hold.slots, *rows)
        hold.release()
        seen.append(rows)
    assert engine.encodes == 0
    for computed, found in zip(*seen):
        assert computed.any() and computed.tobytes() == found.tobytes()


def test_ordinary_prompts_are_found_after_a_restart(disk: Disk) -> None:
    prompts = [list(range(10, 10 + 60)), [*range(10, 10 + 40), *range(300, 350)], list(range(400, 433))]
    engine = disk.start()
    for tokens in prompts:
        disk.ask(engine, tokens)
    nothing_held_but_the_disk(engine)
    for _ in range(2):
        engine = disk.restart()
        for number, tokens in enumerate(prompts):
            before = engine.side.prefixes.tokens_found
            disk.ask(engine, tokens)
            # The engine has the beginning of the second prompt itself, from the first one.
            own = 40 if number == 1 else 0
            assert engine.side.prefixes.tokens_found - before == (len(tokens) - 1) // SIZE * SIZE - own
        assert engine.side.prefixes.blocks_saved <= 1, "only the blocks of answers are new"
        nothing_held_but_the_disk(engine)


def test_answers_of_ordinary_prompts_go_on_after_a_restart(disk: Disk) -> None:
    tokens = list(range(10, 50))
    engine = disk.start()
    engine.ask("one", tokens, count=40)
    engine.run()
    going_on = [*tokens, *engine.answers["one"][0], 5]
    engine = disk.restart()
    disk.ask(engine, going_on)
    assert engine.side.prefixes.tokens_found >= 72


def test_a_prompt_that_is_larger_than_the_tier_is_found_as_far_as_there_is_room(disk: Disk) -> None:
    tokens = list(range(10, 10 + 25 * SIZE))
    disk.ask(disk.start(), tokens)
    engine = disk.restart(prefix_memory=6 * SIZE * ROW)
    disk.ask(engine, tokens)
    assert engine.side.prefixes.tokens_found == 6 * SIZE
    nothing_held_but_the_disk(engine)


def test_a_new_prompt_evicts_nothing_to_ask_the_disk(disk: Disk) -> None:
    engine = disk.start(prefix_memory=8 * SIZE * ROW)
    disk.ask(engine, list(range(10, 10 + 7 * SIZE)), count=1)
    # The engine itself is too small for blocks that are saved, so nothing makes room but the question.
    engine.kv_cache_manager.reset()
    engine.ask("new", list(range(300, 300 + 7 * SIZE)), count=1)
    engine.step()
    assert engine.side.prefixes.pool.counts()["evictions"] == 0
    engine.run()


def test_two_requests_for_the_same_prompt_read_the_disk_once(disk: Disk) -> None:
    tokens = list(range(10, 10 + 9 * SIZE))
    disk.ask(disk.start(), [*tokens, 3])
    engine = disk.restart()
    for name in ("one", "two", "three"):
        engine.ask(name, [*tokens, 3])
    engine.run()
    for name in ("one", "two", "three"):
        assert engine.answers[name][0] == ROOMY.answer([*tokens, 3], 2, context(0, None, {}), None)
    assert usage(engine, "hits") == (9,)
    nothing_held_but_the_disk(engine)


def test_tenants_find_only_their_own(disk: Disk) -> None:
    engine = disk.start()
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    for salt in ("alice", None):
        disk.ask(engine, tokens, salt=salt, chunk_lengths=LENGTHS)
        disk.ask(engine, plain, salt=salt)
    engine = disk.restart()
    said = disk.ask(engine, tokens, salt="bob", chunk_lengths=LENGTHS)
    assert reused(said) == 0 and missed(said) == {"0": "new", "1": "new", "2": "new"}, "bob learns nothing"
    disk.ask(engine, plain, salt="bob")
    assert engine.side.prefixes.tokens_found == 0
    for salt in ("alice", None):
        assert reused(disk.ask(engine, tokens, salt=salt, chunk_lengths=LENGTHS)) == 90
        disk.ask(engine, plain, salt=salt)
    assert engine.side.prefixes.tokens_found == 2 * 56


CHANGES: dict[str, Callable[[Disk], dict[str, Any]]] = {
    "other weights": lambda disk: {"path": str(model_in(disk.folder.parent / "other"))},
    "another version": lambda _: {"disk_version": "after the update"},
    "another block size": lambda _: {"block_size": 2 * SIZE},
    "another length": lambda _: {"positions": 256},
    "a model on the hub": lambda _: {"path": "org/model"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_may_differ_is_not_found_and_says_why(disk: Disk, change: str) -> None:
    tokens, plain = prompt(LENGTHS), list(range(300, 350))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    changed = CHANGES[change](disk)
    engine = disk.restart(**changed)
    said = disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    assert (reused(said), missed(said)) == (0, {"0": "other_model", "1": "other_model", "2": "other_model"})
    disk.ask(engine, plain)
    assert engine.side.prefixes.tokens_found == 0 and usage(engine, "hits") == (0,)
    # The other configuration's records do not get in the way of these, nor these in the way of those.
    for settings in (changed, {}):
        engine = disk.restart(**settings)
        assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90 and engine.encodes == 0


def test_replaced_weights_and_another_vllm_find_nothing(disk: Disk) -> None:
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    with disk.monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.33.0")
        assert reused(disk.ask(disk.restart(), prompt(LENGTHS), chunk_lengths=LENGTHS)) == 0
    (disk.model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert reused(disk.ask(disk.restart(), prompt(LENGTHS), chunk_lengths=LENGTHS)) == 0


def test_each_part_that_is_computed_has_a_reason(disk: Disk) -> None:
    system, one, two = list(range(10, 30)), list(range(100, 130)), list(range(200, 240))
    tokens = [*system, *one, *two, 3, 4]
    engine = disk.start()
    disk.ask(engine, [*system, *one, 3], chunk_lengths=[20, 30])
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == {"2": "new"}
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS, chunk_mode="with-system")) == {"1": "other_context", "2": "other_context"}
    engine = disk.restart()
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == {}
    other = [*range(50, 70), *one, *two, 3]
    said = missed(disk.ask(engine, other, chunk_lengths=LENGTHS, chunk_mode="with-system"))
    assert said == {"0": "new", "1": "other_context", "2": "other_context"}
    # Too little room on the disk and in memory: the oldest leave, and are known to have left.
    engine = disk.restart(disk_limit="1200KiB", host_memory=14 * SIZE * ROW)
    for number in range(80):
        disk.ask(engine, prompt(LENGTHS, first=20 + 10 * number), chunk_lengths=LENGTHS)
        # Host memory is small, so what is not copied in time is not stored.
        settle(engine)
    assert usage(engine, "evicted")[0] > 0
    assert set(missed(disk.ask(engine, prompt(LENGTHS, first=20), chunk_lengths=LENGTHS)).values()) == {"evicted"}


def test_reasons_without_a_disk(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    engine = Engine(monkeypatch, host_memory=14 * SIZE * ROW)
    tokens = prompt(LENGTHS)
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == {"0": "new", "1": "new", "2": "new"}
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == {}
    said = missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS, chunk_mode="with-system"))
    assert said == {"1": "other_context", "2": "other_context"}
    assert missed(disk.ask(engine, tokens, salt="bob", chunk_lengths=LENGTHS))["1"] == "new", "bob learns nothing"
    assert set(missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)).values()) == {"evicted"}
    engine.reset()
    engine.run()
    assert missed(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == {"0": "new", "1": "new", "2": "new"}
    nothing_held(engine)


def test_damaged_records_are_computed_again_and_counted(disk: Disk) -> None:
    engine = disk.start()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    disk.ask(engine, list(range(300, 360)))
    disk.stop()
    whole, page = bytearray(disk.file.read_bytes()), 4096
    headers = [at for at in range(0, len(whole), page) if whole.startswith(b"KVRECORD", at)]
    assert len(headers) >= 10
    for at in headers:
        whole[at + page + 900] ^= 8
    disk.file.write_bytes(whole)
    engine = disk.start()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert missed(said) == {"0": "damaged", "1": "damaged", "2": "damaged"} and reused(said) == 0
    disk.ask(engine, list(range(300, 360)))
    assert engine.side.prefixes.tokens_found == 0
    damaged, misses, hits = usage(engine, "damaged", "misses", "hits")
    assert damaged == misses == 3 + 7 and hits == 0
    nothing_held_but_the_disk(engine)
    # They were stored again.
    engine = disk.restart()
    assert reused(disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)) == 90


def test_a_changed_byte_is_a_miss_or_changes_nothing(disk: Disk) -> None:
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    disk.stop()
    whole, draw, found = disk.file.read_bytes(), random.Random(5), 0
    places = [at for at in range(0, len(whole), 61) if whole[at]]
    for _ in range(15):
        changed = bytearray(whole)
        for place in draw.sample(places, 4):
            changed[place] ^= 1 << draw.randrange(8)
        disk.file.write_bytes(changed)
        engine = disk.start()
        found += reused(disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS))
        nothing_held_but_the_disk(engine)
        disk.stop()
    assert 0 < found < 15 * 90


@pytest.mark.parametrize("left", [0, 4096, MIB])
def test_a_truncated_file_is_created_anew(disk: Disk, left: int) -> None:
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    disk.stop()
    os.truncate(disk.file, left)
    assert reused(disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)) == 0
    assert reused(disk.ask(disk.restart(), prompt(LENGTHS), chunk_lengths=LENGTHS)) == 90


def test_a_reset_forgets_what_was_on_the_disk_for_good(disk: Disk) -> None:
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    other = str(model_in(disk.folder.parent / "other"))
    for path in (other, str(disk.model)):
        engine = disk.restart(path=path)
        disk.ask(engine, tokens, chunk_lengths=LENGTHS)
        disk.ask(engine, plain)
    settle(engine)
    assert engine.reset(new_weights=True)
    said = disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    assert (reused(said), missed(said)) == (0, {"0": "new", "1": "new", "2": "new"})
    disk.ask(engine, plain)
    assert engine.side.prefixes.tokens_found == 0
    # What the new weights computed is found by them, and not by the next process, which loads the old ones.
    settle(engine)
    engine.side.chunks.cache.clear_cache()
    engine.kv_cache_manager.reset()
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90
    engine = disk.restart()
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 0
    disk.ask(engine, plain)
    assert engine.side.prefixes.tokens_found == 0
    assert reused(disk.ask(disk.restart(), tokens, chunk_lengths=LENGTHS)) == 90, "the next process stores as ever"
    assert reused(disk.ask(disk.restart(path=other), tokens, chunk_lengths=LENGTHS)) == 90, "another model was not reset"


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("running", [True, False])
def test_nothing_from_before_a_reset_is_used_while_records_are_fetched(disk: Disk, steps: int, running: bool) -> None:
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    engine = disk.restart(delay=lambda: 1)
    engine.ask("chunks", tokens, chunk_lengths=LENGTHS)
    engine.ask("plain", plain)
    for _ in range(steps):
        engine.step()
    answered = dict(engine.answers)
    for _ in range(50):
        try:
            engine.reset(running=running, new_weights=running or not engine.running)
            break
        except RuntimeError:
            engine.step()
            answered = dict(engine.answers)
    engine.run()
    if running or engine.weights:
        for name, (asked, params) in {"chunks": (tokens, {"chunk_lengths": LENGTHS}), "plain": (plain, None)}.items():
            if name not in answered:
                got = engine.answers[name][0]
                old = [ROOMY.answer(asked, 2, context(0, None, {}), params)[:1], []]
                right = [[*told, *ROOMY.answer(asked, 2 - len(told), context(1, None, {}), params, told)] for told in old]
                assert got in right, f"{name} uses what was stored before the reset"
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    nothing_held_but_the_disk(engine)


def test_a_reset_that_cannot_be_written_says_so_and_is_kept_in_the_process(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    engine = disk.start()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    disk.monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("read-only file system")))
    engine.reset(new_weights=True)
    with caplog.at_level("ERROR"):
        said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert reused(said) == 0 and "read-only file system): remove the folder of the disk before the next start" in caplog.text
    disk.monkeypatch.undo()


class Hanging:
    """Native records whose disk has stopped to answer."""

    def __init__(self, own: Any) -> None:
        self.own, self.begun, self.given_up = own, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def begin_load(self, *_: Any) -> Any:
        self.begun += 1
        return self

    is_over = False

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def give_up(self) -> None:
        self.given_up += 1


def test_a_disk_that_hangs_delays_requests_by_its_deadline_and_no_step(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.vllm.disk.jobs.REST", 0.5)
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    engine = disk.restart(disk_deadline=0.3)
    own = dict(engine.disk.blocks)
    engine.disk.blocks.update({of_prefix: Hanging(blocks) for of_prefix, blocks in own.items()})
    engine.ask("busy", [3, 4, 5, 6], count=400)
    engine.ask("chunks", tokens, chunk_lengths=LENGTHS)
    engine.ask("plain", plain)
    began, longest = time.monotonic(), 0.0
    while {"chunks", "plain"} & set(engine.requests):
        before = time.monotonic()
        engine.step()
        longest = max(longest, time.monotonic() - before)
        assert time.monotonic() - began < 5, "requests wait for a disk that hangs"
    assert longest < 0.2, f"a step waited for the disk for {longest:.2f} s"
    engine.run()
    said = engine.answers["chunks"][1]
    assert missed(said) == {"0": "deadline", "1": "deadline", "2": "deadline"} and reused(said) == 0
    for name, (asked, params) in {"chunks": (tokens, {"chunk_lengths": LENGTHS}), "plain": (plain, None)}.items():
        assert engine.answers[name][0] == ROOMY.answer(asked, 2, context(0, None, {}), params)
    begun = [engine.disk.blocks[of_prefix].begun for of_prefix in (False, True)]
    assert begun[0] == 3 and engine.disk.blocks[False].given_up == 3
    # The disk is left alone: nobody waits for it again.
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS, first=11), chunk_lengths=LENGTHS)
    assert set(missed(said).values()) == {"deadline"} and time.monotonic() - began < 0.25
    assert [engine.disk.blocks[of_prefix].begun for of_prefix in (False, True)] == begun
    engine.disk.blocks.update(own)
    nothing_held_but_the_disk(engine)
    engine = disk.restart()
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90, "the disk answers again"


def test_a_load_that_takes_longer_than_computing_is_skipped(disk: Disk) -> None:
    tokens = prompt(LENGTHS)
    disk.ask(disk.start(), tokens, chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster")
    # A step took a microsecond per token, and the disk needs a second for anything.
    engine.disk.measured(100, 1e-4)
    blocks = engine.disk.blocks[False]

    class Slow:
        expected = staticmethod(lambda size: 1.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(blocks, name)

    engine.disk.blocks[False] = Slow()
    said = disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    assert missed(said) == {"0": "slower", "1": "slower", "2": "slower"}
    assert usage(engine, "loads_skipped_slower", "hits") == (3, 0)
    # One of so many is tried all the same, because the disk may have become faster.
    engine.disk.measured(1, 1e3)
    skips = engine.disk.skips
    assert skips == 1
    engine = disk.restart(disk_loads="if-faster")
    engine.disk.measured(100, 1e4)
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90, "computing takes hours"


def test_a_request_stops_waiting_when_giving_up_costs_a_twentieth(disk: Disk) -> None:
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster", disk_deadline=60)
    engine.disk.blocks[False] = Hanging(engine.disk.blocks[False])
    # Ninety tokens take two seconds.
    engine.disk.measured(90, 2.0)
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert set(missed(said).values()) == {"deadline"} and 0.08 < time.monotonic() - began < 0.8


def test_a_disk_that_refuses_writes_costs_nothing_but_the_records(disk: Disk) -> None:
    engine = disk.start()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        disk.ask(engine, prompt(LENGTHS, first=200), chunk_lengths=LENGTHS)
        settle(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert usage(engine, "write_errors")[0] > 0
    nothing_held_but_the_disk(engine)
    engine = disk.restart()
    assert reused(disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)) == 90
    assert reused(disk.ask(engine, prompt(LENGTHS, first=200), chunk_lengths=LENGTHS)) == 0


def test_a_disk_that_loses_its_end_fails_the_records_there(disk: Disk) -> None:
    engine = disk.start()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart()
    os.truncate(disk.file, 8192)
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert reused(said) == 0 and set(missed(said).values()) <= {"failed", "damaged"}
    nothing_held_but_the_disk(engine)


def test_stores_that_do_not_fit_are_dropped_and_counted(disk: Disk) -> None:
    """The queue of the slab is full, so that nothing is written."""
    engine = disk.start()
    blocks = engine.disk.blocks[False]

    class Full:
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(blocks, name)

        def store(self, *args: Any, **rest: Any) -> str:
            Full.calls += 1
            raise MemoryError("no memory for a copy")

    engine.disk.blocks[False] = Full()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    assert usage(engine, "stores_dropped", "records") == (3, 0) and Full.calls == 3
    nothing_held_but_the_disk(engine)


def test_memory_is_not_overwritten_while_it_is_copied(disk: Disk) -> None:
    """Host memory has room for one prompt, and the copies for the disk are late."""
    engine = disk.start(host_memory=(24 + 32 + 40) * ROW)
    blocks = engine.disk.blocks[False]

    class Late:
        def __getattr__(self, name: str) -> Any:
            return getattr(blocks, name)

        def store(self, *args: Any, **rest: Any) -> str:
            time.sleep(0.1)
            return blocks.store(*args, **rest)

    engine.disk.blocks[False] = Late()
    lengths = [LENGTHS, LENGTHS[::-1]]
    for number in range(6):
        disk.ask(engine, prompt(lengths[number % 2], first=10 + 30 * number), chunk_lengths=lengths[number % 2])
    settle(engine)
    assert usage(engine, "stores_dropped")[0] > 0, "what was not copied in time is not stored"
    engine = disk.restart()
    for number in range(6):
        disk.ask(engine, prompt(lengths[number % 2], first=10 + 30 * number), chunk_lengths=lengths[number % 2])
    assert usage(engine, "hits")[0] > 0


def test_the_limit_is_kept(disk: Disk) -> None:
    engine = disk.start(disk_limit="1200KiB", host_memory=14 * SIZE * ROW)
    for number in range(60):
        disk.ask(engine, prompt(LENGTHS, first=10 + 7 * number), chunk_lengths=LENGTHS)
        disk.ask(engine, [*range(10 + number, 60 + number)])
        assert disk.file.stat().st_size <= 1200 << 10
        size, limit = usage(engine, "bytes", "limit_bytes")
        assert size <= limit <= 1200 << 10
    assert usage(engine, "evicted")[0] > 0
    nothing_held_but_the_disk(engine)


WRONG = [
    ({"disk_path": None}, r"disk_limit is set, but disk_path is not; set disk_path to the folder"),
    ({"disk_path": ""}, r"disk_path is '': it must be the folder for its records"),
    ({"disk_path": 7}, r"disk_path is 7: it must be the folder"),
    ({"disk_limit": "50 GB"}, r"disk_limit is '50 GB': it must be a number of bytes, or a number with KiB, MiB, GiB or TiB"),
    ({"disk_limit": 0}, r"disk_limit is 0: it must be a number of bytes above 0"),
    ({"disk_limit": True}, r"disk_limit is True"),
    ({"disk_limit": "1MiB"}, r"disk_limit is \d+, which is too small: a block takes 2048 bytes; use at least \d+"),
    ({"disk_deadline": 0}, r"disk_deadline is 0: it must be a number of seconds above 0"),
    ({"disk_deadline": "2"}, r"disk_deadline is '2'"),
    ({"disk_loads": "never"}, r'disk_loads is \'never\': it must be "if-faster" or "always"'),
    ({"disk_version": 3}, r"disk_version is 3: it must be a text"),
    ({"disk_limt": "1GiB"}, r"unknown settings \['disk_limt'\]"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_say_what_to_do(disk: Disk, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        disk.start(**settings)
    assert not disk.folder.exists(), "a refused connector leaves nothing"


def test_a_path_needs_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='disk_path needs the setting disk_limit: the size of the file in that folder, such as "50GiB"'):
        Engine(monkeypatch, disk_path=str(tmp_path))


def test_a_folder_that_cannot_be_used_is_named(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, message in ((tmp_path / "file", "is not a folder; name a folder"), (tmp_path / "file" / "below", "cannot create the folder")):
        with pytest.raises(KvCacheError, match=message):
            disk.start(disk_path=str(path))
    assert (tmp_path / "file").read_text() == "mine"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(KvCacheError, match="cannot reserve the disk tier's limit in"):
            disk.start(disk_limit="64MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_read_only_folder_is_an_error(disk: Disk) -> None:
    if os.geteuid() == 0:
        # Root may write anywhere but in the folders of the kernel.
        with pytest.raises(KvCacheError, match="cannot create the folder|cannot open"):
            disk.start(disk_path="/proc/kvcache")
        return
    disk.folder.mkdir(mode=0o500)
    with pytest.raises(KvCacheError, match="cannot open"):
        disk.start()


def test_a_second_process_gets_a_clear_error(disk: Disk) -> None:
    engine = disk.start()
    with pytest.raises(KvCacheError, match=r"disk is in use by another process; give each process its own folder"):
        disk.start()
    code = f"from kvcache._native import Slab; Slab({str(disk.folder)!r}, 'x', limit=1 << 22, row_bytes=4096)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode == 1 and "in use by another process" in other.stderr
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert reused(disk.ask(disk.restart(), prompt(LENGTHS), chunk_lengths=LENGTHS)) == 90


def test_a_killed_vllm_leaves_only_right_records(disk: Disk) -> None:
    program = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent / "fake_vllm")]!r}
        from pathlib import Path
        import pytest
        from test_connector_disk import Disk, LENGTHS, prompt
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, Path({str(disk.folder.parent)!r}))
            engine = disk.start(disk_limit="2MiB", host_memory=60 * 8 * 256)
            print("ready", flush=True)
            for number in range(100_000):
                disk.ask(engine, prompt(LENGTHS, first=10 + number % 300), chunk_lengths=LENGTHS)
                disk.ask(engine, list(range(number % 300, number % 300 + 70)))
                print(number, flush=True)
    """)
    found = 0
    for round_ in range(5):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == "ready"
        for _ in range(9 * round_ + 3):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        engine = disk.start(disk_limit="2MiB")
        for number in range(last + 1):
            found += reused(disk.ask(engine, prompt(LENGTHS, first=10 + number % 300), chunk_lengths=LENGTHS))
            disk.ask(engine, list(range(number % 300, number % 300 + 70)))
        nothing_held_but_the_disk(engine)
        disk.stop()
    assert found > 500


def test_all_ranks_must_have_a_record() -> None:
    asks, answers = Asks(2), []
    asks.ask([Record(b"a", [1], 0, [1]), Record(b"b", [2], 0, [2])], lambda number, reason: answers.append((number, reason)))
    (order,) = asks.take_orders()
    asks.answer({order.name: {0: (1, None)}})
    assert answers == [] and asks.under_way
    asks.answer({order.name: {0: (1, None), 1: (1, "damaged")}})
    assert answers == [(0, None)]
    asks.answer({order.name: {1: (1, None)}})
    assert answers == [(0, None), (1, "damaged")] and not asks.under_way and not asks.sums
    asks.ask([Record(b"c", [1], 0, [1])], lambda number, reason: answers.append((number, reason)))
    (order,) = asks.take_orders()
    asks.reset()
    asks.answer({order.name: {0: (2, None)}})
    assert len(answers) == 2 and not asks.sums, "nobody waits after a reset"


@pytest.mark.parametrize("steps", range(7))
def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(disk: Disk, steps: int) -> None:
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    engine = disk.restart(delay=lambda: 1)
    engine.ask("chunks", tokens, count=20, chunk_lengths=LENGTHS)
    engine.ask("new", prompt(LENGTHS, first=150), count=20, chunk_lengths=LENGTHS)
    engine.ask("plain", plain, count=20)
    for _ in range(steps):
        engine.step()
    engine.abort("chunks", "new", "plain")
    engine.run()
    nothing_held_but_the_disk(engine)
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90


def test_the_disk_has_counters_and_gauges(disk: Disk) -> None:
    from kvcache.vllm.stats import COUNTERS, GAUGES

    sums: dict[str, float] = {}
    engine = disk.start()

    def observe() -> None:
        report = engine.worker.get_kv_connector_stats()
        for name, value in (report.data if report is not None else {}).items():
            assert name in COUNTERS or name in GAUGES
            sums[name] = value + (sums.get(name, 0) if name in COUNTERS else 0)

    observe()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    observe()
    engine.side.chunks.cache.clear_cache()
    engine.kv_cache_manager.reset()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    observe()
    assert engine.worker.get_kv_connector_stats() is None, "nothing has changed"
    counts = engine.disk.usage()
    assert sums == {f"tier_{name}": value for name, value in counts.items()}
    assert (sums["tier_hits"], sums["tier_misses"], sums["tier_records"]) == (3, 3, 3) and sums["tier_bytes"] > 0


def test_native_records_check_their_arguments(disk: Disk) -> None:
    engine = disk.start()
    blocks = engine.disk.blocks[False]
    with pytest.raises(ValueError, match="block 512000 does not exist; there are"):
        blocks.store(b"a", [1], 0, [512000])
    assert blocks.store(b"a", [1, 2], 0, [1]) == "queued"
    settle(engine)
    assert blocks.store(b"a", [1, 2], 0, [1]) == "known" and blocks.store(b"b", [1], 0, [1], parent=b"nowhere") == "dropped"
    assert blocks.peek(b"b") is None and blocks.peek(b"a")[1] == 0
    load = blocks.begin_load(b"a", [1, 3], 0)
    assert load.wait(10) and load.end([2]) == "tokens_differ"
    with pytest.raises(RuntimeError, match="already ended"):
        load.end([2])
    load = blocks.begin_load(b"a", [1, 2], 0)
    assert load.wait(10) and load.end([2, 3]) == "failed", "the record has one block"
    load = blocks.begin_load(b"a", [1, 2], 1)
    assert load.wait(10) and load.end([2]) == "tokens_differ", "the position differs"
    engine.disk.slab.close(deadline=10)
    with pytest.raises(RuntimeError, match="closed; open the folder again"):
        blocks.peek(b"a")
    assert isinstance(engine.disk.slab, Slab)


def found_of(disk: Disk, engine: Engine, tokens: list[int], **more: Any) -> dict[str, Any] | None:
    """Asks an ordinary prompt for a report, when the engine itself has nothing."""
    engine.kv_cache_manager.reset()
    name = f"report-{disk.asked}"
    disk.asked += 1
    engine.ask(name, tokens, **{"prefix_report": True, **more})
    engine.run()
    got, said = engine.answers[name]
    assert got == ROOMY.answer(tokens, 2, context(engine.weights, None, {}), None)
    return said


def test_an_ordinary_prompt_says_what_was_found_and_why_the_rest_was_not(disk: Disk) -> None:
    tokens = list(range(10, 10 + 5 * SIZE + 1))
    engine = disk.start(prefix_memory=8 * SIZE * ROW)
    assert found_of(disk, engine, tokens) == {"prefix_tokens_found": 0, "prefix_missed": "new"}
    assert found_of(disk, engine, tokens) == {"prefix_tokens_found": 40}
    assert found_of(disk, engine, [*tokens[:20], *range(300, 330)]) == {"prefix_tokens_found": 16, "prefix_missed": "new"}
    assert found_of(disk, engine, tokens, prefix_report=False) is None
    engine = disk.restart()
    assert found_of(disk, engine, [*tokens, *range(400, 430)]) == {"prefix_tokens_found": 40, "prefix_missed": "new"}
    disk.stop()
    whole, page = bytearray(disk.file.read_bytes()), 4096
    for at in range(0, len(whole), page):
        if whole.startswith(b"KVRECORD", at):
            whole[at + page + 900] ^= 8
    disk.file.write_bytes(whole)
    assert found_of(disk, disk.start(), tokens) == {"prefix_tokens_found": 0, "prefix_missed": "damaged"}
    engine = Engine(disk.monkeypatch, prefix_memory=6 * SIZE * ROW)
    found_of(disk, engine, tokens)
    found_of(disk, engine, list(range(300, 345)))
    said = found_of(disk, engine, tokens)
    assert said is not None and said["prefix_missed"] == "evicted"
