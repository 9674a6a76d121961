"""Checks the disk tier for vLLM's own offloading inside a real vLLM on a CPU against transformers. Run by the slice
`vllm` of `cargo xtask deep`.

    python check_slab.py MODEL …

vLLM is stopped and started again on the same folder, with other weights, another salt, damaged files, a disk that
fails or hangs, after `kill -9`, and on two ranks. Tokens must be the same, and log-probabilities within 1e-3 in f32.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_connector import BLOCK, Checks, Host, answer, arguments, store_until_killed, token_bytes
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.metrics.reader import Counter, Gauge

from kvcache.vllm import SlabTier

FAKES = Path(__file__).resolve().parents[2] / "engine/kvpy/tests/fake_vllm"
OFFLOADING = "vllm/v1/kv_offload", "vllm/distributed/kv_transfer/kv_connector/v1/offloading"
FILE = "records.kvslab"


class SlabHost(Host):
    """vLLM with its own ``OffloadingConnector`` and a tier on the disk, in this process."""

    def __init__(self, path: str, folder: Path, *, blocks: int = 24, memory: int = 8 << 20, ranks: int = 1, chunk: int = 1, **settings) -> None:
        self.path = path
        tier = {"type": "SlabTier", "module_path": "kvcache.vllm", "path": str(folder), "limit": "64MiB", "loads": "always", **settings}
        extra = {"cpu_bytes_to_use": memory * ranks, "blocks_per_chunk": chunk, "secondary_tiers": [tier]}
        self.llm = LLM(
            model=path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=512,
            max_num_batched_tokens=256,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=256 << 20,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            tensor_parallel_size=ranks,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"spec_name": "CpuTieringSpec", "spec_module_path": "kvcache.vllm", **extra},
            ),
        )

    @property
    def manager(self):
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def tier(self) -> SlabTier:
        return self.manager.secondary_tiers[0]

    def settle(self) -> None:
        """Runs steps until everything is stored, as a server does between requests."""
        until = time.monotonic() + 60
        while self.scheduler.has_requests() and time.monotonic() < until:
            self.llm.llm_engine.step()

    def forget(self) -> None:
        """vLLM forgets everything in its own memory."""
        self.settle()
        self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        self.settle()
        super().close()

    def nothing_held(self) -> str | None:
        self.settle()
        jobs = self.tier._jobs
        if jobs.running or jobs.bytes_waiting or jobs.finished or self.tier._missed or self.manager._jobs:
            return f"{jobs.running} jobs, {jobs.bytes_waiting} bytes, requests {self.tier._missed}, {self.manager._jobs}"
        if self.scheduler.kv_cache_manager.usage != 0:
            return f"{self.scheduler.kv_cache_manager.usage} of vLLM's blocks"
        host = self.manager.primary_tier
        pinned = host._num_allocated_chunks - len(host._free_list) - host._num_evictable_cache_chunks
        return f"{pinned} blocks of host memory" if pinned else None


class Hanging:
    """A disk that has stopped to answer."""

    def __init__(self, own) -> None:
        self.own = own
        self.contains, self.touch, self.usage, self.close = own.contains, own.touch, own.usage, own.close
        self.take_times = own.take_times

    def load(self, names, rows, at, *, deadline):
        time.sleep(deadline)
        return ["late"] * len(names)

    def store(self, names, rows, at, *, deadline):
        time.sleep(deadline)
        return [False] * len(names)


class SlabChecks(Checks):
    def ask(self, host: SlabHost, order: list[int], what: str, found: bool | None, **changes) -> None:
        """Asks a prompt. The answer must be the reference's, and its full chunks must be found or not, if that is
        known.
        """
        prompt, sampling = self.case.prompt(order, "plain")
        prompt.update(changes)
        (out,) = self.generate(host, (prompt, sampling))
        self.same(what, answer(out), self.expected(order, "plain"))
        size = BLOCK * self.blocks_per_record
        full = (len(out.prompt_token_ids) - 1) // size * size if found else 0
        if found is not None:
            self.say(f"{full} of its tokens are found", None if out.num_cached_tokens == full else f"{out.num_cached_tokens}")

    blocks_per_record = 1

    def interface(self) -> None:
        """The tier has the methods that this vLLM calls, and the tests' classes are vLLM's."""
        left = sorted(SlabTier.__abstractmethods__)
        self.say("every abstract method is there", f"not {left}" if left else None)
        for name, method in inspect.getmembers(SecondaryTierManager, inspect.isfunction):
            own = getattr(SlabTier, name)
            if name != "__init__" and own is not method:
                names = [list(inspect.signature(one).parameters) for one in (own, method)]
                self.say(f"{name}{tuple(names[0][1:])}", None if names[0] == names[1] else f"vLLM has {names[1]}")
        compared = 0
        for path in sorted(path for folder in OFFLOADING for path in (FAKES / folder).rglob("*.py")):
            module = ".".join(path.relative_to(FAKES).with_suffix("").parts)
            found = importlib.util.spec_from_file_location("fake", path)
            fake = importlib.util.module_from_spec(found)
            sys.modules["fake"] = fake
            found.loader.exec_module(fake)
            for name, own in inspect.getmembers(fake, inspect.isclass):
                if own.__module__ == "fake":
                    fault = differs(own, getattr(importlib.import_module(module), name, None))
                    self.say(f"the tests' {name} is vLLM's", fault)
                    compared += 1
        self.say(f"{compared} classes were compared", None if compared > 10 else "that is too few")

    def restarted(self, folder: Path, ranks: int) -> None:
        orders = [[0, 1], [2, 3, 1], [3]]
        host = SlabHost(self.path, folder, ranks=ranks)
        for order in orders:
            self.ask(host, order, f"documents {order}, computed", False)
        host.forget()
        for order in orders:
            self.ask(host, order, f"documents {order}, from the disk", True)
        self.ask(host, [0, 1], "another tenant", False, cache_salt="bob")
        self.say("nothing stays held", host.nothing_held())
        records = host.tier.usage()["records"]
        host.close()
        for restart in (1, 2):
            host = SlabHost(self.path, folder, ranks=ranks)
            self.say(f"{records} blocks are there after restart {restart}", None if host.tier.usage()["records"] == records else f"{host.tier.usage()}")
            for order in orders[::-1]:
                self.ask(host, order, f"documents {order}, after restart {restart}", True)
            self.ask(host, [0, 1], "the other tenant", True, cache_salt="bob")
            host.forget()
            self.ask(host, [0, 1], "no tenant has this salt", False, cache_salt=f"eve-{restart}")
            host.settle()
            usage = host.tier.usage()
            self.say(f"{usage['hits']} blocks were read, none failed", None if usage["hits"] and not usage["misses"] and not usage["loads_failed"] else str(usage))
            self.metrics(host)
            self.say("nothing stays held", host.nothing_held())
            records = usage["records"]
            host.close()

    def metrics(self, host: SlabHost) -> None:
        prefix, usage = "vllm:kvcache_tier_", host.tier.usage()
        read = {one.name.removeprefix(prefix): one.value for one in host.llm.get_metrics() if isinstance(one, Counter | Gauge) and one.name.startswith(prefix)}
        wrong = {name: (read.get(name), value) for name, value in usage.items() if value and read.get(name) != value}
        self.say(f"vLLM exports {len(read)} of the tier's metrics", f"{wrong}" if wrong else None)
        disk = host.counter("vllm:prompt_tokens_cached_by_source")
        self.say(f"vLLM counts {disk} tokens from its caches", None if disk else "none")

    def chunked(self, folder: Path) -> None:
        """A record holds three of vLLM's blocks."""
        self.blocks_per_record = 3
        for found in (False, True):
            host = SlabHost(self.path, folder / "chunks", chunk=3)
            self.ask(host, [2, 3, 1], f"chunks of three blocks, {'found' if found else 'computed'}", found)
            host.close()
        self.blocks_per_record = 1

    def other_weights(self, folder: Path, other: Path) -> None:
        shutil.copytree(self.path, other)
        host = SlabHost(str(other), folder)
        self.say("the copy of a model is another model", None if host.tier.usage()["records"] else "its folder is empty")
        self.ask(host, [0, 1], "so nothing of the first is found", False)
        host.close()

    def damaged(self, folder: Path) -> None:
        file, page = folder / FILE, 4096
        for what, place in (("payloads", 3 * page + 17), ("headers", 40)):
            contents = file.read_bytes()
            headers = [at for at in range(0, len(contents), page) if contents.startswith(b"KVRECORD", at)]
            with file.open("r+b") as out:
                for at in headers[::2]:
                    out.seek(at + place)
                    out.write(bytes(byte ^ 8 for byte in contents[at + place : at + place + 3]))
            host = SlabHost(self.path, folder)
            for order in ([0, 1], [2, 3, 1], [3]):
                self.ask(host, order, f"documents {order}, with damaged {what}", None)
            usage = host.tier.usage()
            self.say(f"{usage['damaged']} blocks were damaged, and {usage['hits']} were not", None if usage["damaged"] else str(usage))
            self.say("nothing stays held", host.nothing_held())
            host.close()

    def failing(self, folder: Path) -> None:
        host = SlabHost(self.path, folder, read_deadline=0.3, write_deadline=0.5)
        self.ask(host, [1, 0], "before the disk fails", None)
        host.forget()
        os.truncate(folder / FILE, 4096)
        self.ask(host, [1, 0], "the disk fails", None)
        self.say("it says so", None if host.tier.usage()["loads_failed"] else f"{host.tier.usage()}")
        self.ask(host, [2, 0], "computed on a disk that fails", None)
        host.forget()
        hanging = host.tier._slab = host.tier._jobs.slab = Hanging(host.tier._slab)
        began = time.monotonic()
        self.ask(host, [2, 0], "the disk hangs", None)
        self.ask(host, [1, 3], "and hangs", None)
        host.settle()
        took = time.monotonic() - began
        self.say(f"vLLM took {took:.1f} s", None if took < 10 else "too long")
        self.say("nothing stays held", host.nothing_held())
        host.tier._slab = host.tier._jobs.slab = hanging.own
        host.close()

    def aborted(self, folder: Path) -> None:
        """Requests are aborted while their blocks are on the way."""
        host, fault = SlabHost(self.path, folder), None
        for order in ([0, 1], [2, 3, 1]):
            self.ask(host, order, "before", None)
        for steps in range(6):
            host.forget()
            engine, names = host.llm.llm_engine, []
            for order in ([0, 1], [2, 3, 1], [1, 1]):
                prompt, sampling = self.case.prompt(order, "plain", count=20)
                name = f"abort-{steps}-{len(names)}"
                names.append(engine.add_request(name, prompt, sampling) or name)
            for _ in range(steps):
                engine.step()
            engine.abort_request(names, internal=True)
            fault = fault or host.nothing_held()
        self.say("aborted after 0 to 5 steps, nothing stays held", fault)
        host.forget()
        self.ask(host, [2, 3, 1], "afterwards", True)
        host.close()

    def small(self, folder: Path) -> None:
        """The disk has room for fewer blocks than the prompts have."""
        # The least that is allowed.
        limit = 8 * BLOCK * token_bytes(self.model.config, "float32") + (1 << 20)
        host = SlabHost(self.path, folder / "small", limit=limit)
        own = self.case.system
        for number in range(12):
            self.case.system = self.case.text(60)
            self.ask(host, [number % 4, 2], f"more than the disk holds, {number}", False)
        host.settle()
        usage, size = host.tier.usage(), os.path.getsize(folder / "small" / FILE)
        self.say(f"{usage['evicted']} blocks were evicted, the file has {size} of {limit} bytes", None if usage["evicted"] and size <= limit else str(usage))
        host.forget()
        self.ask(host, [11 % 4, 2], "the last prompt", True)
        self.case.system = own
        host.close()

    def survives_a_kill(self, folder: Path) -> None:
        tokens = self.case.prompt([0, 3], "plain")[0]["prompt_token_ids"]
        left = set(Path("/dev/shm").glob("vllm_offload_*.mmap"))
        self.killed(__file__, "the prompt", str(folder / "killed"), tokens)
        # vLLM leaves its host memory behind, as docs/vllm-disk.md says.
        left = set(Path("/dev/shm").glob("vllm_offload_*.mmap")) - left
        self.say("a killed vLLM and a refused one leave their host memory in /dev/shm", None if len(left) == 2 else f"{left}")
        for file in left:
            file.unlink()
        host = SlabHost(self.path, folder / "killed")
        self.ask(host, [0, 3], "after kill -9", True)
        host.close()


