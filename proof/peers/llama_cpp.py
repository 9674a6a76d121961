"""Compares llama.cpp's server with our engine: time to first token for prompts with documents, on the same
random weights.

    python3 -m venv .venv && .venv/bin/pip install numpy==2.4.6 gguf==0.19.0 safetensors
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36    # bundles llama.cpp's source
    tar xzf llama_cpp_python-0.3.36.tar.gz && cd llama_cpp_python-0.3.36/vendor/llama.cpp
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build build -j --target llama-server
    .venv/bin/python proof/peers/llama_cpp.py --server .../build/bin/llama-server [--write]

A Llama of 8 layers of 1024 (`ModelConfig::benchmark`) in f32; a prompt is a system prompt of 64 tokens, five
documents of 512 and a question of 32, as token ids. Each request asks for one token with another question,
after a request with the documents in the first order; the best of three counts. llama.cpp's times are for a
local HTTP request. Both store keys and values in f32. `--write` writes the table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import tempfile
import time

import common
import llama_model
from llama_server import LlamaServer

REPETITIONS = 3
SYSTEM, DOCUMENTS, LENGTH, QUESTION = 64, 5, 512, 32


def make_prompts() -> dict:
    draw = random.Random(5)
    tokens = lambda n: [draw.randrange(300, llama_model.VOCAB) for _ in range(n)]  # noqa: E731
    return {
        "system": tokens(SYSTEM),
        "documents": [tokens(LENGTH) for _ in range(DOCUMENTS)],
        "questions": [tokens(QUESTION) for _ in range(REPETITIONS + 2)],
    }


ORDERS = {
    "same order": lambda documents: documents,
    "rotated": lambda documents: documents[1:] + documents[:1],
    "reversed": lambda documents: documents[::-1],
}


class Server(LlamaServer):
    """A server with one slot. It caches only the last prompt."""

    def __init__(self, program: str, model: pathlib.Path, threads: int, prompts: dict):
        self.prompts = prompts
        threads = str(threads)
        super().__init__(program, str(model), "-c", "4096", "-np", "1", "-t", threads, "-tb", threads, "-ctk", "f32", "-ctv", "f32")

    def ask(self, order: str, question: int, cache: bool, shift: int = 0) -> dict:
        """Asks for one token. `shift` is the shortest run of tokens that the chunk shift moves."""
        documents = ORDERS[order](self.prompts["documents"])
        prompt = [*self.prompts["system"], *(t for d in documents for t in d), *self.prompts["questions"][question]]
        start = time.perf_counter()
        answer = self.complete(
            prompt=prompt, n_predict=1, temperature=0, cache_prompt=cache, n_cache_reuse=shift, n_probs=20,
        )
        answer["seconds"] = time.perf_counter() - start
        return answer

    def measure(self, order: str, shift: int) -> dict:
        answers = []
        for question in range(1, REPETITIONS + 1):
            self.ask("same order", 0, False)
            answers.append(self.ask(order, question, True, shift))
        best = min(answers, key=lambda answer: answer["seconds"])
        exact = self.ask(order, REPETITIONS, False)
        return {
            "seconds": best["seconds"], "computed": best["timings"]["prompt_n"], "first": first(best),
            "apart": apart(answers[-1], exact),
        }


def logprobs(answer: dict) -> dict[int, float]:
    return {top["id"]: top["logprob"] for top in answer["completion_probabilities"][0]["top_logprobs"]}


def first(answer: dict) -> int:
    return answer["completion_probabilities"][0]["id"]


def apart(answer: dict, exact: dict) -> float:
    """Returns the largest log-probability difference among the likeliest tokens that both report."""
    a, b = logprobs(answer), logprobs(exact)
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, help="llama-server")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp; ours takes one per processor")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, prompts = pathlib.Path(scratch), make_prompts()
        weights = llama_model.random_weights(args.layers, args.hidden)
        llama_model.write_hugging_face(folder / "model", args.layers, args.hidden, weights)
        llama_model.write_gguf(folder / "model.gguf", args.layers, args.hidden, weights)
        (folder / "prompts.json").write_text(json.dumps(prompts))
        del weights
        server = Server(args.server, folder / "model.gguf", args.threads, prompts)
        try:
            server.ask("reversed", 0, False)  # warms up
            cold = server.ask("same order", 0, False)
            cold_row = {"seconds": cold["seconds"], "computed": cold["timings"]["prompt_n"], "first": first(cold)}
            theirs = {
                "same order": server.measure("same order", 0),
                "rotated": server.measure("rotated", 0),
                "rotated, shifted": server.measure("rotated", 256),
                "reversed, shifted": server.measure("reversed", 256),
            }
        finally:
            server.close()
        print(json.dumps({"cold": cold_row, **theirs}), flush=True)
        files = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.json")]
        ours = {row["scenario"]: row for row in common.ours("kvlab", "peer_ttft", *files)}
    print(json.dumps(ours))
    same = "the same" if ours["cold"]["first"] == cold_row["first"] else "ANOTHER"
    print(f"first token of both, cold: {same}")

    def line(what: str, how: str, row: dict, cold: dict, exact: str) -> list[str]:
        apart = "–" if row.get("apart") is None else f"{row['apart']:.0e}"
        ratio = f"{cold['seconds'] / row['seconds']:.1f}"
        return [what, how, str(row["computed"]), common.duration(row["seconds"]), ratio, exact, apart]

    us = ours["cold"]
    def masked(row: dict) -> str:
        return f"for its mask (off by {row['off_mask']:.0e})"

    head = ["documents", "engine and way", "tokens computed", "TTFT", "against cold", "exact", "off full attention by"]
    common.show("llama.cpp", common.table(head, [
        line("nothing cached", "llama.cpp", cold_row, cold_row, "yes"),
        line("nothing cached", "ours, full attention", us, us, "yes"),
        line("same order", "llama.cpp, prompt cache", theirs["same order"], cold_row, "yes"),
        line("same order", "ours, prefix cache", ours["same order"], us, "yes"),
        line("rotated by one", "llama.cpp, prompt cache", theirs["rotated"], cold_row, "yes"),
        line("rotated by one", "llama.cpp, chunk shift", theirs["rotated, shifted"], cold_row, "no"),
        line("rotated by one", "ours, chunks reused", ours["rotated, chunks"], us, masked(ours["rotated, chunks"])),
        line("reversed", "llama.cpp, chunk shift", theirs["reversed, shifted"], cold_row, "no"),
        line("reversed", "ours, chunks reused", ours["reversed, chunks"], us, masked(ours["reversed, chunks"])),
    ]), args.write)


if __name__ == "__main__":
    main()
