"""Compares llama.cpp with our engine for several answers at once: 16 prompts of 128 tokens, 64 tokens each,
on the same GGUF files.

    cmake --build build -j --target llama-batched-bench    # in llama.cpp's folder, see llama_published.py
    cargo build --release -p kvcli
    python3 proof/peers/llama_batched.py --bench .../build/bin/llama-batched-bench --kvc target/release/kvc FILE.gguf ...

`llama-batched-bench` runs llama.cpp's batches without a server: no requests, no sampling, no scheduler. Both
use two threads, keys and values in f16, and passes of at most 512 tokens. Rounds alternate between the two,
so noise affects both; the best wall time of each counts, with the processor time of that run, including
loading the model. Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import tempfile
import time

PROMPT, ANSWER = 128, 64


def run(*command: str) -> tuple[str, float, float]:
    """Returns a command's output, its wall time and its processor time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return output, time.perf_counter() - started, cpu


def theirs(bench: str, model: str, answers: int) -> tuple[float, float]:
    context = answers * (PROMPT + ANSWER) + 512
    output, _, cpu = run(
        bench, "-m", model, "-c", str(context), "-b", "2048", "-ub", "512", "-npp", str(PROMPT), "-ntg", str(ANSWER),
        "-npl", str(answers), "-t", "2", "-tb", "2",
    )
    # The last row: PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S.
    row = [line for line in output.splitlines() if line.startswith("|")][-1]
    return float(row.strip("| ").split("|")[8]), cpu


def ours(kvc: str, model: str, answers: int) -> tuple[float, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as trace:
        line = json.dumps({"at": 0, "prompt_tokens": PROMPT, "answer_tokens": ANSWER})
        trace.write("\n".join([line] * answers))
        trace.flush()
        output, _, cpu = run(
            kvc, "bench", "serve", "--json", "--model", model, "--trace", trace.name, "--running", str(answers),
            "--dtype", "f16",
        )
    return json.loads(output)["seconds"], cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="llama-batched-bench")
    parser.add_argument("--kvc", default="target/release/kvc")
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("models", nargs="+", help="GGUF files")
    args = parser.parse_args()
    print("| weights | answers at once | ours, s | llama.cpp, s | times as fast | processor time, s | llama.cpp's, s |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for answers in args.answers:
            us, them = [], []
            for _ in range(args.rounds):
                us.append(ours(args.kvc, model, answers))
                them.append(theirs(args.bench, model, answers))
            (mine, cpu), (other, other_cpu) = min(us), min(them)
            name = pathlib.Path(model).stem
            print(
                f"| {name} | {answers} | {mine:.2f} | {other:.2f} | {other / mine:.2f} | {cpu:.1f} | {other_cpu:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
