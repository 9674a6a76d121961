"""The connector's disk under faults: damage, failing and hanging disks, limits, aborts, ``kill -9`` and wrong settings. Each
request is answered, and no wrong byte is served.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from fake_disk import LENGTHS, MIB, Disk, Hanging, disk, missed, nothing_held_but_the_disk, reused, settle, usage  # noqa: F401
from fake_engine import ROW, SIZE, Engine, context
from killing import killed_after
from roomy import Roomy
from slow_disk import Throttled
from test_pressure import prompt

from kvcache import KvCacheError
from kvcache._native import Slab
from kvcache.vllm.disk.prefill import PrefillRate

ROOMY = Roomy()


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


def test_a_disk_that_hangs_delays_requests_by_its_deadline_and_no_step(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.vllm.disk.reads.REST", 0.5)
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    engine = disk.restart(disk_deadline=2)
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
        assert time.monotonic() - began < 60, "requests wait for a disk that hangs"
    assert longest < 1, f"a step waited for the disk for {longest:.2f} s"
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
    assert set(missed(said).values()) == {"deadline"} and time.monotonic() - began < 1
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
    engine.disk.measured(2000, 2e-3)
    slab = engine.disk.slab

    class Slow:
        expected = staticmethod(lambda size: 1.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(slab, name)

    engine.disk.slab = Slow()
    said = disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    assert missed(said) == {"0": "slower", "1": "slower", "2": "slower"}
    assert usage(engine, "loads_skipped_slower", "hits") == (3, 0)
    # One of so many is tried all the same, because the disk may have become faster.
    engine.disk.measured(2000, 2e6)
    skips = engine.disk.reads.skips
    assert skips == 1
    engine = disk.restart(disk_loads="if-faster")
    engine.disk.measured(2000, 2e5)
    assert reused(disk.ask(engine, tokens, chunk_lengths=LENGTHS)) == 90, "computing takes hours"


def test_few_measured_tokens_do_not_make_a_request_wait() -> None:
    rate = PrefillRate()
    assert rate.cost(100) == 0.0 and rate.cost_of_stored(100, 2.5) == 2.0, "nothing is measured"
    rate.measured(50, 5.0)
    assert rate.cost(100) == 10.0 and rate.cost_of_stored(100, 2.5) == 2.0, "a short step takes longer per token"
    assert rate.cost_of_stored(100, 20.0) == 10.0, "it was stored on a slower machine"
    rate.measured(2000, 40.0)
    assert 2.0 < rate.cost(100) < 2.3 and rate.cost_of_stored(100, 1.0) == rate.cost(100), "longer steps weigh more"


def test_a_request_stops_waiting_when_giving_up_costs_a_twentieth(disk: Disk) -> None:
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster", disk_deadline=60)
    engine.disk.blocks[False] = Hanging(engine.disk.blocks[False])
    # Ninety tokens take twenty seconds.
    engine.disk.measured(1800, 400.0)
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert set(missed(said).values()) == {"deadline"} and 0.9 < time.monotonic() - began < 10


@pytest.mark.parametrize(("seconds", "found"), [(0.02, 90), (0.5, 90), (3.0, 0)])
def test_a_slow_disk_costs_at_most_a_twentieth(disk: Disk, seconds: float, found: int) -> None:
    """Ninety tokens take four seconds to compute, and the disk needs ``seconds`` seconds for each of the three records. One
    that is faster than computing is waited for."""
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster", disk_deadline=60)
    engine.disk.blocks[False] = Throttled(engine.disk.blocks[False], seconds)
    engine.disk.measured(1800, 80.0)
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert reused(said) == found and set(missed(said).values()) <= {"deadline"}
    # A fake step takes no time, so all of this is waiting.
    waited = time.monotonic() - began
    assert waited < 3 * seconds + 0.3 if found else waited < 0.6
    nothing_held_but_the_disk(engine)


@pytest.mark.parametrize("seconds", [2.7, 2.8, 3.0])
def test_a_disk_that_is_hardly_slower_than_computing_costs_at_most_a_tenth(disk: Disk, seconds: float) -> None:
    """Each record takes longer to read than the first ones take to compute, and what is read of it is lost when the request
    stops waiting."""
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster", disk_deadline=60)
    engine.disk.blocks[False] = Throttled(engine.disk.blocks[False], seconds)
    engine.disk.measured(1800, 160.0)
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert reused(said) == 0 and set(missed(said).values()) == {"deadline"}
    assert time.monotonic() - began < 0.8
    nothing_held_but_the_disk(engine)


@pytest.mark.parametrize(("seconds", "count", "later"), [(0.4, 9, 50), (0.45, 9, 50), (0.2, 2, 0), (0.1, 2, 0)])
def test_a_disk_that_still_reads_at_the_deadline_is_asked_again(disk: Disk, seconds: float, count: int, later: int) -> None:
    """Two of three records arrive in time. The disk is left alone only if it has stopped reading, after ``count`` records."""
    disk.ask(disk.start(), prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_deadline=1.0)
    engine.disk.blocks[False] = Throttled(engine.disk.blocks[False], seconds, count)
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    assert (reused(said), missed(said)) == (50, {"2": "deadline"})
    assert engine.disk.reads.rest.is_resting() == (later == 0)
    settle(engine)
    # The record that nobody waits for is read to its end.
    time.sleep(seconds)
    engine.side.chunks.cache.clear_cache()
    engine.kv_cache_manager.reset()
    began = time.monotonic()
    assert reused(disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)) == later
    assert later or time.monotonic() - began < 0.2, "nobody waits for a disk that is left alone"


def test_the_time_to_compute_is_stored_with_a_record(disk: Disk) -> None:
    """After a restart, nothing has been measured yet."""
    engine = disk.start()
    engine.disk.measured(1800, 100.0)
    engine.disk.measured = lambda *_: None
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    engine = disk.restart(disk_loads="if-faster", disk_deadline=60)
    engine.disk.blocks[False] = Hanging(engine.disk.blocks[False])
    began = time.monotonic()
    said = disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    # A twentieth of five seconds.
    assert set(missed(said).values()) == {"deadline"} and 0.2 < time.monotonic() - began < 2


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


@pytest.mark.parametrize("call", ["begin_load", "end"])
def test_an_error_in_the_thread_is_a_reason(disk: Disk, call: str) -> None:
    tokens, plain = prompt(LENGTHS), list(range(300, 360))
    engine = disk.start()
    disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    disk.ask(engine, plain)
    engine = disk.restart()

    class Broken:
        def __init__(self, own: Any) -> None:
            self.own = own

        def __getattr__(self, name: str) -> Any:
            if name == call:
                raise MemoryError("no memory")
            return getattr(self.own, name)

        def begin_load(self, *args: Any) -> Any:
            if call == "begin_load":
                raise MemoryError("no memory")
            return Broken(self.own.begin_load(*args))

    engine.disk.blocks.update({of_prefix: Broken(blocks) for of_prefix, blocks in engine.disk.blocks.items()})
    said = disk.ask(engine, tokens, chunk_lengths=LENGTHS)
    assert missed(said) == {"0": "failed", "1": "failed", "2": "failed"} and reused(said) == 0
    disk.ask(engine, plain)
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
    evicted = number = 0
    # A busy machine drops stores, so that the limit is reached later.
    while number < 60 or not evicted:
        assert number < 1_000, "nothing is evicted"
        disk.ask(engine, prompt(LENGTHS, first=10 + 7 * number), chunk_lengths=LENGTHS)
        disk.ask(engine, [*range(10 + number, 60 + number)])
        assert disk.file.stat().st_size <= 1200 << 10
        size, limit, evicted = usage(engine, "bytes", "limit_bytes", "evicted")
        assert size <= limit <= 1200 << 10
        number += 1
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
    ({"disk_policy": "fifo"}, r"disk_policy is 'fifo': it must be one of lru, s3-fifo, tiny-lfu"),
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
        from fake_disk import LENGTHS, Disk
        from test_pressure import prompt
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
        last = killed_after(program, 9 * round_ + 3)
        engine = disk.start(disk_limit="2MiB")
        # The latest first: what is stored now pushes out the oldest.
        for number in reversed(range(last + 1)):
            found += reused(disk.ask(engine, prompt(LENGTHS, first=10 + number % 300), chunk_lengths=LENGTHS))
            disk.ask(engine, list(range(number % 300, number % 300 + 70)))
        nothing_held_but_the_disk(engine)
        disk.stop()
    assert found > 2000


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
    from kvcache.vllm.stats import COUNTERS, GAUGES, HISTOGRAMS

    sums: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}
    waits = times["tier_wait_seconds"]
    engine = disk.start()

    def observe() -> None:
        report = engine.worker.get_kv_connector_stats()
        for name, value in (report.data if report is not None else {}).items():
            if name in HISTOGRAMS:
                times[name].extend(value)
                continue
            assert name in COUNTERS or name in GAUGES
            sums[name] = value + (sums.get(name, 0) if name in COUNTERS else 0)

    observe()
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    observe()
    loads, writes = times["tier_load_seconds"], times["tier_write_seconds"]
    assert waits == loads == [], "nothing was on the disk"
    assert 1 <= len(writes) <= 3 and all(0 < seconds < 20 for seconds in writes), "three records in up to three batches"
    engine.side.chunks.cache.clear_cache()
    engine.kv_cache_manager.reset()
    engine.disk.blocks[False] = Throttled(engine.disk.blocks[False], 0.1)
    disk.ask(engine, prompt(LENGTHS), chunk_lengths=LENGTHS)
    settle(engine)
    observe()
    assert len(waits) == 1 and 0.3 <= waits[0] < 2
    assert len(loads) == 3 and all(0 < seconds <= 20 for seconds in loads)
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
    assert load.wait(10) and load.is_over and load.progress == 1 and load.end([2]) == "tokens_differ"
    assert blocks.begin_load(b"nowhere", [1], 0).progress == 0, "nothing is read"
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
