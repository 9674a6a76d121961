"""Compares the disks below vLLM on a CPU: how soon an answer begins after a restart, what was found, and what was written.

    python bench_tiers.py MODEL [--documents 5] [--tokens 512] [--restarts 3] [--json FILE]

Rows are vLLM without a connector, vLLM's own file tier and `SlabTier` (both below vLLM's host memory, which
`CpuTieringSpec` copies on a CPU), the connector's disk for ordinary prompts and for chunks, and LMCache's server with its
backend `raw_block`, if it is installed. A process stores a prompt of documents. After
each restart, with vLLM's memory and the page cache cold, another process asks for the documents again, with a new question:
first in the same order, then in another one. For chunks, both orders are other ones. Answers of eight tokens must equal those
of a full prefill, and for chunks those before the restart. The best of all restarts counts, and of as many processes without a disk; for ordinary prompts in another order, the first one.

`stored` is the time from the first token until the last byte is written. The last row is the time in which eight threads read
the bytes of `SlabTier`'s records from the same disk, directly and into memory that they use again: the least that any disk tier
could take. LMCache's server is restarted as well. LMCache 0.5.6
runs without CUDA after `pip install --no-deps lmcache==0.5.6 lmcache-rust-raw-block-io==0.5.7rc2 aiofile caio aiofiles awscrt
nvtx redis sortedcontainers opentelemetry-exporter-prometheus==0.60b1 grpcio-observability==1.78.0` in vLLM's environment.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import mmap
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import psutil
from bench_disk import ANSWER, QUESTION, SYSTEM, forget
from bench_prefix import BLOCK, ENGINE, hide_llvmlite, server

FULL, FILES, SLAB = "no disk (full prefill)", "vLLM's file tier", "SlabTier"
DIRECT = "direct reads of the same bytes"
PROMPTS, CHUNKS, RAW = "the connector's disk, ordinary prompts", "the connector's disk, chunks", "LMCache's server, raw_block"
PAIRS = [(own, peer) for own in (SLAB, PROMPTS, CHUNKS) for peer in (FILES, RAW)]
"""Rows of ours, each with a row that it is compared with."""
LMCACHE_CHUNK = 256
"""The tokens of a record of LMCache, which is its default."""
HEADER = 4096
LIMIT = 2 << 30
QUIET = 1.5
"""The number of seconds without a write after which everything is stored."""
LEAST = 64 << 10
"""The number of bytes that is more than a log writes."""


@dataclass(frozen=True)
class Row:
    """A disk below vLLM."""

    connector: str | None = None
    module: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    has_chunks: bool = False
    adapter: dict[str, Any] | None = None
    """The disk of LMCache's server."""


