"""Measures the time to first token inside vLLM on a CPU with a throttled disk, compared with computing.

    python bench_throttled.py MODEL [--speeds 10,50,200] [--processes 3] [--folder FOLDER] [--json FILE]

A process stores a prompt of documents, and one computes it without a disk. For each speed in MB/s, another process finds what
is stored while the kernel throttles its use of the disk (a control group, which needs root). At the slowest speed, one more process
computes the prompt and stores it in an empty folder. This is done with the disk of
`ChunkConnector`, for chunks and ordinary prompts, and with `SlabTier` below vLLM's own offloading. The first request of each
kind counts, and a later one, both with vLLM's own cache and the host memory empty. The median over several processes may take
at most 1.1 times as long as the same request without a disk: the first one of a process, or a later one. Processes of all kinds
take turns, because the speed of a machine that others use changes with time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_disk import QUESTION, SYSTEM, forget
from bench_tiers import LIMIT, Host, Row

MOST = 1.1
STORING = "storing"
ROUNDS = {"stored": 1, "computed": 3, STORING: 1}
"""How often each kind of prompt is asked in a process. Those with a throttled disk ask twice."""
GROUPS = Path("/sys/fs/cgroup")
SYSTEMS = {"ChunkConnector": ("chunks", "ordinary prompt"), "SlabTier": ("SlabTier",)}
"""The kinds of prompts that each system finds."""


class Throttle:
    """A control group whose processes read and write a folder's disk at a limited speed."""

    def __init__(self, folder: Path) -> None:
        device = os.stat(folder).st_dev
        place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
        # Only whole disks can be throttled.
        whole = place.parent if (place / "partition").exists() else place
        self.device = (whole / "dev").read_text().strip()
        self.old = (GROUPS / "blkio").is_dir()
        self.group = (GROUPS / "blkio" if self.old else GROUPS) / f"bench-throttled-{os.getpid()}"
        try:
            if not self.old:
                (GROUPS / "cgroup.subtree_control").write_text("+io")
            self.group.mkdir()
        except OSError as error:
            raise SystemExit(f"the disk cannot be throttled ({error}): run this as root, where control groups limit the use of a disk") from error

    def limit(self, bytes_per_second: int) -> None:
        if self.old:
            for way in ("read", "write"):
                (self.group / f"blkio.throttle.{way}_bps_device").write_text(f"{self.device} {bytes_per_second}")
        else:
            (self.group / "io.max").write_text(f"{self.device} rbps={bytes_per_second} wbps={bytes_per_second}")

    def close(self) -> None:
        self.group.rmdir()


def connector_of(args: argparse.Namespace) -> Row:
    """Returns the connector of a process."""
    if args.system == "ChunkConnector":
        disk = {} if args.row == "computed" else {"disk_path": args.folder, "disk_limit": LIMIT}
        return Row("ChunkConnector", "kvcache.vllm", {"host_memory": "512MiB", "prefix_memory": "512MiB", **disk})
    if args.row == "computed":
        return Row()
    tier = {"type": "SlabTier", "module_path": "kvcache.vllm", "path": args.folder, "limit": LIMIT}
    spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "kvcache.vllm", "cpu_bytes_to_use": 512 << 20}
    return Row("OffloadingConnector", None, {**spec, "secondary_tiers": [tier]})


