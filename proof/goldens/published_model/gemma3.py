"""Writes the goldens for Gemma 3 270M: its greedy answers, by llama.cpp.

    python3 -m venv .venv && .venv/bin/pip install numpy==2.4.6 gguf==0.19.0
    .venv/bin/python proof/goldens/published_model/gemma3.py target/published/gemma3.gguf --server .../llama-server

The server is built as in proof/peers/llama_cpp.py. The model's terms do not allow the project to ship it; `cargo xtask
published --gemma` prints the command that downloads it. Writes proof/goldens/published_model/gemma3.json, in the
format of goldens.json (see goldens.py), for the texts of prompts.json: answers of 48 tokens to three of them, and one
token for the others, whose prompts check the tokenizer. The longest text is cut to `characters`, which is still longer
than the window of 512 tokens.

llama.cpp rounds the rows that it multiplies with blocks, which changes the first answer at its tenth token. Therefore it
runs a copy of the file whose blocks are decoded to f32, with keys and values in f32.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import urllib.request

import gguf
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "peers"))

from llama_server import LlamaServer  # noqa: E402

HERE = pathlib.Path(__file__).parent
TOKENS = 48
NAMES = ("eight tokens", "numbers and white space", "6,000 tokens")
CHARACTERS = 3000
OPTIONS = ("-c", "4096", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off")
END = 1


def decoded(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file, with all tensors in f32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "gemma3")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape([int(n) for n in reversed(tensor.shape)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of(server: LlamaServer, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": True}).encode()
    request = urllib.request.Request(server.url + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["tokens"]


def answer(server: LlamaServer, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Returns the likeliest tokens, and each one's lead over the next."""
    said = server.complete(prompt=prompt, n_predict=count, temperature=0, n_probs=2, cache_prompt=False, return_tokens=True)
    places = said["completion_probabilities"]
    tokens, margins = [place["id"] for place in places], []
    for place in places:
        first, second = (top["logprob"] for top in place["top_logprobs"])
        margins.append(float(f"{first - second:.3g}"))
    return tokens, margins


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--server", required=True)
    args = parser.parse_args()
    prompts = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))["prompts"]
    texts = {prompt["name"]: prompt["text"][:CHARACTERS] for prompt in prompts if "text" in prompt}
    with tempfile.TemporaryDirectory(dir=args.model.parent) as place:
        file = pathlib.Path(place) / "f32.gguf"
        decoded(args.model, file)
        server = LlamaServer(args.server, str(file), *OPTIONS)
        try:
            ids = {name: ids_of(server, text) for name, text in texts.items()}
            answers = {name: answer(server, ids[name], TOKENS if name in NAMES else 1) for name in texts}
        finally:
            server.close()
    goldens = {
        "header": "made by proof/goldens/published_model/gemma3.py with llama.cpp of llama-cpp-python 0.3.36",
        "end": END,
        "characters": CHARACTERS,
        "answers": [
            {"name": name, "prompt": ids[name], "answer": answers[name][0], "margins": answers[name][1]} for name in texts
        ],
    }
    text = json.dumps(goldens, ensure_ascii=False).replace('{"name"', '\n{"name"')
    (HERE / "gemma3.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