def rows(folder: Path, token_bytes: int) -> dict[str, Row]:
    """Returns the rows that run in this environment, with their files in a folder."""

    def offloading(tier: dict[str, Any]) -> Row:
        extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvcache.vllm", "cpu_bytes_to_use": 512 << 20}
        return Row("OffloadingConnector", None, {**extra, "secondary_tiers": [tier]})

    def own(has_chunks: bool) -> Row:
        memory = {"host_memory": "512MiB"} if has_chunks else {"host_memory": "64MiB", "prefix_memory": "512MiB"}
        return Row("ChunkConnector", "kvcache.vllm", {**memory, "disk_path": str(folder), "disk_limit": LIMIT}, has_chunks)

    made = {
        FULL: Row(),
        FILES: offloading({"type": "fs", "root_dir": str(folder)}),
        SLAB: offloading({"type": "SlabTier", "module_path": "kvcache.vllm", "path": str(folder), "limit": LIMIT}),
        PROMPTS: own(False),
        CHUNKS: own(True),
    }
    if not importlib.util.find_spec("lmcache_rust_raw_block_io"):
        return made
    slot = -(-(LMCACHE_CHUNK * token_bytes + HEADER) // HEADER) * HEADER
    raw = {"type": "raw_block", "device_path": str(folder / "raw"), "slot_bytes": slot, "io_engine": "io_uring"}
    return {**made, RAW: Row("LMCacheMPConnector", None, {"lmcache.mp.mp_transfer_mode": "engine_driven"}, adapter=raw)}


class Host:
    """vLLM with a disk, in this process."""

    def __init__(self, model: str, row: Row, pids: list[int]) -> None:
        hide_llvmlite()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        config = None
        if row.connector is not None:
            named = {"kv_connector": row.connector, "kv_connector_module_path": row.module, "kv_role": "kv_both"}
            config = KVTransferConfig(**named, kv_connector_extra_config=row.extra)
        self.row, self.pids = row, pids
        self.llm = LLM(model=model, seed=0, **ENGINE, kv_transfer_config=config)

    def ask(self, parts: list[list[int]], count: int = 1, *, has_chunks: bool = False) -> tuple[float, Any]:
        """Asks a prompt, and returns the time to the answer."""
        from vllm import SamplingParams

        chunked = {"kv_transfer_params": {"chunk_lengths": [len(part) for part in parts[:-1]]}} if has_chunks else None
        sampling = SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, ignore_eos=True, extra_args=chunked)
        tokens = [token for part in parts for token in part]
        began = time.perf_counter()
        (out,) = self.llm.generate([{"prompt_token_ids": tokens}], [sampling], use_tqdm=False)
        return time.perf_counter() - began, out

    def settle(self) -> None:
        """Runs a step if there is something to do, as a server does between requests."""
        core = self.llm.llm_engine.engine_core.engine_core
        if core.scheduler.has_requests():
            self.llm.llm_engine.step()
        time.sleep(0.002)

    def written(self) -> int:
        """Returns the number of bytes that this process and LMCache's server have written."""
        own = [psutil.Process(pid) for pid in [os.getpid(), *self.pids]]
        return sum(one.io_counters().write_bytes for process in own for one in [process, *process.children(recursive=True)])

    def until_stored(self, before: int) -> tuple[float, int]:
        """Waits until nothing is written any more. Returns the time of the last write, and the bytes since ``before``."""
        answered = changed = time.perf_counter()
        last = before
        while time.perf_counter() - changed < QUIET:
            self.settle()
            if (now := self.written()) - last >= LEAST:
                last, changed = now, time.perf_counter()
        return changed - answered, last - before

    def forget(self) -> None:
        """Empties the memory in which the connector has what was asked before."""
        if self.row.has_chunks:
            forget(self.llm)
        elif self.row.connector is None:
            self.llm.reset_prefix_cache()

    def close(self) -> None:
        for _ in range(20):
            self.settle()
        self.llm.llm_engine.engine_core.shutdown()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures one row in this process: what is computed and stored, or what a restart finds."""
    row = rows(Path(args.folder), token_bytes_of(args.model))[args.row]
    if row.adapter is not None:
        row.extra.update({"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": args.port})
    host = Host(args.model, row, [args.server] if args.server else [])
    draw = random.Random(1)

    def text(count: int) -> list[int]:
        return [draw.randrange(5, 40_000) for _ in range(count)]

    system, documents = text(SYSTEM), [text(args.tokens) for _ in range(args.documents)]
    questions, warm = [text(QUESTION) for _ in range(3)], text(64)
    orders = [list(range(args.documents)), draw.sample(range(args.documents), args.documents), draw.sample(range(args.documents), args.documents)]

    def prompt(order: int, question: int) -> list[list[int]]:
        return [system, *(documents[number] for number in orders[order]), questions[question]]

    # Chunks are asked in another order each time.
    asked = {"again": prompt(1 if row.has_chunks else 0, 1), "other": prompt(2, 2)}
    host.ask([warm])
    found: dict[str, Any] = {"answers": {}}
    if args.stores:
        before = host.written()
        found["seconds"], _ = host.ask(prompt(0, 0), has_chunks=row.has_chunks)
        found["stored"], found["written"] = host.until_stored(before)
    # What is asked now is stored, too, so an ordinary prompt in another order would be found after the restart.
    for name, parts in asked.items() if row.has_chunks or not args.stores else ():
        if not args.stores:
            host.forget()
            seconds, out = host.ask(parts, has_chunks=row.has_chunks)
            found[name], found[f"{name}_tokens"] = seconds, out.num_cached_tokens or 0
        _, out = host.ask(parts, ANSWER, has_chunks=row.has_chunks)
        found["answers"][name] = list(out.outputs[0].token_ids)
    host.close()
    return found


def token_bytes_of(model: str) -> int:
    """Returns the number of bytes of a token's keys and values in f32."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * width * 4


def on_disk(folder: Path) -> int:
    """Returns the number of bytes that the files in a folder occupy."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def drop_pages(folder: Path) -> None:
    """Removes files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def direct(file: Path, size: int) -> float:
    """Returns the number of seconds in which eight threads read this many bytes of a file, directly."""
    piece, threads = 2 << 20, 8
    own = os.open(file, os.O_RDONLY | os.O_DIRECT)
    offsets = queue.SimpleQueue[int]()
    for offset in range(0, min(size, file.stat().st_size), piece):
        offsets.put(offset)

    def read(memory: mmap.mmap) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                os.preadv(own, [memory], offsets.get_nowait())

    memories = [mmap.mmap(-1, piece) for _ in range(threads)]
    for memory in memories:
        memory.write(bytes(piece))
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, memories))
    seconds = time.perf_counter() - began
    os.close(own)
    return seconds