def empty(host: Host, system: str) -> None:
    """Empties vLLM's own cache and the host memory."""
    if system == "ChunkConnector":
        forget(host.llm)
        host.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.prefixes.pool.clear_cached()
    else:
        for _ in range(20):
            host.settle()
        assert host.llm.reset_prefix_cache(reset_connector=host.row.connector is not None)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures one process: without a disk, storing, or finding what is stored in the control group ``args.group``."""
    host = Host(args.model, connector_of(args), [])
    draw = random.Random(1)

    def text(count: int) -> list[int]:
        return [draw.randrange(5, 40_000) for _ in range(count)]

    parts = [text(SYSTEM), *(text(args.tokens) for _ in range(args.documents))]
    host.ask([text(64)])
    if args.group:
        # The model has been read.
        (Path(args.group) / "cgroup.procs").write_text(str(os.getpid()))
    kinds = SYSTEMS[args.system]
    found: dict[str, Any] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS.get(args.row, 2)):
        for kind in kinds:
            empty(host, args.system)
            before = host.written()
            seconds, out = host.ask([*parts, text(QUESTION)], has_chunks=kind == "chunks")
            found[kind].append((seconds, out.num_cached_tokens or 0))
            if args.row == "stored":
                host.until_stored(before)
    host.close()
    return found


def run(system: str, row: str, folder: Path, args: argparse.Namespace, group: Path | None = None) -> dict[str, Any]:
    """Measures one process."""
    command = [sys.executable, __file__, args.model, "--documents", str(args.documents), "--tokens", str(args.tokens)]
    command += ["--system", system, "--row", row, "--folder", str(folder / system), *(["--group", str(group)] if group else [])]
    print(f"{system}: {row}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if done.returncode or not lines:
        raise SystemExit(f"{row}: vLLM ended with status {done.returncode}")
    return json.loads(lines[-1][4:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--speeds", default="10,50,200", help="MB/s, with commas between them")
    parser.add_argument("--processes", type=int, default=3, help="processes per speed, and without a disk")
    parser.add_argument("--folder", help="the folder below which records are stored; a temporary one by default")
    parser.add_argument("--json", help="a file for all results")
    parser.add_argument("--only", choices=SYSTEMS, help="the system that is measured; all by default")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row is not None:
        print("ROW " + json.dumps(measure(args)), flush=True)
        return
    speeds = args.speeds.split(",")
    slowest = min(speeds, key=float)
    systems = [system for system in SYSTEMS if args.only in (None, system)]
    all_rows = ("computed", *speeds, STORING)
    found: dict[str, dict[str, list[Any]]] = {row: {kind: [] for system in systems for kind in SYSTEMS[system]} for row in all_rows}

    def measured(row: str, system: str, group: Path | None = None) -> None:
        place = Path(folder, f"{STORING}-{len(found[row][SYSTEMS[system][0]])}") if row == STORING else Path(folder)
        one = run(system, row if group is None or row == STORING else f"a disk of {row} MB/s", place, args, group)
        if row == STORING:
            assert all(count == 0 for asked in one.values() for _, count in asked), one
            assert any((place / system).iterdir()), "nothing was stored"
            shutil.rmtree(place)
        for kind, asked in one.items():
            found[row][kind].append(asked)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        throttle = Throttle(Path(folder))
        try:
            for system in systems:
                run(system, "stored", Path(folder), args)
            for _ in range(args.processes):
                for system in systems:
                    measured("computed", system)
                    for speed in speeds:
                        throttle.limit(int(float(speed) * 1e6))
                        measured(speed, system, throttle.group)
                    throttle.limit(int(float(slowest) * 1e6))
                    measured(STORING, system, throttle.group)
                if args.json:
                    Path(args.json).write_text(json.dumps({"model": args.model, "rows": found}, indent=1))
        finally:
            throttle.close()
    slow = []
    print("| disk | prompt | first: found | first token | | later: found | first token | |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in found["computed"]:
        computed = medians(found["computed"][kind])
        print(f"| none | {kind} | {' | '.join(f'– | {seconds:.2f} s | 1.00' for _, seconds in computed)} |")
        for speed in speeds:
            rows = [(count, seconds, seconds / alone) for (count, seconds), (_, alone) in zip(medians(found[speed][kind]), computed, strict=True)]
            print(f"| {speed} MB/s | {kind} | {' | '.join(f'{count} | {seconds:.2f} s | {ratio:.2f}' for count, seconds, ratio in rows)} |")
            slow += [f"{kind} at {speed} MB/s: {ratio:.2f}" for _, _, ratio in rows if ratio > MOST]
        storing = statistics.median(process[0][0] for process in found[STORING][kind])
        ratio = storing / computed[0][1]
        print(f"| {slowest} MB/s, empty | {kind} | – | {storing:.2f} s | {ratio:.2f} | | | |")
        slow += [f"{kind} stored at {slowest} MB/s: {ratio:.2f}"] if ratio > MOST else []
    if slow:
        raise SystemExit(f"slower than {MOST} times computing: {slow}")


def medians(processes: list[Any]) -> list[tuple[int, float]]:
    """Returns the tokens that were found and the seconds, of the first request of a process and of the later ones."""
    asked = [[process[0] for process in processes], [one for process in processes for one in process[1:]]]
    return [(round(statistics.median(count for _, count in some)), statistics.median(seconds for seconds, _ in some)) for some in asked]


if __name__ == "__main__":
    main()
