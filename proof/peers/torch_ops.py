"""Compares torch on the CPU with our kernels in one run: scatter, gather, attention.

    python3 -m venv .venv && .venv/bin/pip install torch==2.15.0 numpy==2.4.6
    .venv/bin/python proof/peers/torch_ops.py [--write]

Tokens have 8 heads of 128 in bf16, 32 query heads. Slots come from blocks of 16 in random order, in a cache
twice the size. torch's `index_copy_`, `index_select(out=...)` and `scaled_dot_product_attention` work on
contiguous keys and values of one sequence; ours read and write blocks. torch and our benchmark `peer_ops`
alternate, each with a memcpy of the same bytes measured in its own process; the best of all rounds counts.
All data is warm. `--write` writes the table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import common

HEADS, QUERY_HEADS, DIM, BLOCK = 8, 32, 128, 16
OPS = {"scatter": "`index_copy_`", "gather": "`index_select`", "decode": "SDPA, one row", "prefill": "SDPA, causal"}


def memcpy(nbytes: int) -> float:
    src, dst = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return common.best(lambda: dst.copy_(src))


def report(what: str, tokens: int, seconds: float) -> dict:
    nbytes = tokens * 2 * HEADS * DIM * 2
    return common.row(f"{what} {tokens}", nbytes, "bytes", seconds, "memcpy", memcpy(nbytes))


def moves(tokens: int) -> list[dict]:
    torch.manual_seed(1)
    blocks = torch.randperm(2 * tokens // BLOCK)[: tokens // BLOCK]
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    caches = [torch.zeros(2 * tokens, HEADS, DIM, dtype=torch.bfloat16) for _ in "kv"]
    rows = [torch.randn(tokens, HEADS, DIM).bfloat16() for _ in "kv"]

    def scatter():
        for cache, new in zip(caches, rows):
            cache.index_copy_(0, slots, new)

    def gather():
        for cache, out in zip(caches, rows):
            torch.index_select(cache, 0, slots, out=out)

    return [report("scatter", tokens, common.best(scatter)), report("gather", tokens, common.best(gather))]


def attention(what: str, rows: int, tokens: int) -> dict:
    q = torch.randn(1, QUERY_HEADS, rows, DIM).bfloat16()
    k, v = (torch.randn(1, HEADS, tokens, DIM).bfloat16() for _ in "kv")
    seconds = common.best(lambda: sdpa(q, k, v, is_causal=rows > 1, enable_gqa=True))
    return report(what, tokens, seconds)


def theirs(threads: int) -> list[dict]:
    torch.set_num_threads(threads)
    rows = moves(4096)
    rows += [attention("decode", 1, tokens) for tokens in (4096, 16384)]
    rows += [attention("prefill", tokens, tokens) for tokens in (512, 2048)]
    return rows


def faster(all_rows: list[list[dict]]) -> dict[str, dict]:
    """Returns each operation's best row over all rounds, with the best memcpy."""
    best: dict[str, dict] = {}
    for row in (row for rows in all_rows for row in rows):
        old = best.setdefault(row["what"], dict(row))
        for key in ("seconds", "limit_seconds"):
            old[key] = min(old[key], row[key])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each side")
    args = parser.parse_args()
    lines = []
    for threads in (1, 2):
        turns = [
            (common.ours("kvbench", "peer_ops", "--threads", str(threads)), theirs(threads))
            for _ in range(args.rounds)
        ]
        mine, peer = faster([ours for ours, _ in turns]), faster([torchs for _, torchs in turns])
        for what, them in peer.items():
            us = mine[what]
            kernel, tokens = what.split()
            moved = kernel in ("scatter", "gather")
            lines.append([
                f"`{kernel}`, {tokens} tokens", str(threads), f"torch {OPS[kernel]}",
                common.duration(them["seconds"]), common.duration(us["seconds"]),
                f"{them['seconds'] / us['seconds']:.2f}",
                f"{them['limit_seconds'] / them['seconds']:.2f}" if moved else "–",
                f"{us['limit_seconds'] / us['seconds']:.2f}" if moved else "–",
            ])
    head = ["what", "threads", "peer", "its time", "ours", "times as fast", "peer / memcpy", "ours / memcpy"]
    common.show("torch", common.table(head, lines), args.write)


if __name__ == "__main__":
    main()