def run(name: str, row: Row, folder: Path, args: argparse.Namespace, *, stores: bool) -> dict[str, Any]:
    """Measures one row in a new process, with a new server if it has one."""
    command = [sys.executable, __file__, args.model, "--documents", str(args.documents), "--tokens", str(args.tokens)]
    command += ["--row", name, "--folder", str(folder), *(["--stores"] if stores else [])]
    running = None
    if row.adapter is not None:
        running, port = server(LMCACHE_CHUNK, "--l2-adapter", json.dumps(row.adapter))
        command += ["--server", str(running.pid), "--port", str(port)]
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    finally:
        if running is not None:
            running.send_signal(signal.SIGINT)
            running.wait(60)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not lines:
        raise SystemExit(f"{name}: vLLM ended with status {done.returncode}")
    return json.loads(lines[-1][4:])


def compare(name: str, row: Row, args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measures a row before and after restarts."""
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        row = rows(folder, token_bytes_of(args.model))[name]
        if row.adapter is not None:
            with open(row.adapter["device_path"], "wb") as file:
                file.truncate(LIMIT)
        found: dict[str, Any] = {}
        if row.connector is not None:
            progress(f"{name}: stores")
            found = run(name, row, folder, args, stores=True)
            found["disk"] = on_disk(folder)
        for number in range(args.restarts):
            progress(f"{name}: asks, {number + 1}")
            drop_pages(folder)
            one = run(name, row, folder, args, stores=False)
            found["answers"] = found.get("answers") or one["answers"]
            if one["answers"] != found["answers"]:
                found["wrong"] = f"{one['answers']} and {found['answers']}"
            if name == SLAB:
                found["direct"] = min(found.get("direct", 1e9), direct(folder / "records.kvslab", found["written"]))
            # An ordinary prompt in another order is stored now, and would be found after the next restart.
            for which in ("again", "other") if number == 0 or row.has_chunks or row.connector is None else ("again",):
                found[which] = min(found.get(which, one[which]), one[which])
                found[f"{which}_tokens"] = min(found.get(f"{which}_tokens", 1 << 60), one[f"{which}_tokens"])
    return found


def table(found: dict[str, dict[str, Any]], tokens: int) -> list[str]:
    """Returns the table, in Markdown."""
    full = min(found[FULL]["again"], found[FULL]["other"])
    lines = [
        f"| disk | same order: found of {tokens} tokens | first token | other order: found | first token | stored after | written |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        times = [f"{one[which + '_tokens']} | {one[which]:.2f} s ({full / one[which]:.1f} ×)" for which in ("again", "other")]
        if name == CHUNKS:
            times[0] = f"(another order) {times[0]}"
        stored = f"{one['stored']:.2f} s | {one['written'] / (1 << 20):.0f} MiB" if "stored" in one else "– | –"
        lines.append(f"| {name} | {' | '.join(times)} | {stored} |")
    if (slab := found.get(SLAB)) is not None:
        lines.append(f"| {DIRECT} | – | {slab['direct']:.2f} s | – | – | – | {slab['written'] / (1 << 20):.0f} MiB |")
    return lines


def ratios(found: dict[str, dict[str, Any]]) -> list[str]:
    """Returns how many times as fast each of our rows is as its peers."""
    pairs = [pair for pair in PAIRS if set(pair) <= found.keys()]
    return [f"{own} against {peer}: {found[peer]['again'] / found[own]['again']:.2f} times as fast after a restart" for own, peer in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--folder", help="the folder below which records are stored; a temporary one by default")
    parser.add_argument("--only", action="append", help="a row that is measured besides the full prefill; all by default")
    parser.add_argument("--json", help="a file for all results")
    for hidden in ("--row", "--port", "--server"):
        parser.add_argument(hidden, type=str if hidden == "--row" else int, help=argparse.SUPPRESS)
    parser.add_argument("--stores", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print("ROW " + json.dumps(measure(args)), flush=True)
        return
    found: dict[str, dict[str, Any]] = {}
    tokens = SYSTEM + args.documents * args.tokens + QUESTION
    listed = rows(Path(), token_bytes_of(args.model))
    if RAW not in listed:
        print("LMCache is not installed here, so its row is left out", file=sys.stderr)
    for name, row in listed.items():
        if name == FULL or not args.only or name in args.only:
            found[name] = compare(name, row, args, lambda text: print(text, file=sys.stderr, flush=True))
            if args.json:
                Path(args.json).write_text(json.dumps({"model": args.model, "tokens": tokens, "rows": found}, indent=1))
    print("\n".join([*table(found, tokens), "", *ratios(found)]))
    wrong = [name for name, one in found.items() if "wrong" in one or (name != CHUNKS and one["answers"] != found[FULL]["answers"])]
    whole = (tokens - 1) // BLOCK * BLOCK
    least = {SLAB: whole, PROMPTS: whole, CHUNKS: tokens - QUESTION}
    missed = [name for name, count in least.items() if name in found and found[name]["again_tokens"] < count]
    if wrong or missed:
        raise SystemExit(f"other answers: {wrong}; not found: {missed}")


if __name__ == "__main__":
    main()
