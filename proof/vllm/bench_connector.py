"""Measures the time to first token inside vLLM on a CPU, for documents seen before in another order, and the
divergence that reuse causes.

    python bench_connector.py MODEL [--documents 5] [--tokens 512] [--dtype float32]

The peer is the same vLLM without chunks: its prefix cache finds the system prompt, but no document after a
different one. Documents are notes on firms, cut to one length, and each question is about a fact in one of
them. Loading is compared with a copy of the same bytes. A row has the shortest time and the mean divergence
of its rounds; one process measures all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoTokenizer
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvcache.vllm.gate.chat import BORDER, Chat
from kvcache.vllm.gate.local import BLOCK, Asked, LocalEngine, divergence
from kvcache.vllm.gate.questions import note_questions, prose

ORDINARY = "without chunks"
ROWS = (ORDINARY, "none", "link:16", "link:32", "link:64", "question:0.2", "question:0.5")


@dataclass
class Row:
    """The measurements of one setting."""

    seconds: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    """The divergences of the first token's distribution from the peer's, in nats."""
    same: int = 0
    """The number of rounds whose first token equals the peer's."""


class Bench:
    """Documents to ask about first in one order, then in others."""

    def __init__(self, model: str, count: int, tokens: int, dtype: str) -> None:
        self.chat = Chat(AutoTokenizer.from_pretrained(model))
        config = AutoConfig.from_pretrained(model).get_text_config()
        self.engine = LocalEngine(model, config, dtype=dtype, max_len=4096, host_memory="1GiB")
        encode, more = self.chat.encode, prose(2)
        asked = note_questions(1, count, 2)
        self.system = encode(f"{self.chat.before}{asked[0].system}{BORDER}")
        self.questions, self.documents = [], []
        for question in asked:
            document = encode(BORDER.join(question.notes) + BORDER)
            while len(document) < tokens:
                document += encode(next(more))
            self.documents.append(document[:tokens])
            self.questions.append(encode(f"{question.text}{self.chat.after}"))

    def ask(self, order: list[int], question: int, recompute: str) -> Asked:
        parts = [self.system, *(self.documents[number] for number in order)]
        tokens = [token for part in parts for token in part] + self.questions[question]
        params = {"chunk_lengths": [len(part) for part in parts], "chunk_recompute": recompute}
        return self.engine.ask(tokens, None if recompute == ORDINARY else params, 1)

    def rows(self, rounds: int) -> dict[str, Row]:
        """Asks a different question in each round, with the documents in a different order."""
        first, *others = orders(len(self.documents), rounds + 1)
        self.ask(first, 0, "none")
        rows = {name: Row() for name in ROWS}
        for number, order in enumerate(others):
            full = None
            for name, row in rows.items():
                out = self.ask(order, number % len(self.questions), name)
                full = full or out
                row.seconds.append(out.seconds)
                row.divergences.append(divergence(full.first, out.first))
                row.same += out.answer.tokens == full.answer.tokens
        return rows

    def copies(self) -> tuple[float, float, int]:
        """Returns the seconds for a load and for a copy of the same size, and the size in bytes."""
        side = get_kv_transfer_group()._worker
        count = sum(map(len, self.documents))
        blocks = -(-count // BLOCK)
        load = [((list(range(blocks)), 0, count), (list(range(2, 2 + blocks)), 0, count), 37)]
        size = blocks * side.arena.block_bytes
        source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
        torch.set_num_threads(os.cpu_count() or 1)
        copy = least(lambda: target.copy_(source))
        return least(lambda: side.arena.load(side.cache, load, side.ropes)), copy, size


def orders(documents: int, count: int) -> list[list[int]]:
    """Draws orders that share only the system prompt with earlier orders as a prefix."""
    draw, drawn = random.Random(1), []
    while len(drawn) < count:
        order = list(range(documents))
        draw.shuffle(order)
        if all(order[0] != other[0] for other in drawn[-documents + 1 :]):
            drawn.append(order)
    return drawn


def least(call) -> float:
    times = []
    for _ in range(12):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    bench = Bench(args.model, args.documents, args.tokens, args.dtype)
    rows = bench.rows(args.rounds)
    loading, copy, size = bench.copies()
    times = {name: min(row.seconds) for name, row in rows.items()}
    away = {name: sum(row.divergences) / args.rounds for name, row in rows.items()}
    print(json.dumps({
        "model": args.model, "dtype": args.dtype, "tokens": args.documents * args.tokens, "rounds": args.rounds,
        "ttft_seconds": times, "times_as_fast": {name: times[ORDINARY] / seconds for name, seconds in times.items()},
        "divergence": away, "same_first_token": {name: row.same for name, row in rows.items()},
        "load_seconds": loading, "copy_seconds": copy, "load_to_copy": loading / copy, "bytes": size,
    }))
    print(f"{args.documents} documents of {args.tokens} tokens in another order, {args.dtype}, {args.rounds} rounds")
    for name, row in rows.items():
        print(
            f"  {name:16} {times[name] * 1e3:9.1f} ms   {times[ORDINARY] / times[name]:6.1f} times as fast   "
            f"{away[name]:7.4f} nats away   {row.same} of {args.rounds} first tokens the same"
        )
    print(f"  loading {size >> 20} MiB takes {loading * 1e3:.1f} ms, {loading / copy:.2f} of a copy ({copy * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
