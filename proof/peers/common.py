"""Shared by the comparisons with peers: runs our benchmarks, times work, and writes the tables in
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def best(work, repetitions: int = 3) -> float:
    """Returns the seconds that the best run took, after a warm-up run."""
    work()
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def ours(package: str, bench: str, *args: str) -> list[dict]:
    """Returns the rows that one of our benchmarks prints."""
    command = ["cargo", "bench", "--quiet", "-p", package, "--bench", bench, "--", *args]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def row(what: str, size: int, unit: str, seconds: float, limit: str, limit_seconds: float) -> dict:
    """Prints a row in our benchmarks' format, and returns it."""
    line = {
        "what": what, "size": size, "unit": unit, "seconds": seconds,
        "limit": limit, "limit_seconds": limit_seconds, "ratio": limit_seconds / seconds,
    }
    print(json.dumps(line), flush=True)
    return line


def duration(seconds: float) -> str:
    for unit, scale in [("s", 1.0), ("ms", 1e3), ("µs", 1e6)]:
        if seconds * scale >= 1:
            return f"{seconds * scale:.2f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def show(name: str, text: str, write: bool) -> None:
    """Prints a table. On request, also puts it between the markers of `name` in docs/benchmarks.md."""
    print(text)
    if not write:
        return
    path = ROOT / "docs/benchmarks.md"
    before, rest = path.read_text().split(f"<!-- peer: {name} -->")
    _, after = rest.split("<!-- end of peer -->", 1)
    path.write_text(f"{before}<!-- peer: {name} -->\n\n{text}\n<!-- end of peer -->{after}")
    print("written to docs/benchmarks.md")
