"""Checks the disk of the connector inside a real vLLM on a CPU against transformers. Run by the slice `vllm` of `cargo
xtask deep`.

    python check_disk.py MODEL …

vLLM is stopped and started again on the same folder: with other weights, another salt, damaged records, a disk that
hangs, after a reset, after `kill -9`, and on two ranks. Tokens must be the same, and log-probabilities within 1e-3 in
f32.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_connector import BLOCK, Checks, Host, answer, arguments, store_until_killed
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.metrics.reader import Counter, Gauge, Histogram

FILE = "records.kvslab"
ORDERS = [[0, 1, 2], [3, 1], [2, 0]]
SETTINGS = [("alone", "none"), ("with-system", "none"), ("behind:2", "none"), ("alone", "link:1000")]


class DiskHost(Host):
    """vLLM with the connector and a disk, in this process."""

    def __init__(self, path: str, folder: Path, **changes) -> None:
        given = {"host_memory": 32 << 20, "prefix_memory": 8 << 20, "disk_limit": "64MiB", "disk_loads": "always", **changes}
        super().__init__(path, disk_path=str(folder), **given)

    @property
    def disk(self):
        return get_kv_transfer_group()._worker.disk

    def settle(self) -> None:
        """Runs steps until everything is on the disk."""
        engine, until = self.llm.llm_engine, time.monotonic() + 60
        while (self.scheduler.has_requests() or self.disk.is_busy()) and time.monotonic() < until:
            engine.step()
        if not self.disk.slab.flush(deadline=60):
            raise RuntimeError("the disk does not take its records")

    def forget(self) -> None:
        """Empties vLLM's own cache and the host memory, but not the disk."""
        self.settle()
        self.llm.reset_prefix_cache()
        self.side.chunks.cache.clear_cache()
        self.side.prefixes.pool.clear_cached()

    def disk_held(self) -> str | None:
        self.settle()
        side, disk = self.side, self.disk
        if side.asks.under_way or side.asks.sums or disk.reads.fetches or disk.stores or disk.copying:
            return f"{side.asks.under_way}, {side.asks.sums}, {disk.reads.fetches}, {disk.stores}, {disk.copying}"
        return self.nothing_held()


