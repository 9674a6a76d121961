"""Compares Hugging Face caches with our scatter in one run: the time to append one token in one layer.

    python3 -m venv .venv && .venv/bin/pip install torch==2.15.0 transformers==5.23.0 numpy==2.4.6
    .venv/bin/python proof/peers/hf_cache.py [--write]

Keys and values have 8 heads of 128 in bf16. `DynamicCache` grows by concatenation, and `StaticCache` copies
into a buffer of the full length; ours scatters into blocks of 16 (benchmark `peer_ops`), with the slot from
the sequence's table. Each is measured after a context, with one thread. `--write` writes the table to
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

import common

HEADS, DIM = 8, 128
CONTEXTS = (1024, 4096, 16384)
STEPS = 32


def config(length: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=HEADS, head_dim=DIM,
        hidden_size=32 * DIM, max_position_embeddings=length,
    )


def append(cache, context: int) -> float:
    """Returns the median seconds per token over `STEPS` tokens, appended one by one."""
    rows = lambda n: torch.randn(1, HEADS, n, DIM).bfloat16()  # noqa: E731
    k, v = rows(1), rows(1)
    cache.update(rows(context), rows(context), 0)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        cache.update(k, v, 0)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = common.ours("kvbench", "peer_ops", "--only", "append")
    mine = {row["what"]: row["seconds"] for row in rows}
    lines = []
    for context in CONTEXTS:
        us = mine[f"append {context}"]
        caches = {
            "DynamicCache": DynamicCache(),
            "StaticCache": StaticCache(config=config(context + STEPS), max_cache_len=context + STEPS),
        }
        for name, cache in caches.items():
            seconds = append(cache, context)
            common.row(f"{name}, append one", context, "tokens", seconds, "our scatter", us)
            lines.append([
                str(context), f"`{name}.update`", common.duration(seconds), common.duration(us),
                f"{seconds / us:.1f}",
            ])
    head = ["tokens there", "peer", "its time a token", "ours", "times as fast"]
    common.show("hugging face", common.table(head, lines), args.write)


if __name__ == "__main__":
    main()
