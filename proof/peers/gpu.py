"""Measures torch, Triton and FlashInfer on a GPU, at the sizes of `cargo xtask bench --backend cuda`.

    python3 -m venv .venv && .venv/bin/pip install torch flashinfer-python
    PYTHON=.venv/bin/python cargo xtask gpu-check

Prints one JSON object per line: a measured row, or a skipped one with the reason. The file needs nothing else
from this repository, so it can be copied to the machine with the card. A decode step has 64 sequences of
8,192 tokens, 64 query heads and 8 heads of keys and values of 128, in bf16. torch's attention gets contiguous
keys and values, the others blocks of 16 in random order, as ours does. Copies move the rows of one layer of a
pool of 8 GiB and 80 layers. Times are measured on the card, between events around batches of launches. A
batch waits for other work until all of its launches are enqueued. The median of seven batches counts.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time

SEQUENCES, CONTEXT, PROMPT = 64, 8192, 4096
HEADS, QUERY_HEADS, DIM, BLOCK, LAYERS = 8, 64, 128, 16, 80
POOL = 8 << 30
DECODE, PREFILL = "cuda: attend, decode, GQA 8, bf16", "cuda: attend, prefill, GQA 8, bf16"


def skip(what: str, reason: str) -> None:
    print(json.dumps({"what": what, "skipped": " ".join(str(reason).split())[:200]}), flush=True)


def row(what: str, ours: str | None, nbytes: int, seconds: float) -> None:
    print(json.dumps({"what": what, "ours": ours, "bytes": nbytes, "seconds": seconds}), flush=True)


class Card:
    """The card's timers, and memory that keeps the card busy."""

    def __init__(self, torch) -> None:
        self.torch = torch
        self.busy = [torch.empty(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]

    def batch(self, work, launches: int) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(launches):
            self.busy[1].copy_(self.busy[0])
        start.record()
        for _ in range(launches):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / launches

    def seconds(self, work) -> float:
        work()
        launches = max(1, min(50, int(5e-3 / max(self.batch(work, 2), 1e-6))))
        return statistics.median(self.batch(work, launches) for _ in range(7))


def over(*_) -> None:
    raise TimeoutError("too slow here; a second run may find the kernels compiled")


def attempt(what: str, measure, seconds: float) -> None:
    """Runs one measurement. If it fails, the row is skipped, with the error as the reason."""
    try:
        signal.signal(signal.SIGALRM, over)
        signal.alarm(max(1, int(seconds)))
        measure()
    except ImportError as error:
        skip(what, f"not installed: {error}")
    except Exception as error:  # noqa: BLE001 - out of memory, a kernel that is not for this card, another interface
        skip(what, f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


def moves(card: Card) -> None:
    torch = card.torch
    tokens = POOL // (LAYERS * 2 * HEADS * DIM * 2) // BLOCK * BLOCK
    blocks = torch.randperm(tokens // BLOCK, device="cuda")
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    caches = [torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    rows = [torch.randn(tokens, HEADS, DIM, device="cuda").bfloat16() for _ in "kv"]
    nbytes = tokens * 2 * HEADS * DIM * 2

    def scatter():
        for cache, new in zip(caches, rows):
            cache.index_copy_(0, slots, new)

    def gather():
        for cache, out in zip(caches, rows):
            torch.index_select(cache, 0, slots, out=out)

    row("torch `index_copy_`, one layer", "cuda: scatter bf16", nbytes, card.seconds(scatter))
    row("torch `index_select`, one layer", "cuda: gather bf16", nbytes, card.seconds(gather))
    half = torch.empty(POOL // 2, dtype=torch.uint8, device="cuda")
    row("torch `clone`, half the pool", "cuda: copy_blocks bf16", POOL // 2, card.seconds(half.clone))


def queries(torch, rows: int):
    return torch.randn(rows, QUERY_HEADS, DIM, device="cuda").bfloat16()


def sdpa(card: Card, sequences: int, context: int, rows: int, what: str, ours: str) -> None:
    torch = card.torch
    q = queries(torch, sequences * rows).view(sequences, rows, QUERY_HEADS, DIM).transpose(1, 2)
    k, v = (torch.randn(sequences, HEADS, context, DIM, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    attention = torch.nn.functional.scaled_dot_product_attention
    work = lambda: attention(q, k, v, is_causal=rows > 1, enable_gqa=True)  # noqa: E731
    row(what, ours, 2 * k.numel() * 2, card.seconds(work))


def paged(torch):
    """Returns keys and values in randomly ordered blocks, `[blocks, 2, BLOCK, HEADS, DIM]`, and the block
    table.
    """
    blocks = SEQUENCES * CONTEXT // BLOCK
    cache = torch.randn(blocks, 2, BLOCK, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(blocks, device="cuda").int().view(SEQUENCES, CONTEXT // BLOCK)
    return cache, table


def flashinfer_decode(card: Card) -> None:
    import flashinfer

    torch = card.torch
    cache, table = paged(torch)
    room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    ends = torch.arange(SEQUENCES + 1, dtype=torch.int32, device="cuda") * (CONTEXT // BLOCK)
    last = torch.full((SEQUENCES,), BLOCK, dtype=torch.int32, device="cuda")
    decode.plan(
        ends, table.flatten(), last, QUERY_HEADS, HEADS, DIM, BLOCK, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = queries(torch, SEQUENCES)
    seconds = card.seconds(lambda: decode.run(q, cache))
    row("FlashInfer, batch decode, blocks of 16", DECODE, cache.numel() * 2, seconds)


def triton_decode(card: Card) -> None:
    global tl  # a kernel looks for it among the names of its module
    import triton
    import triton.language as tl

    torch = card.torch

    # Each program handles one part of one sequence, for one key head's queries. torch merges the parts.
    @triton.jit
    def part(q, cache, table, out, lse, scale, CONTEXT: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr,
             GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
        sequence, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, STEP)
        at = (sequence * HEADS * GROUP + head * GROUP + rows)[:, None] * DIM + dims[None, :]
        query = tl.load(q + at, mask=rows[:, None] < GROUP, other=0.0)
        most = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(0, PART, STEP):
            token = piece * PART + start + keys
            block = tl.load(table + sequence * (CONTEXT // BLOCK) + token // BLOCK).to(tl.int64)
            place = ((block * 2 * BLOCK + token % BLOCK) * HEADS + head)[:, None] * DIM + dims[None, :]
            k = tl.load(cache + place)
            v = tl.load(cache + place + BLOCK * HEADS * DIM)
            logits = tl.dot(query, tl.trans(k)) * scale
            higher = tl.maximum(most, tl.max(logits, 1))
            weights = tl.exp(logits - higher[:, None])
            shrink = tl.exp(most - higher)
            total = total * shrink + tl.sum(weights, 1)
            result = result * shrink[:, None] + tl.dot(weights.to(tl.bfloat16), v)
            most = higher
        place = ((piece * tl.num_programs(0) + sequence) * HEADS + head) * GROUP + rows
        tl.store(out + place[:, None] * DIM + dims[None, :], result / total[:, None], mask=rows[:, None] < GROUP)
        tl.store(lse + place, most + tl.log(total), mask=rows < GROUP)

    cache, table = paged(torch)
    q, pieces, group = queries(torch, SEQUENCES), 8, QUERY_HEADS // HEADS
    out = torch.empty(pieces, SEQUENCES, QUERY_HEADS, DIM, device="cuda")
    lse = torch.empty(pieces, SEQUENCES, QUERY_HEADS, device="cuda")

    def decode():
        part[(SEQUENCES, HEADS, pieces)](
            q, cache, table, out, lse, DIM**-0.5, CONTEXT, CONTEXT // pieces, HEADS, group, 16, DIM, BLOCK, 64,
            num_warps=4, num_stages=3,
        )
        return (out * torch.softmax(lse, 0)[..., None]).sum(0).bfloat16()

    first = table[0].long()
    k, v = (cache[first, i].reshape(CONTEXT, HEADS, DIM).transpose(0, 1)[None] for i in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q[0][None, :, None], k, v, enable_gqa=True)[0, :, 0]
    if not torch.allclose(decode()[0].float(), expected.float(), atol=2e-2):
        raise RuntimeError("its result differs from torch's")
    row("Triton, paged decode in 8 parts", DECODE, cache.numel() * 2, card.seconds(decode))


ALL = {
    "torch, copies": moves,
    "torch SDPA, decode": lambda card: sdpa(card, SEQUENCES, CONTEXT, 1, "torch SDPA, decode, contiguous", DECODE),
    "torch SDPA, prefill": lambda card: sdpa(card, 1, PROMPT, PROMPT, "torch SDPA, prefill, contiguous", PREFILL),
    "Triton, paged decode": triton_decode,
    "FlashInfer, batch decode": flashinfer_decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=55, help="for all rows; rows without time left are skipped")
    end = time.monotonic() + parser.parse_args().seconds
    try:
        import torch
    except ImportError as error:
        for what in ALL:
            skip(what, f"torch is not installed: {error}")
        return
    if not torch.cuda.is_available():
        for what in ALL:
            skip(what, "torch finds no card")
        return
    card = Card(torch)
    for what, measure in ALL.items():
        attempt(what, lambda: measure(card), end - time.monotonic())
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
