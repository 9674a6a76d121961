"""Compares how fast the connector saves records of 2 MiB from host memory to its disk, and loads them into host memory, with
plain direct writes and reads of the same bytes on the same disk.

    python bench_store.py [--mib 128] [--turns 9] [--folder FOLDER] [--json FILE]

No model runs, but the records take the way that they take inside vLLM: a save ends when the records are on the disk, and a load
when the blocks in host memory are filled and the scheduler side could be told. The times include all copies, digests and
checkpoints. The plain program has 16 threads, one for each request of 512 KiB under way, as the connector's disk has at most.
The medians of all turns count, because the speed of a disk that others use changes from turn to turn.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcache import Arena
from kvcache._native import Slab, SlabBlocks
from kvcache.vllm.disk.epoch import Epoch
from kvcache.vllm.disk.store import DiskStore
from kvcache.vllm.orders import Fetch, Record

RECORD, REQUEST, THREADS = 2 << 20, 512 << 10, 16
TARGET = 0.85
PATIENCE = 60.0
BLOCK = 16


class Plain:
    """A file that is read and written without a slab, and without the page cache."""

    def __init__(self, path: Path, size: int) -> None:
        self.file, self.size = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT), size
        os.posix_fallocate(self.file, 0, size)
        # The memory is there before the clock starts, and in large pages, as that of a slab is.
        memory = mmap.mmap(-1, THREADS * REQUEST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.write(b"x" * len(memory))
        self.memory = [memoryview(memory)[start : start + REQUEST] for start in range(0, len(memory), REQUEST)]

    def _run(self, serve: Callable[[memoryview, int], int]) -> float:
        offsets, taking = iter(range(0, self.size, REQUEST)), threading.Lock()

        def work(memory: memoryview) -> None:
            while True:
                with taking:
                    offset = next(offsets, None)
                if offset is None:
                    return
                if serve(memory, offset) != REQUEST:
                    raise OSError("a short read or write")

        threads = [threading.Thread(target=work, args=(memory,)) for memory in self.memory]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def write(self) -> float:
        written = self._run(lambda memory, offset: os.pwritev(self.file, [memory], offset))
        began = time.perf_counter()
        os.fdatasync(self.file)
        return written + time.perf_counter() - began

    def read(self) -> float:
        return self._run(lambda memory, offset: os.preadv(self.file, [memory], offset))


class Connector:
    """The connector's disk, and its blocks in host memory."""

    def __init__(self, folder: str, count: int) -> None:
        arena = Arena(num_layers=16, num_blocks=count, block_size=BLOCK, num_heads=8, head_dim=128, dtype_name="float32", memory="host")
        assert arena.block_bytes == RECORD
        self.count = count
        slab = Slab(folder, "bench", limit=4 * count * RECORD + (32 << 20), row_bytes=RECORD)
        self.store = DiskStore(slab, {False: SlabBlocks(slab, [arena])}, Epoch(folder, "bench"), deadline=PATIENCE, only_faster=False)

    def records(self, turn: int) -> list[Record]:
        return [Record(b"%d-%d" % (turn, block), [turn] * BLOCK, block * BLOCK, [block]) for block in range(self.count)]

    def save(self, turn: int) -> float:
        records, began = self.records(turn), time.perf_counter()
        self.store.store(records)
        while self.store.is_busy():
            time.sleep(0.0005)
        if not self.store.slab.flush(deadline=PATIENCE):
            raise RuntimeError("the disk does not take its records")
        return time.perf_counter() - began

    def load(self, turn: int) -> float:
        records, began, left = self.records(turn), time.perf_counter(), self.count
        self.store.fetch([Fetch("load", records)])
        while left:
            for answers in self.store.take_answers(0.01).values():
                failed = {reason for _, reason in answers.values()} - {None}
                if failed:
                    raise RuntimeError(f"records were not loaded: {failed}")
                left -= len(answers)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--folder", help="the folder below which records are stored; a temporary one by default")
    parser.add_argument("--json", help="a file for all results")
    args = parser.parse_args()
    count = max(1, args.mib * (1 << 20) // RECORD)
    size = count * RECORD
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        plain, connector = Plain(Path(folder) / "plain", size), Connector(folder, count)
        # The first turns write to places that were never written.
        plain.write()
        for turn in range(4):
            connector.save(turn)
        turns = range(4, 4 + args.turns)
        times = [(connector.save(turn), plain.write(), connector.load(turn), plain.read()) for turn in turns]
        connector.store.close(PATIENCE)
    saved, written, loaded, read = map(statistics.median, zip(*times))
    found = {}
    print("| connector | time | bytes/s | peer | its time | ratio |")
    print("|---|---|---|---|---|---|")
    for what, own, peer, other in (("save", saved, "direct writes", written), ("load", loaded, "direct reads", read)):
        found[what] = {"seconds": own, "peer_seconds": other, "ratio": other / own}
        print(f"| {what} records of 2 MiB, {args.mib} MiB | {own * 1e3:.0f} ms | {size / own / 1e9:.2f} GB/s | {peer} | {other * 1e3:.0f} ms | {other / own:.2f} |")
    if args.json:
        Path(args.json).write_text(json.dumps({"bytes": size, "rows": found}, indent=1))
    slow = [what for what, one in found.items() if one["ratio"] < TARGET]
    if slow:
        raise SystemExit(f"below {TARGET} of direct I/O: {slow}")


if __name__ == "__main__":
    main()
