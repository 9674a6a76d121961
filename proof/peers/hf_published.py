"""Compares Hugging Face transformers with our engine on a published model: prefills, passes of a few rows,
decoding, in f32.

    python3 -m venv .venv && .venv/bin/pip install numpy==2.4.6 gguf==0.19.0 safetensors==0.8.0 torch==2.15.0 transformers==5.23.0
    python proof/goldens/published_model/convert.py target/published/smollm2.gguf target/published/hf    # see its header
    .venv/bin/python proof/peers/hf_published.py --model target/published/hf [--write]

Both read the same directory, use the same number of threads, and store keys and values in f32. transformers
uses torch's scaled dot product attention with a `DynamicCache`, and computes the logits of the last token
only, as ours does. A prefill starts from scratch; rows and answers come after a cached context of 512 tokens.
Rounds alternate between the two, and the best time of each counts. `--write` writes the table to
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import pathlib
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import common
import published
from published import CONTEXT, DECODE, PREFILL, ROWS

KV = "f32"
REPETITIONS = 5


class Theirs:
    def __init__(self, folder: pathlib.Path, threads: int):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        load = lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")  # noqa: E731
        self.loading = ("load", (folder / "model.safetensors").stat().st_size), common.best(load)
        self.model = load().eval()
        self.context = self.cached()

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(self.model.config.vocab_size, (1, count))

    def step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Returns the likeliest next token."""
        logits = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def cached(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        self.step(self.tokens(CONTEXT), cache)
        return cache

    def best(self, work, repetitions: int = REPETITIONS) -> float:
        seconds = []
        for _ in range(repetitions):
            # A negative number removes that many tokens.
            if more := self.context.get_seq_length() - CONTEXT:
                self.context.crop(-more)
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def answer(self) -> None:
        token = self.tokens(1)
        for _ in range(DECODE):
            token = self.step(token, self.context)

    @torch.inference_mode()
    def all(self) -> published.Times:
        prefill = lambda n: self.step(self.tokens(n), DynamicCache(config=self.model.config))  # noqa: E731
        return [
            self.loading,
            *((("prefill", n), self.best(lambda n=n: prefill(n), 1 if n > 1000 else REPETITIONS)) for n in PREFILL),
            *((("rows", n), self.best(lambda n=n: self.step(self.tokens(n), self.context))) for n in ROWS),
            (("decode", DECODE), self.best(self.answer, 3) / DECODE),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, type=pathlib.Path, help="the converted directory")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch; ours takes one per processor")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    with torch.inference_mode():
        theirs = Theirs(args.model, args.threads)
    us, them = {}, {}
    for _ in range(args.rounds):
        published.keep_best(them, theirs.all())
        published.keep_best(us, published.ours(args.model.resolve(), KV))
    head = ["weights", "what", "transformers", "ours", "times as fast"]
    common.show("transformers, a published model", common.table(head, published.lines("f32", us, them)), args.write)


if __name__ == "__main__":
    main()
