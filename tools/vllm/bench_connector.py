"""Times to first token inside vLLM on a CPU: documents that were seen before, in another order.

    python bench_connector.py MODEL [--documents 5] [--tokens 512] [--dtype float32]

The peer is the same vLLM without the connector's help, whose prefix cache finds the system prompt and no document behind another one.
Loading is compared with a copy of the same bytes. Each row is the least of some rounds; all rows are of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        enforce_eager=True,
        block_size=32,
        max_model_len=4096,
        kv_cache_memory_bytes=1 << 30,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(
            kv_connector="ChunkConnector",
            kv_connector_module_path="kvcache.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"host_memory": "1GiB"},
        ),
    )
    draw = random.Random(1)
    text = lambda n: [draw.randrange(5, 40_000) for _ in range(n)]
    system, documents = text(32), [text(args.tokens) for _ in range(args.documents)]

    def ttft(order: list[int], recompute: str | None) -> float:
        """Seconds to the first token of a question that was never asked."""
        parts = [system, *(documents[i] for i in order)]
        tokens = [t for part in parts for t in part] + text(32)
        params = {"chunk_lengths": [len(p) for p in parts], "chunk_recompute": recompute}
        extra = None if recompute is None else {"kv_transfer_params": params}
        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True, extra_args=extra)
        started = time.perf_counter()
        llm.generate([{"prompt_token_ids": tokens}], [sampling], use_tqdm=False)
        return time.perf_counter() - started

    orders = []
    while len(orders) < args.rounds + 1:
        order = list(range(args.documents))
        draw.shuffle(order)
        # No other beginning than the system prompt in common.
        if all(order[0] != other[0] for other in orders[-args.documents + 1 :]):
            orders.append(order)
    ttft(orders[0], "none")
    rows = {}
    for name, recompute in (("without chunks", None), ("none", "none"), ("link:16", "link:16"), ("link:32", "link:32"), ("question:0.2", "question:0.2"), ("question:0.5", "question:0.5")):
        rows[name] = min(ttft(order, recompute) for order in orders[1:])

    # The copies alone, against a copy of as many bytes.
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._worker
    count = args.documents * args.tokens
    blocks = -(-count // 32)
    slots = [(2 + i // 32) * 32 + i % 32 for i in range(count)]
    load = [(list(range(count)), slots, 37)]
    bytes_moved = blocks * side.arena.block_bytes
    source, target = torch.ones(bytes_moved, dtype=torch.uint8), torch.empty(bytes_moved, dtype=torch.uint8)

    def least(call) -> float:
        times = []
        for _ in range(12):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)

    torch.set_num_threads(os.cpu_count() or 1)
    copy = least(lambda: target.copy_(source))
    loading = least(lambda: side.arena.load(side.cache, load, side.ropes))
    print(json.dumps({
        "model": args.model, "dtype": args.dtype, "tokens": count, "ttft_seconds": rows,
        "times_as_fast": {name: rows["without chunks"] / seconds for name, seconds in rows.items()},
        "load_seconds": loading, "copy_seconds": copy, "load_to_copy": loading / copy, "bytes": bytes_moved,
    }))
    print(f"{args.documents} documents of {args.tokens} tokens in another order, {args.dtype}")
    for name, seconds in rows.items():
        print(f"  {name:16} {seconds * 1e3:9.1f} ms   {rows['without chunks'] / seconds:6.1f} times as fast")
    print(f"  loading {bytes_moved >> 20} MiB takes {loading * 1e3:.1f} ms, {loading / copy:.2f} of a copy ({copy * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
