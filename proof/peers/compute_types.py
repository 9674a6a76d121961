"""Measures how far rounded activations move the log-probabilities of a published model: ours in each compute type,
llama.cpp's and transformers', against transformers in f32 with the same weights.

    PYTHONPATH=target/published/python .../bin/python proof/peers/compute_types.py --kvc target/release/kvc \\
        --model target/published/hf --gguf bf16.gguf Q8_0.gguf [--llama .../build/bin/llama-server]

Python needs torch and transformers (`bash proof/vllm/install.sh FOLDER` installs both), and `gguf` decodes the weights. The
header of `llama_published.py` explains how to make the files, and the one of `llama_cpp.py` how to build llama-server.

The texts are the prompts of `proof/goldens/published_model` up to 800 tokens, each with its golden answer. Every program gets
a prompt and the first tokens of its answer, and says the most likely next tokens, for each token of the answer: all programs
judge the same text. The reference is transformers in f32 with the file's weights, decoded. A *difference* is that of the
log-probability of the reference's most likely token, in nats. Keys and values are in f32 in ours, and in the default type
elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import urllib.request
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType, dequantize, quantize
from llama_server import LlamaServer
from served import Served, free_port

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST, TOP = 800, 20
GOLDENS = pathlib.Path(__file__).parents[1] / "goldens/published_model/goldens.json"
# For each type of weights: our compute types, and whether transformers has the type.
WAYS = {"f32": (["exact"], False), "bf16": (["exact", "bf16"], True), "Q8_0": (["exact", "int8"], False)}
# Returns the log-probabilities of the most likely tokens behind some tokens, by their ids.
Judge = "Callable[[list[int]], dict[int, float]]"


def texts() -> list[tuple[list[int], list[int]]]:
    answers = json.loads(GOLDENS.read_text())["answers"]
    return [(one["prompt"], one["answer"]) for one in answers if len(one["prompt"]) <= LONGEST]


def load(folder: str, weights: str) -> transformers.PreTrainedModel:
    """Returns the model in f32, with its matrices as a file in blocks or bf16 has them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kind = GGMLQuantizationType[weights.upper()]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and weights != "f32":
                stored = quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(np.array(dequantize(stored, kind))))
    return model


def of_torch(model: transformers.PreTrainedModel) -> list[list[dict[int, float]]]:
    """Returns the most likely tokens for each token of each answer."""
    found = []
    with torch.no_grad():
        for prompt, answer in texts():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
            top = torch.log_softmax(logits, -1).topk(TOP)
            found.append([dict(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)])
    return found


def of_server(judge: Judge) -> list[list[dict[int, float]]]:
    return [[judge(prompt + answer[:at]) for at in range(len(answer))] for prompt, answer in texts()]


class Ours(Served):
    """`kvc serve` in one compute type."""

    def __init__(self, program: str, model: str, compute: str, ids: dict[str, int]):
        port = free_port()
        command = [program, "serve", model, "--port", str(port), "--dtype", "f32", "--compute", compute]
        super().__init__(f"ours, {compute}", command, port, pathlib.Path(os.devnull))
        self.ids = ids
        with urllib.request.urlopen(self.url + "/v1/models") as response:
            self.model = json.load(response)["data"][0]["id"]

    def judge(self, tokens: list[int]) -> dict[int, float]:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": TOP, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            top = json.load(response)["choices"][0]["logprobs"]["top_logprobs"][0]
        return {self.ids[text]: value for text, value in top.items() if text in self.ids}


def of_llama(server: LlamaServer) -> Judge:
    def judge(tokens: list[int]) -> dict[int, float]:
        answer = server.complete(prompt=tokens, n_predict=1, temperature=0, n_probs=TOP, cache_prompt=True, ignore_eos=False)
        # There is no token if the answer ends.
        return {one["id"]: one["logprob"] for token in answer.get("completion_probabilities", []) for one in token["top_logprobs"]}

    return judge


def rows(weights: str, reference: list[list[dict[int, float]]], programs: dict[str, list[list[dict[int, float]]]]) -> None:
    """Prints a row for each program, over the places at which all of them say how likely the reference's token is. (A server
    does not for a token that ends the answer, nor ours for one without a text.)"""
    flat = [one for answer in reference for one in answer]
    firsts = [max(one, key=one.get) for one in flat]
    of = {what: [one for answer in found for one in answer] for what, found in programs.items()}
    places = [at for at, first in enumerate(firsts) if all(first in found[at] for found in of.values())]
    for what, found in of.items():
        differences = [abs(found[at][firsts[at]] - flat[at][firsts[at]]) for at in places]
        same = sum(max(found[at], key=found[at].get) == firsts[at] for at in places)
        cells = [
            f"{same} of {len(places)}", f"{statistics.mean(differences):.5f}",
            f"{statistics.quantiles(differences, n=100)[98]:.4f}", f"{max(differences):.4f}",
        ]
        print(f"| {weights} | {what} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvc", required=True)
    parser.add_argument("--model", required=True, help="a Hugging Face directory in f32")
    parser.add_argument("--gguf", nargs="+", required=True, help="files of its weights, named after their types")
    parser.add_argument("--llama", help="llama-server")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    ids: dict[str, int] = {}
    for token in range(len(tokenizer)):
        ids.setdefault(tokenizer.decode([token], clean_up_tokenization_spaces=False), token)
    print("| weights | what | same most likely token | mean difference | 99 % below | largest |")
    print("|---|---|---|---|---|---|")
    for file in args.gguf:
        weights = pathlib.Path(file).stem
        computes, has_torch = WAYS[weights]
        model, programs = load(args.model, weights), {}
        reference = of_torch(model)
        for compute in computes:
            server = Ours(args.kvc, file, compute, ids)
            try:
                programs[server.name] = of_server(server.judge)
            finally:
                server.close()
        if args.llama:
            server = LlamaServer(args.llama, file, "-c", "2048", "-np", "1", "-t", "2", "-tb", "2")
            try:
                programs["llama.cpp"] = of_server(of_llama(server))
            finally:
                server.close()
        if has_torch:
            programs["transformers, bf16"] = of_torch(model.to(torch.bfloat16))
        rows(weights, reference, programs)


if __name__ == "__main__":
    main()
