"""The connector inside a real vLLM on a CPU, against transformers. Run by the slice `vllm` of `cargo xtask deep`.

    python check_connector.py MODEL [--block-size 32]
"""

from __future__ import annotations

import argparse
import os
import random
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    import reference

    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype=args.dtype,
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=256 << 20,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ChunkConnector",
            kv_connector_module_path="kvcache.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"host_memory": "256MiB"},
        ),
    )
    model = reference.load(args.model)
    vocab = model.config.vocab_size
    draw = random.Random(7)
    text = lambda n: [draw.randrange(5, vocab) for _ in range(n)]
    system, question = text(21), text(9)
    chunks = [text(args.tokens + 13 * i) for i in range(4)]

    def ask(order, mode, recompute="none", count=6, **extra):
        parts = [system, *(chunks[i] for i in order)]
        tokens = [t for part in parts for t in part] + question
        params = {"chunk_lengths": [len(p) for p in parts], "chunk_mode": mode, "chunk_recompute": recompute}
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, logprobs=0, detokenize=False, ignore_eos=True,
            extra_args={"kv_transfer_params": params} if mode != "plain" else None,
        )
        (out,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        got = out.outputs[0]
        probs = [p[t].logprob for p, t in zip(got.logprobs, got.token_ids)]
        return parts, list(got.token_ids), probs, out

    def compare(what, got, expected):
        tokens, probs = got
        apart = max(abs(a - b) for a, b in zip(probs, expected[1]))
        verdict = "ok" if tokens == expected[0] and apart < 1e-3 else "DIFFERS"
        print(f"{verdict:8} {what}: tokens {tokens} log-probabilities apart {apart:.1e}", flush=True)
        if verdict != "ok":
            print("expected", expected)
            failures.append(what)

    failures: list[str] = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 3, 1]):
        for mode, of in (("alone", reference.alone), ("with-system", reference.with_system)):
            parts, tokens, probs, out = ask(order, mode)
            compare(f"{mode} {order} (cached {out.num_cached_tokens})", (tokens, probs), of(model, parts, question, 6))
    parts, tokens, probs, out = ask([1, 2, 0], "alone", "link:1000")
    _, plain, plain_probs, _ = ask([1, 2, 0], "plain")
    compare("link of everything is full attention", (tokens, probs), (plain, plain_probs))
    print(out.kv_transfer_params)
    sys.exit(f"{len(failures)} differ" if failures else 0)


if __name__ == "__main__":
    main()