def differs(own: type, real: type | None) -> str | None:
    """Returns how a class of the tests differs from vLLM's, or None."""
    if real is None:
        return "vLLM has none"
    if issubclass(own, enum.Enum):
        wrong = [one for one in own if one.name not in real.__members__ or real[one.name].value != one.value]
        return f"{wrong}" if wrong else None
    if dataclasses.is_dataclass(own):
        names = [[field.name for field in dataclasses.fields(one)] for one in (own, real)]
        # vLLM may have more fields, but not in between.
        known = [name for name in names[1] if name in names[0]]
        if known != names[0]:
            return f"{names[0]} and not {names[1]}"
    for name, method in vars(own).items():
        if inspect.isfunction(method) and not name.startswith("__"):
            if list(inspect.signature(method).parameters) != list(inspect.signature(getattr(real, name)).parameters):
                return f"{name}{inspect.signature(getattr(real, name))}"
    return None


def child(path: str, folder: str, tokens: list[int]) -> None:
    host = SlabHost(path, Path(folder))
    store_until_killed(host, tokens, host.tier.usage)


def main() -> None:
    if "--child" in sys.argv:
        return child(sys.argv[1], *json.loads(sys.argv[3]))
    args = arguments(__doc__)
    failures = 0
    for path in args.models:
        print(f"== {path}", flush=True)
        checks = SlabChecks(path)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "disk"
            checks.restarted(folder, args.ranks)
            if args.ranks == 1:
                checks.interface()
                checks.chunked(folder)
                checks.other_weights(folder, Path(temporary) / "other")
                checks.aborted(folder)
                checks.small(folder)
                checks.survives_a_kill(folder)
                checks.damaged(folder)
                checks.failing(folder)
        failures += checks.failures
    if args.ranks == 1:
        # Two ranks bind their threads in another way.
        own = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_OMP_THREADS_BIND"}
        two = subprocess.run([sys.executable, __file__, args.models[0], "--ranks", "2"], env=own, check=False)
        failures += two.returncode != 0
    sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
