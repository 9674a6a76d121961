"""Writes the goldens for a published model: its greedy answers, by Hugging Face transformers.

    pip install torch==2.15.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0
    python proof/goldens/published_model/convert.py target/published/smollm2.gguf target/published/hf
    python proof/goldens/published_model/goldens.py target/published/hf target/published/smollm2.gguf

Writes proof/goldens/published_model/goldens.json. For each prompt of prompts.json it has

    prompt      ids of the prompt's tokens answer      ids of the likeliest token after the prompt and after
    each further one, up to 64, the end token included margins     for each of them, its logit minus the
    second likeliest token's logit

The model runs in float32 on the CPU from the converted directory, with torch's attention, the prompt in one
pass and each token in another. Then every answer is computed again in float64. `rounding` is the largest
difference of logits between the two: a margin below twice that is a tie. `end` is the end token.

The directory is checked against transformers' own reader of GGUF files, which shares no code with convert.py:
all parameters are equal, and so are the ids of all prompts. That reader lacks the cut at digits, which is
added here.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

HERE = pathlib.Path(__file__).parent
TOKENS = 64


def ids_of(tokenizer, prompt: dict) -> list[int]:
    text = prompt.get("text")
    if text is None:
        text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens="text" in prompt).input_ids


def check_conversion(model, tokenizer, prompts: list[dict], path: pathlib.Path) -> None:
    """Compares the directory with the GGUF file as read by transformers."""
    names = dict(gguf_file=path.name)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **names).state_dict()
    ours = model.state_dict()
    assert theirs.keys() == ours.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different, different
    other = AutoTokenizer.from_pretrained(path.parent, **names)
    backend = other.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for prompt in prompts:
        assert ids_of(tokenizer, prompt) == ids_of(other, prompt), prompt["name"]


def greedy(model, prompt: list[int], end: int) -> tuple[list[int], torch.Tensor]:
    """Returns the answer, and the logits that each of its tokens was chosen from."""
    cache, fed, answer, rows = DynamicCache(), prompt, [], []
    while len(answer) < TOKENS and end not in answer:
        row = model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
        rows.append(row)
        answer.append(int(row.argmax()))
        fed = answer[-1:]
    return answer, torch.stack(rows)


def golden(prompt: dict, ids: list[int], answer: list[int], rows: torch.Tensor) -> dict:
    top = rows.topk(2).values
    return {
        "name": prompt["name"],
        "prompt": ids,
        "answer": answer,
        "margins": [float(f"{margin:.3g}") for margin in (top[:, 0] - top[:, 1]).tolist()],
    }


@torch.inference_mode()
def main(folder: str, file: str) -> None:
    prompts = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_conversion(model, tokenizer, prompts, pathlib.Path(file))
    answers = []
    for prompt in prompts:
        ids = ids_of(tokenizer, prompt)
        answers.append((ids, *greedy(model, ids, tokenizer.eos_token_id)))
        print(prompt["name"], len(ids), repr(tokenizer.decode(answers[-1][1])), flush=True)
    model, rounding = model.double(), 0.0
    for ids, answer, rows in answers:
        exact = model(torch.tensor([ids + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        off = float((exact - rows).abs().max())
        print(len(ids), off, flush=True)
        rounding = max(rounding, off)
    goldens = {
        "header": "made by proof/goldens/published_model/goldens.py with torch {}, transformers {}".format(
            torch.__version__, transformers.__version__),
        "end": tokenizer.eos_token_id,
        "rounding": float(f"{rounding:.2g}"),
        "answers": [golden(prompt, *answer) for prompt, answer in zip(prompts, answers)],
    }
    # One line per prompt.
    text = json.dumps(goldens, ensure_ascii=False).replace('{"name"', '\n{"name"')
    (HERE / "goldens.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