class DiskChecks(Checks):
    def ask(self, host: Host, order: list[int], mode: str, what: str, found: bool | None, recompute: str = "none", **changes) -> dict:
        """Asks a prompt with chunks. The answer must be the reference's, and its chunks must be found or not, if that is
        known."""
        prompt, sampling = self.case.prompt(order, mode, recompute)
        prompt.update(changes)
        (out,) = self.generate(host, (prompt, sampling))
        expected = self.expected(order, mode if recompute == "none" else "plain")
        self.same(f"{what}, documents {order}, {mode}, {recompute}", answer(out), expected)
        said, tokens = out.kv_transfer_params or {}, sum(map(len, self.case.parts(order)))
        if found is not None:
            counts = said.get("chunk_tokens_reused"), said.get("chunk_tokens_computed")
            fault = None if counts[0] == (tokens if found else counts[0]) and (counts[1] == 0) == found else str(said)
            self.say(f"its chunks are {'found' if found else 'computed'}", fault)
        return said

    def plain(self, host: Host, order: list[int], what: str, found: bool | None, **changes) -> None:
        prompt, sampling = self.case.prompt(order, "plain")
        prompt.update(changes)
        (out,) = self.generate(host, (prompt, sampling))
        self.same(f"{what}, an ordinary prompt", answer(out), self.expected(order, "plain"))
        full = (len(out.prompt_token_ids) - 1) // BLOCK * BLOCK if found else 0
        if found is not None:
            self.say(f"{full} of its tokens are found", None if out.num_cached_tokens == full else f"{out.num_cached_tokens}")

    def settings(self) -> list[tuple[str, str]]:
        return [one for one in SETTINGS if one[1] == "none" or not self.windowed]

    def restarted(self, folder: Path, ranks: int) -> None:
        host = DiskHost(self.path, folder, ranks=ranks)
        self.plain(host, [0, 1, 2], "computed", False)
        for mode, recompute in self.settings():
            for order in ORDERS:
                self.ask(host, order, mode, "computed", None, recompute)
        if ranks == 1:
            self.say("nothing stays held", host.disk_held())
        host.close()
        for restart in (1, 2):
            host = DiskHost(self.path, folder, ranks=ranks)
            for mode, recompute in self.settings():
                for order in ORDERS[::-1]:
                    said = self.ask(host, order[::-1], mode, f"after restart {restart}", True, recompute)
                    self.say("no part is missing", str(said) if "chunk_missed" in said else None)
            self.plain(host, [0, 1, 2], f"after restart {restart}", True)
            said = self.ask(host, [0, 1], "alone", "another tenant", None, cache_salt=f"eve-{restart}")
            self.say("learns nothing", None if set(said.get("chunk_missed", {}).values()) == {"new"} else str(said))
            if ranks == 1:
                usage = host.disk.usage()
                self.say(f"{usage['hits']} records were read, none failed", None if usage["hits"] and not usage["damaged"] and not usage["read_errors"] else str(usage))
                self.say("nothing stays held", host.disk_held())
            self.metrics(host)
            host.close()

    def metrics(self, host: DiskHost) -> None:
        prefix = "vllm:kvcache_tier_"
        read = {one.name.removeprefix(prefix): one.value for one in host.llm.get_metrics() if isinstance(one, Counter | Gauge) and one.name.startswith(prefix)}
        self.say(f"vLLM exports {len(read)} metrics of the disk", None if read.get("hits") and read.get("limit_bytes") else str(read))
        times = {one.name.removeprefix(prefix): one.count for one in host.llm.get_metrics() if isinstance(one, Histogram)}
        for what in ("wait", "load"):
            count = times.get(f"{what}_seconds")
            self.say(f"vLLM has measured {count} times of a {what}", None if count else str(times))

    def other_weights(self, folder: Path, other: Path) -> None:
        shutil.copytree(self.path, other)
        host = DiskHost(str(other), folder)
        said = self.ask(host, [0, 1], "alone", "the copy of a model is another model", False)
        self.say("and the answer says so", None if set(said["chunk_missed"].values()) == {"other_model"} else str(said))
        host.close()

    def reset(self, folder: Path) -> None:
        host = DiskHost(self.path, folder / "reset")
        self.ask(host, [0, 1], "alone", "before a reset", False)
        self.plain(host, [0, 1], "before a reset", None)
        host.forget()
        self.ask(host, [1, 0], "alone", "vLLM and host memory have nothing", True)
        host.settle()
        host.llm.reset_prefix_cache(reset_connector=True)
        said = self.ask(host, [0, 1], "alone", "after a reset", False)
        self.say("all parts are new", None if set(said["chunk_missed"].values()) == {"new"} else str(said))
        self.plain(host, [0, 1], "after a reset", False)
        self.say("nothing stays held", host.disk_held())
        host.close()
        host = DiskHost(self.path, folder / "reset")
        self.ask(host, [0, 1], "alone", "after a reset and a restart", False)
        self.plain(host, [0, 1], "after a reset and a restart", False)
        host.close()

    def damaged(self, folder: Path) -> None:
        file, page = folder / FILE, 4096
        contents = file.read_bytes()
        headers = [at for at in range(0, len(contents), page) if contents.startswith(b"KVRECORD", at)]
        with file.open("r+b") as out:
            for at in headers[::2]:
                place = at + 2 * page + 17
                out.seek(place)
                out.write(bytes(byte ^ 8 for byte in contents[place : place + 3]))
        host = DiskHost(self.path, folder)
        for mode, recompute in self.settings():
            for order in ORDERS:
                self.ask(host, order, mode, "with damaged records", None, recompute)
        self.plain(host, [0, 1, 2], "with damaged records", None)
        usage = host.disk.usage()
        self.say(f"{usage['damaged']} records were damaged, and {usage['hits']} were not", None if usage["damaged"] and usage["hits"] else str(usage))
        self.say("nothing stays held", host.disk_held())
        host.close()

    def hanging(self, folder: Path) -> None:
        host = DiskHost(self.path, folder, disk_deadline=0.3)
        own = dict(host.disk.blocks)
        host.disk.blocks.update({of_prefix: Hanging(blocks) for of_prefix, blocks in own.items()})
        began = time.monotonic()
        said = self.ask(host, [0, 1], "alone", "the disk hangs", False)
        self.say("the answer says so", None if set(said["chunk_missed"].values()) == {"deadline"} else str(said))
        self.plain(host, [2, 3, 1], "the disk hangs", None)
        took = time.monotonic() - began
        self.say(f"vLLM took {took:.1f} s", None if took < 10 else "too long")
        host.disk.blocks.update(own)
        self.say("nothing stays held", host.disk_held())
        host.close()

    def aborted(self, folder: Path) -> None:
        """Requests are aborted while the disk is asked."""
        host, fault = DiskHost(self.path, folder), None
        for steps in range(7):
            host.forget()
            engine, names = host.llm.llm_engine, []
            for mode, order in (("alone", [0, 1]), ("with-system", [2, 3]), ("plain", [0, 1, 2])):
                prompt, sampling = self.case.prompt(order, mode, count=20)
                name = f"abort-{steps}-{len(names)}"
                names.append(engine.add_request(name, prompt, sampling) or name)
            for _ in range(steps):
                engine.step()
            engine.abort_request(names, internal=True)
            fault = fault or host.disk_held()
        self.say("aborted after 0 to 6 steps, nothing stays held", fault)
        host.forget()
        self.ask(host, [2, 1], "alone", "afterwards", True)
        host.close()

    def survives_a_kill(self, folder: Path) -> None:
        prompt, _ = self.case.prompt([0, 3], "alone")
        lengths = [len(part) for part in self.case.parts([0, 3])]
        self.killed(__file__, "the documents", str(folder / "killed"), prompt["prompt_token_ids"], lengths)
        host = DiskHost(self.path, folder / "killed")
        self.ask(host, [3, 0], "alone", "after kill -9", True)
        host.close()


