"""Shared by the comparisons on the published model: the measured cases, our times, and the table rows."""

from __future__ import annotations

import pathlib

import common

# The number of tokens in the cache before rows and answers, and the number of tokens in an answer.
CONTEXT, DECODE = 512, 64
PREFILL, ROWS = [500, 2000, 6000], [1, 2, 4, 8, 16, 32, 64]
# Rows that compare our engine with itself, and their limits.
LIMITS = {
    "all chunks hit": ("documents found", "the question alone after the same KV"),
    "load": ("loading the model", "read of the file"),
}

# Seconds by name and size. For decoding, seconds per token.
Times = list[tuple[tuple[str, int], float]]


def listed(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def ours(model: pathlib.Path, kv: str) -> Times:
    args = ["--context", str(CONTEXT), "--prefill", listed(PREFILL), "--rows", listed(ROWS), "--decode", str(DECODE), "--kv", kv]
    rows = common.ours("kvlab", "peer_model", "--model", str(model), *args, "--chunks")
    return [((row["what"], row["size"]), row["seconds"]) for row in rows]


def keep_best(best: dict, rows: Times) -> None:
    for name, seconds in rows:
        best[name] = min(seconds, best.get(name, float("inf")))


def lines(kind: str, us: dict, them: dict) -> list[list[str]]:
    """Returns table rows: the weights, the case, the peer's time, our time, and the ratio."""
    names = {"load": "loading the model", "prefill": "prefill, {} tokens", "rows": "pass, rows: {}", "decode": "decode, a token of {}"}
    row = lambda what, theirs, of_theirs, ours: [  # noqa: E731
        kind, what, common.duration(theirs) + of_theirs, common.duration(ours), f"{theirs / ours:.2f}"
    ]
    table = [row(names[what].format(size), seconds, "", us[what, size]) for (what, size), seconds in them.items()]
    for (what, size), seconds in us.items():
        if what in LIMITS:
            name, limit = LIMITS[what]
            table.append(row(f"{name}, against {limit}", us[limit, size], " (ours)", seconds))
    return table
