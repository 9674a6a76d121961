"""``SlabTier``: blocks of vLLM's offloading survive a restart, and nothing wrong is ever served."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from fake_offloading import ROW, ROWS, Connector, Offloading, config_of, contents, key, model_in, vllm_config_of
from fake_tier import FILE, MIB, Disk, disk, hang  # noqa: F401
from killing import killed_after
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcache import KvCacheError
from kvcache._native import Slab

KEYS = [key(number) for number in range(40)]


@pytest.mark.parametrize("row", [4096, ROW, 100 * 1024, MIB + 4096])
def test_blocks_survive_a_restart_bit_by_bit(disk: Disk, row: int) -> None:
    keys = KEYS[:20]
    host = disk.start(limit=40 * MIB, row=row)
    assert host.load(keys) == [] and host.hits(keys) == []
    result = host.store(keys)
    assert result.success and result.transfer_bytes == 20 * row and result.transfer_time > 0
    assert host.load(keys) == keys
    for _ in range(2):
        host = disk.restart(limit=40 * MIB, row=row)
        assert host.load(keys) == keys
    usage = host.tier.usage()
    assert (usage["records"], usage["hits"], usage["misses"]) == (20, 20, 0)


def test_a_block_that_is_stored_twice_is_written_once(disk: Disk) -> None:
    host = disk.start()
    for _ in range(3):
        assert host.store(KEYS[:9]).success
    assert host.tier.usage()["records"] == 9


def test_a_key_is_a_hash_and_a_group(disk: Disk) -> None:
    host = disk.start()
    host.store([key(1, group=0), b"short", b"short\0", b"\0short"])
    assert host.load([key(1, group=0), key(1, group=1), b"short", b"short\0", b"short\0\0", b"\0short"]) == [
        key(1, group=0),
        b"short",
        b"short\0",
        b"\0short",
    ]


def parallel_of(**changes: int) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(config_of().parallel), **changes})


CHANGES: dict[str, Callable[[Disk], dict[str, Any]]] = {
    "another model": lambda disk: {"vllm_config": vllm_config_of(model_in(disk.model.parent / "other"))},
    "a commit on the hub": lambda disk: {"vllm_config": vllm_config_of(Path("org/model"))},
    "a quantised model": lambda disk: {"vllm_config": vllm_config_of(disk.model, model_config={"quantization": "fp8"})},
    "another length": lambda disk: {"vllm_config": vllm_config_of(disk.model, model_config={"max_model_len": 8192})},
    "another rotary embedding": lambda disk: {
        "vllm_config": vllm_config_of(disk.model, model_config={"hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 5e5})})
    },
    "another hash": lambda disk: {"vllm_config": vllm_config_of(disk.model, hash="sha256_cbor")},
    "another version": lambda _: {"version": "after the update"},
    "another type of elements": lambda _: {"config": config_of(model=SimpleNamespace(name="model", dtype="float16"))},
    "another block size": lambda _: {
        "config": config_of(groups=[SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("model.0", "model.1"))])
    },
    "other layers": lambda _: {
        "config": config_of(groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("model.0", "model.2"))])
    },
    "larger chunks": lambda _: {"config": config_of(cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2))},
    "another layout": lambda _: {"config": config_of(kv_cache_layout="LBNHC")},
    "the canonical layout": lambda _: {"config": config_of(canonical_layout=True)},
    "one copy for all ranks": lambda _: {"config": config_of(replicated_layout=True)},
    "two ranks": lambda _: {"config": config_of(parallel=parallel_of(world_size=2, tp_size=2))},
    "two stages": lambda _: {"config": config_of(parallel=parallel_of(world_size=2, pp_size=2))},
    "larger blocks": lambda _: {"row": 2 * ROW},
}


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_may_differ_are_not_found(disk: Disk, change: str) -> None:
    disk.start().store(KEYS[:5])
    changed = CHANGES[change](disk)
    assert disk.restart(**changed).hits(KEYS[:5]) == [], change
    # A record of another identity under the same hash does not get in the way.
    assert disk.open[0].store(KEYS[:3]).success and disk.open[0].load(KEYS[:3]) == KEYS[:3]
    host = disk.restart()
    assert host.load(KEYS[:5]) == KEYS[:5], "the first model's blocks are still there"


def test_replaced_weights_find_nothing(disk: Disk) -> None:
    disk.start().store(KEYS[:5])
    weights = disk.model / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert disk.restart().hits(KEYS[:5]) == [], "the size and the time of the contents are the same"


def test_models_on_the_hub_are_their_names_and_commits(disk: Disk) -> None:
    def hub(name: str, commit: str | None) -> Any:
        hf = SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0}, _commit_hash=commit)
        return vllm_config_of(Path(name), model_config={"hf_config": hf})

    disk.start(vllm_config=hub("org/one", "c1")).store(KEYS[:5])
    assert disk.restart(vllm_config=hub("org/one", "c2")).hits(KEYS[:5]) == []
    assert disk.restart(vllm_config=hub("org/two", "c1")).hits(KEYS[:5]) == []
    assert disk.restart(vllm_config=hub("org/one", None)).hits(KEYS[:5]) == []
    assert disk.restart(vllm_config=hub("org/one", "c1")).load(KEYS[:5]) == KEYS[:5]


def test_another_vllm_finds_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.start().store(KEYS[:5])
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "__version__", "0.33.0")
        assert disk.restart().hits(KEYS[:5]) == []
    assert disk.restart().load(KEYS[:5]) == KEYS[:5]


def test_a_changed_byte_is_a_miss_or_changes_nothing(disk: Disk) -> None:
    disk.start().store(KEYS[:20])
    disk.stop()
    whole, draw = disk.file.read_bytes(), random.Random(5)
    places = [at for at in range(0, len(whole), 509) if whole[at]]
    served = 0
    for _ in range(12):
        damaged = bytearray(whole)
        for place in draw.sample(places, 5):
            damaged[place] ^= 1 << draw.randrange(8)
        disk.file.write_bytes(damaged)
        host = disk.start()
        # `load` compares the bytes of everything that is served.
        loaded = host.load(KEYS[:20])
        served += len(loaded)
        assert host.hits(KEYS[:20]) == loaded, "a damaged block is not found again"
        usage = host.tier.usage()
        assert usage["damaged"] == usage["loads_failed"] <= 5
        assert host.store(KEYS[:20]).success and host.load(KEYS[:20]) == KEYS[:20]
        disk.stop()
    assert 100 < served < 12 * 20, "some blocks were damaged, and the others are served"


@pytest.mark.parametrize("left", [0, 1, 4096, MIB, 3 * MIB])
def test_a_truncated_file_is_created_anew(disk: Disk, left: int) -> None:
    disk.start().store(KEYS)
    disk.stop()
    os.truncate(disk.file, left)
    host = disk.start()
    host.load(KEYS)
    assert host.store(KEYS).success and host.load(KEYS) == KEYS


def test_the_limit_is_kept_and_the_last_blocks_stay(disk: Disk) -> None:
    host, keys = disk.start(limit="2MiB"), [key(number) for number in range(400)]
    for first in range(0, 400, 20):
        host.store(keys[first : first + 20])
        assert disk.file.stat().st_size <= 2 * MIB
        assert host.tier.usage()["bytes"] <= host.tier.usage()["limit_bytes"] <= 2 * MIB
    assert host.tier.usage()["evicted"] > 200
    assert host.load(keys[-20:]) == keys[-20:]
    host = disk.restart(limit="2MiB")
    assert host.load(keys[-20:]) == keys[-20:] and host.load(keys[:20]) == []


def test_blocks_of_other_models_count_and_leave_first(disk: Disk) -> None:
    disk.start(limit="2MiB").store([key(number) for number in range(1000, 1100)])
    own = disk.restart(limit="2MiB", version="other")
    for first in range(0, 60, 20):
        own.store([key(number) for number in range(first, first + 20)])
    assert disk.file.stat().st_size <= 2 * MIB
    assert len(own.load([key(number) for number in range(60)])) == 60


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_prompt_leaves_from_its_end(disk: Disk, has_ended: bool) -> None:
    prompt, others = [key(number) for number in range(30)], [key(number) for number in range(100, 400)]
    host = disk.start(limit="1300KiB")
    context = host.request(prompt)
    host.store(prompt, context)
    if has_ended:
        host.tier.on_request_finished(context)
    seen = []
    for first in range(0, 300, 5):
        host.store(others[first : first + 5])
        found = host.hits(prompt)
        assert found == prompt[: len(found)], "the beginning of a prompt left before its end"
        seen.append(len(found))
    assert seen[0] == 30 and 0 in seen and any(0 < count < 30 for count in seen)


def test_a_prompt_that_vllm_has_itself_stays_on_the_disk(disk: Disk) -> None:
    """vLLM never asks the tier for blocks that are in its own memory, but tells it which requests have them."""
    prompt, others = [key(number) for number in range(20)], [key(number) for number in range(100, 400)]
    host = disk.start(limit="1300KiB")
    host.store(prompt, host.request(prompt))
    for first in range(0, 300, 10):
        host.store(others[first : first + 10])
        host.tier.on_request_finished(host.request(prompt))
    assert host.load(prompt) == prompt


def test_a_second_vllm_gets_a_clear_error(disk: Disk) -> None:
    host = disk.start()
    with pytest.raises(KvCacheError, match=r"disk is in use by another process; give each process its own folder"):
        disk.start()
    code = f"from kvcache._native import Slab; Slab({str(disk.folder)!r}, 'x', limit=1 << 22, row_bytes=4096)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert other.returncode == 1 and "in use by another process" in other.stderr
    assert host.store(KEYS).success
    assert disk.restart().load(KEYS) == KEYS


def test_replicas_have_folders_of_their_own(disk: Disk) -> None:
    for index in (0, 1):
        config = config_of(parallel=parallel_of(data_parallel_size=2, data_parallel_index=index))
        disk.start(config=config).store(KEYS[index : index + 1])
    assert sorted(path.name for path in disk.folder.iterdir()) == ["replica-0", "replica-1"]


WRONG = [
    ({"path": None}, r"SlabTier needs the setting path: the folder for its records, such as"),
    ({"path": ""}, r"path is '': it must be the folder for its records"),
    ({"path": 7}, r"path is 7: it must be the folder"),
    ({"limit": None}, r'SlabTier needs the setting limit: the size of its file, such as "50GiB"'),
    ({"limit": "50 GB"}, r"limit is '50 GB': it must be a number of bytes, or a number with KiB, MiB, GiB or TiB"),
    ({"limit": "lots"}, r"limit is 'lots'"),
    ({"limit": 0}, r"limit is 0: it must be a number of bytes above 0"),
    ({"limit": -5}, r"limit is -5"),
    ({"limit": True}, r"limit is True"),
    ({"limit": float("nan")}, r"limit is nan"),
    ({"limit": "1MiB"}, r"limit is '1MiB', which is too small: a block takes 12288 bytes; use at least \d+"),
    ({"read_deadline": 0}, r"read_deadline is 0: it must be a number of seconds above 0"),
    ({"read_deadline": "2"}, r"read_deadline is '2'"),
    ({"read_deadline": True}, r"read_deadline is True"),
    ({"write_deadline": float("inf")}, r"write_deadline is inf"),
    ({"write_deadline": 1e18}, r"write_deadline is 1e\+18: it must be a number of seconds above 0, at most a day"),
    ({"limit": "9999999999TiB"}, r"limit is '9999999999TiB': it must be a number of bytes above 0 that a file can have"),
    ({"loads": "never"}, r'loads is \'never\': it must be "if-faster" or "always"'),
    ({"version": 3}, r"version is 3: it must be a text"),
    ({"locality": "local"}, r'locality is \'local\': it must be "LOCAL" or "REMOTE"'),
    ({"limt": "1GiB"}, r"unknown setting limt; use limit; the known settings are path, limit, read_deadline"),
    ({"root_dir": "/x"}, r"unknown setting root_dir; the known settings are path"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_say_what_to_do(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    given = {"path": str(tmp_path / "disk"), "limit": "4MiB", **settings}
    with pytest.raises(ValueError, match=message):
        Offloading(config_of(), vllm_config_of(model_in(tmp_path / "model")), **given)
    assert not (tmp_path / "disk").exists(), "a refused tier leaves nothing"


@pytest.mark.parametrize("limit", ["4MiB", "4096KiB", "0.00390625GiB", 4 * MIB, 4.0 * MIB, " 4 MiB "])
def test_a_limit_is_a_number_or_a_text(disk: Disk, limit: Any) -> None:
    assert 3 * MIB < disk.start(limit=limit).tier.usage()["limit_bytes"] <= 4 * MIB


def test_a_file_as_the_path_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, message in ((tmp_path / "file", "is not a folder; name a folder"), (tmp_path / "file" / "below", "cannot create the folder")):
        with pytest.raises(KvCacheError, match=message):
            Offloading(config_of(), vllm_config_of(model_in(tmp_path / "model")), path=path, limit="4MiB")
    assert (tmp_path / "file").read_text() == "mine"


def test_adapters_and_weak_hashes_are_refused(disk: Disk) -> None:
    for hash_ in ("xxhash", "xxhash_cbor"):
        with pytest.raises(ValueError, match="start vLLM with --prefix-caching-hash-algo sha256"):
            disk.start(vllm_config=vllm_config_of(disk.model, hash=hash_))
    with pytest.raises(ValueError, match="give SlabTier the setting version"):
        disk.start(vllm_config=vllm_config_of(disk.model, lora_config=object()))
    assert disk.start(vllm_config=vllm_config_of(disk.model, lora_config=object()), version="1").store(KEYS[:2]).success


def test_a_disk_without_room_is_an_error_and_leaves_the_memory_free(disk: Disk) -> None:
    memory = np.zeros((ROWS, ROW), np.int8)
    view, connector = memoryview(memory), Connector(vllm_config_of(disk.model), KVConnectorRole.SCHEDULER, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(KvCacheError, match="cannot reserve the disk tier's limit in"):
            connector.tier(config_of(), view, path=str(disk.folder), limit="64MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    view.release()


def test_a_disk_that_refuses_writes_fails_the_job_and_nothing_else(disk: Disk) -> None:
    host = disk.start()
    host.store(KEYS[:10])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        result = host.store(KEYS[10:20])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not result.success and host.hits(KEYS[10:20]) == []
    usage = host.tier.usage()
    assert usage["write_errors"] > 0 and usage["stores_failed"] == 10
    assert host.load(KEYS[:10]) == KEYS[:10]
    assert host.store(KEYS[10:20]).success and host.load(KEYS[:20]) == KEYS[:20]


def test_a_disk_that_loses_its_end_fails_the_blocks_there(disk: Disk) -> None:
    host = disk.start()
    host.store(KEYS)
    os.truncate(disk.file, MIB // 2)
    context = host.request()
    loaded = host.load(KEYS, context)
    assert 0 < len(loaded) < len(KEYS)
    assert host.tier.usage()["loads_failed"] == len(KEYS) - len(loaded) == host.tier.usage()["misses"]
    assert [block for block in KEYS if block in host.hits(KEYS)] == loaded


def test_a_disk_that_hangs_fails_its_jobs_and_is_left_alone(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.vllm.disk.reads.REST", 1.0)
    host = disk.start(read_deadline=0.5, write_deadline=0.5)
    host.store(KEYS[:10])
    hanging, contexts = hang(host), [host.request() for _ in range(20)]
    began = time.monotonic()
    jobs = [host.submit_load([KEYS[0]], context, first=row) for row, context in enumerate(contexts)]
    stores = [host.submit_store([KEYS[20 + row]], contexts[row], first=30 + row) for row in range(20)]
    assert time.monotonic() - began < 0.3, "the scheduler waited for the disk"
    for job in (*jobs, *stores):
        assert not host.wait(job).success
    assert time.monotonic() - began < 3.0, "each job waited for the disk in turn"
    assert hanging.begun == 21, "the loads waited together; one store asked the disk, and the others were refused"
    assert hanging.given_up == 20
    assert not host.wait(host.submit_load([KEYS[0]])).success and hanging.begun == 21, "a disk that hangs is not asked"
    assert host.hits(KEYS[:10]) == [], "a lookup finds nothing on a disk that hangs"
    host.tier._slab = host.tier._jobs.slab = hanging.own
    time.sleep(1.2)
    assert host.load(KEYS[:10]) == KEYS[:10], "the disk is asked again"


def test_a_block_that_came_too_late_is_not_asked_for_again_by_the_same_request(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.vllm.disk.reads.REST", 0.0)
    host = disk.start(read_deadline=0.05)
    host.store(KEYS[:3])
    hanging, context = hang(host), host.request()
    assert host.load(KEYS[:3], context) == [] and hanging.begun == 3
    assert host.load(KEYS[:3], context) == [] and hanging.begun == 3, "a request would ask for ever"
    host.tier._slab = host.tier._jobs.slab = hanging.own
    assert host.load(KEYS[:3], context) == [] and host.load(KEYS[:3]) == KEYS[:3]


def test_draining_and_ending_wait_for_no_disk_that_hangs(disk: Disk) -> None:
    host = disk.start(read_deadline=0.3, write_deadline=0.3)
    host.store(KEYS[:3])
    hang(host)
    jobs = [host.submit_load([KEYS[0]], first=row) for row in range(5)] + [host.submit_store([KEYS[9]], first=20)]
    began = time.monotonic()
    host.tier.drain_jobs()
    assert time.monotonic() - began < 2.0
    host.poll()
    assert set(host.results) == set(jobs), "every job has ended"
    for row in range(5):
        host.submit_store([KEYS[10 + row]], first=row)
    began = time.monotonic()
    disk.stop()
    assert time.monotonic() - began < 3.0


def test_stores_wait_in_a_bounded_queue(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.vllm.disk.jobs.MOST_WAITING", 10 * ROW)
    host = disk.start(write_deadline=1.0)
    hang(host)
    jobs = [host.submit_store([key(number) for number in range(100 + 5 * i, 105 + 5 * i)], first=5 * i) for i in range(6)]
    host.poll()
    assert list(host.results) == jobs[2:], "two jobs of five blocks wait, the others are refused at once"
    assert host.tier.usage()["stores_refused"] == 20
    host.tier.drain_jobs()
    assert host.tier._jobs.bytes_waiting == 0


def test_a_request_that_was_aborted_leaves_nothing(disk: Disk) -> None:
    host = disk.start(read_deadline=0.1)
    host.store(KEYS[:5])
    contexts = [host.request(KEYS), host.request(KEYS)]
    for first, context in enumerate(contexts):
        loads = [host.submit_load([KEYS[20 + row]], context, first=row) for row in range(5)]
        store = host.submit_store(KEYS[10:12], context, first=10)
        if first == 0:
            host.tier.on_request_finished(context)
        for job in (*loads, store):
            host.wait(job)
        if first == 1:
            host.tier.on_request_finished(context)
    host.tier.drain_jobs()
    host.poll()
    jobs = host.tier._jobs
    assert not {context.req_id for context in contexts} & set(host.tier._missed), "a request that has ended is remembered"
    assert not jobs.running and not jobs.bytes_waiting and not jobs.finished and not host.jobs


def test_an_error_in_a_thread_is_a_failed_job(disk: Disk) -> None:
    host = disk.start()
    host.store(KEYS[:3])
    host.tier._jobs.table = np.zeros((2, 5), np.int8)
    assert not host.wait(host.submit_load(KEYS[:3])).success
    assert not host.wait(host.submit_store(KEYS[5:7])).success
    host.tier._jobs.table = host.memory
    assert host.load(KEYS[:3]) == KEYS[:3] and host.store(KEYS[5:7]).success


def test_metrics_are_defined_and_add_up(disk: Disk) -> None:
    host = disk.start()
    defined = host.tier.build_metric_definitions({})
    sums: dict[str, float] = {}
    times: dict[str, list[float]] = {}

    def observe() -> None:
        stats = host.tier.get_stats()
        for name, values in (stats.data["data"] if stats else {}).items():
            assert name in defined and set(values) == {()}
            if stats.data["types"][name] == "histogram":
                assert defined[name].buckets is not None
                times.setdefault(name, []).extend(values[()])
                continue
            before = sums.get(name, 0) if stats.data["types"][name] == "counter" else 0
            sums[name] = before + values[()]

    observe()
    host.store(KEYS[:10])
    observe()
    host.load(KEYS[:10])
    host.wait(host.submit_load(KEYS[30:32]))
    observe()
    observe()
    usage = host.tier.usage()
    assert (usage["records"], usage["hits"], usage["misses"], usage["loads_failed"]) == (10, 10, 2, 2)
    prefix = "vllm:kvcache_tier_"
    assert sums == {prefix + name: value for name, value in usage.items() if value} and usage["bytes"] > 10 * ROW
    assert {prefix + name for name in usage} | set(times) == set(defined)
    loads, writes = times[prefix + "load_seconds"], times[prefix + "write_seconds"]
    # Blocks that are not here are not read.
    assert len(loads) == 10 and 1 <= len(writes) <= 10 and all(0 < seconds < 60 for seconds in (*loads, *writes))


def test_ending_frees_vllms_memory_and_writes_what_waits(disk: Disk) -> None:
    host = disk.start()
    for number in range(5):
        host.submit_store(KEYS[8 * number : 8 * number + 8], first=8 * number)
    disk.stop()
    assert disk.start().load(KEYS) == KEYS
    tier = disk.open[0].tier
    tier.shutdown()
    tier.shutdown()
    assert tier.usage() == {} and tier.get_stats() is None


def test_random_traffic_never_serves_another_blocks_bytes(disk: Disk) -> None:
    draw, host = random.Random(11), disk.start(limit="1500KiB")
    keys = [key(number, group) for number in range(80) for group in (0, 1)]
    served = 0
    for _ in range(300):
        some = draw.sample(keys, draw.randrange(1, 20))
        action = draw.random()
        if action < 0.45:
            host.store(some)
        elif action < 0.9:
            served += len(host.load(some))
        elif action < 0.95:
            host.tier.touch(some, host.request(some))
        else:
            host = disk.restart(limit="1500KiB")
    assert served > 300


def test_a_killed_vllm_leaves_only_right_blocks(disk: Disk) -> None:
    program = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parent / "fake_vllm")]!r}
        from pathlib import Path
        from fake_offloading import Offloading, config_of, key, vllm_config_of
        host = Offloading(config_of(), vllm_config_of(Path({str(disk.model)!r})), path={str(disk.folder)!r}, limit="2MiB")
        print("ready", flush=True)
        for number in range(100_000):
            assert host.store([key(number), key(number + 7)]).success
            print(number, flush=True)
    """)
    found = 0
    for round_ in range(5):
        last = killed_after(program, 7 * round_ + 1)
        host = disk.start(limit="2MiB")
        committed = [key(number) for number in range(last + 1)]
        assert host.load(committed) == committed, "a block that was reported as stored is gone"
        found += len(committed)
        disk.stop()
    assert found > 50


def test_contents_differ() -> None:
    assert not np.array_equal(contents(key(1)), contents(key(2)))
