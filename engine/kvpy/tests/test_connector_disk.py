"""The connector's disk: chunks and ordinary prompts are found after a restart, only where they may be, and with a reason
where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from fake_disk import LENGTHS, Disk, disk, missed, nothing_held_but_the_disk, reused, settle, usage  # noqa: F401
from fake_engine import ROW, SIZE, Engine, context
from fake_offloading import model_in
from roomy import Roomy
from test_pressure import nothing_held, prompt

from kvcache.vllm.disk.asks import Asks
from kvcache.vllm.orders import Record

ROOMY = Roomy()


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


def test_the_bytes_in_host_memory_are_those_that_were_computed(disk: Disk) -> None:
    seen = []
    for _ in range(2):
        engine = disk.restart()
        disk.ask(engine, [*range(10, 30), *range(100, 130), 3], chunk_lengths=[20, 30])
        side, rows = engine.side.chunks, [np.zeros((30, 1, 32), np.float32) for _ in range(2)]
        root = side.roots.of(SimpleNamespace(lora_request=None, cache_salt=None))
        (hold,) = side.cache.acquire(root, "alone", [], list(range(100, 130)), 0)
        engine.worker._worker.arena.own.arenas[0].gather(0, hold.slots, *rows)
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


def test_routers_are_told_of_blocks_that_came_from_the_disk(disk: Disk) -> None:
    tokens = list(range(10, 10 + 5 * SIZE + 1))
    told = []
    for _ in range(2):
        engine = disk.restart(has_events=True)
        disk.ask(engine, tokens, count=1)
        told.append([(event.block_hashes, event.parent_block_hash, event.token_ids) for event in engine.connector.take_events()])
    assert engine.side.prefixes.tokens_found == 5 * SIZE
    assert told[0] == told[1] and [len(ids) for _, _, ids in told[1]] == 5 * [SIZE]


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


def test_a_prompt_that_the_engine_has_itself_asks_nobody(disk: Disk) -> None:
    tokens = list(range(10, 10 + 5 * SIZE + 1))
    engine = disk.start()
    disk.ask(engine, tokens, count=1)
    engine.side.prefixes.pool.clear_cached()
    misses = usage(engine, "misses")
    disk.ask(engine, tokens, count=1)
    assert usage(engine, "misses") == misses and usage(engine, "hits") == (0,)


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


def test_what_host_memory_finds_stays_on_the_disk(disk: Disk) -> None:
    """The disk is never asked for what is popular, because host memory has it."""
    tokens, plain = prompt(LENGTHS, first=2_000), list(range(3_000, 3_000 + 5 * SIZE + 1))
    engine = disk.start(disk_limit="1200KiB", host_memory=200 * SIZE * ROW)
    for number in range(120):
        # vLLM itself forgets, so that host memory is asked.
        engine.kv_cache_manager.reset()
        disk.ask(engine, tokens, chunk_lengths=LENGTHS)
        disk.ask(engine, plain, count=1)
        disk.ask(engine, prompt(LENGTHS, first=10 + 11 * number), chunk_lengths=LENGTHS)
        disk.ask(engine, list(range(5_000 + 60 * number, 5_050 + 60 * number)), count=1)
        settle(engine)
    assert usage(engine, "evicted")[0] > 200 and usage(engine, "hits") == (0,)
    engine = disk.restart(disk_limit="1200KiB")
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90
    disk.ask(engine, plain)
    assert engine.side.prefixes.tokens_found == 5 * SIZE


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
