"""Writes the golden file for beam search: a tiny model's answers and scores, by Hugging Face transformers.

    pip install torch==2.15.0 transformers==5.23.0 safetensors numpy
    python proof/goldens/models/beams.py engine/kvmodel/tests/goldens/llama

`beams.json` in the folder has a list of cases: the prompt, the settings, and the returned answers. An answer
has its tokens, without the end token, and its score: the sum of its log-probabilities divided by its length
to the power of the length penalty. Computed in float32 on the CPU with eager attention. The end token is
taken from the middle of the best answer, so some beams end early.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def search(model, prompt: list[int], width: int, penalty: float, end: int | None) -> list[dict]:
    config = GenerationConfig(
        num_beams=width, num_return_sequences=width, max_new_tokens=12, do_sample=False, length_penalty=penalty,
        early_stopping=False, eos_token_id=end, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), generation_config=config)
    answers = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        tokens = row[len(prompt):]
        stopped = end in tokens
        tokens = tokens[: tokens.index(end)] if stopped else tokens
        answers.append({"tokens": tokens, "stopped": stopped, "score": score})
    return answers


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cases = []
    for seed, (width, penalty) in enumerate([(4, 1.0), (4, 0.0), (3, 2.0), (2, 1.0), (5, -0.5), (4, 1.0), (6, 0.5)]):
        prompt = [3 + (seed * 5 + i * 7) % 40 for i in range(6 + seed)]
        # Take the end token from the middle of the best answer.
        end = search(model, prompt, width, penalty, None)[0]["tokens"][3 + seed % 5]
        answers = search(model, prompt, width, penalty, end)
        cases.append({"prompt": prompt, "width": width, "length_penalty": penalty, "end": end, "answers": answers})
    (folder / "beams.json").write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