class Hanging:
    """Records whose disk has stopped to answer."""

    is_over, progress = False, 0.0

    def __init__(self, own) -> None:
        self.own = own

    def __getattr__(self, name: str):
        return getattr(self.own, name)

    def begin_load(self, *_):
        return self

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def give_up(self) -> None:
        return


def child(path: str, folder: str, tokens: list[int], lengths: list[int]) -> None:
    host = DiskHost(path, Path(folder))
    store_until_killed(host, tokens, host.disk.usage, extra_args={"kv_transfer_params": {"chunk_lengths": lengths}})


def main() -> None:
    if "--child" in sys.argv:
        return child(sys.argv[1], *json.loads(sys.argv[3]))
    args = arguments(__doc__)
    failures = 0
    for path in args.models:
        print(f"== {path}", flush=True)
        checks = DiskChecks(path)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "disk"
            checks.restarted(folder, args.ranks)
            if args.ranks == 1:
                checks.other_weights(folder, Path(temporary) / "other")
                checks.reset(folder)
                checks.aborted(folder)
                checks.survives_a_kill(folder)
                checks.hanging(folder)
                checks.damaged(folder)
        failures += checks.failures
    if args.ranks == 1:
        # Two ranks bind their threads in another way.
        own = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_OMP_THREADS_BIND"}
        two = subprocess.run([sys.executable, __file__, args.models[0], "--ranks", "2"], env=own, check=False)
        failures += two.returncode != 0
    sys.exit(f"{failures} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
