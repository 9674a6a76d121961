"""Compares llama.cpp with our engine on a published model: prefills, passes of a few rows, decoding, in f32,
bf16 and Q8_0.

    python3 -m venv .venv && .venv/bin/pip install numpy==2.4.6 gguf==0.19.0 safetensors==0.8.0
    python proof/goldens/published_model/convert.py target/published/smollm2.gguf target/published/hf    # see its header
    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36    # bundles llama.cpp's source
    tar xzf llama_cpp_python-0.3.36.tar.gz && cd llama_cpp_python-0.3.36/vendor/llama.cpp
    cmake -B build ...    # as in llama_cpp.py; where its AMX kernels crash, in a fresh folder with -DGGML_NATIVE=OFF
                          # -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON
    cmake --build build -j --target llama-bench
    .venv/bin/python proof/peers/llama_published.py --bench .../build/bin/llama-bench --model target/published/hf [--write]

The directory is converted to three GGUF files, which both engines read: all matrices in one type, norms in
f32. Both use the same number of threads and store keys and values in f16. A prefill starts from scratch. Rows
and answers come after a cached context of 512 tokens. Rounds alternate between the two, so noise affects
both, and the best time of each counts; for llama.cpp, the better of its two kinds of attention counts. The
last rows compare our engine with itself: a prompt of five cached documents of 512 tokens, and its question
alone after the same keys and values. `--write` writes the table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import tempfile

import gguf
import numpy as np
from safetensors.numpy import load_file

import common
import llama_model
import published
from published import CONTEXT, DECODE, PREFILL, ROWS, listed

TYPES = {
    "f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
# llama-bench has no f32 for this, and f16 is llama.cpp's default.
KV = "f16"


def add_tokenizer(writer: gguf.GGUFWriter, folder: pathlib.Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    control = {token["id"] for token in tokenizer["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_add_bos_token(False)


def write_gguf(path: pathlib.Path, folder: pathlib.Path, kind: gguf.GGMLQuantizationType) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["head_dim"] == llama_model.HEAD and config["tie_word_embeddings"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    add_tokenizer(writer, folder)
    weights = load_file(folder / "model.safetensors")

    def add(name: str, weight: np.ndarray) -> None:
        to = TYPES["f32"] if weight.ndim == 1 else kind
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, to), raw_dtype=to)

    add("token_embd", weights["model.embed_tokens.weight"])
    add("output_norm", weights["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for part, name in llama_model.PARTS.items():
            weight = weights[f"model.layers.{layer}.{part}.weight"]
            weight = llama_model.interleaved(weight) if name in ("attn_q", "attn_k") else weight
            add(f"blk.{layer}.{name}", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Theirs:
    def __init__(self, program: str, threads: int):
        self.command = [program, "-o", "json", "-t", str(threads), "-ctk", KV, "-ctv", KV, "-fa", "off,on", "-m"]

    def run(self, model: pathlib.Path, repetitions: int, *tests: str) -> published.Times:
        command = [*self.command, str(model), "-r", str(repetitions), *tests]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        rows = []
        for row in json.loads(output):
            seconds = min(row["samples_ns"]) / 1e9
            if row["n_gen"]:
                rows.append((("decode", row["n_gen"]), seconds / row["n_gen"]))
            else:
                rows.append((("rows" if row["n_depth"] else "prefill", row["n_prompt"]), seconds))
        return rows

    def all(self, model: pathlib.Path) -> published.Times:
        behind = ["-d", str(CONTEXT)]
        return [
            *self.run(model, 1, "-p", listed(PREFILL), "-n", "0"),
            *self.run(model, 5, "-p", listed(ROWS), "-n", "0", *behind),
            *self.run(model, 3, "-p", "0", "-n", str(DECODE), *behind),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", required=True, help="llama-bench")
    parser.add_argument("--model", required=True, type=pathlib.Path, help="the converted directory")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="threads of llama.cpp; ours takes one per processor")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    theirs, table = Theirs(args.bench, args.threads), []
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.types:
            model = pathlib.Path(scratch) / f"{kind}.gguf"
            write_gguf(model, args.model, TYPES[kind])
            us, them = {}, {}
            for _ in range(args.rounds):
                published.keep_best(them, theirs.all(model))
                published.keep_best(us, published.ours(model, KV))
            model.unlink()
            of_kind = published.lines(kind, us, them)
            table += of_kind
            print(json.dumps(of_kind, ensure_ascii=False), flush=True)
    head = ["weights", "what", "llama.cpp", "ours", "times as fast"]
    common.show("llama.cpp, a published model", common.table(head, table), args.write)


if __name__ == "__main__":
    main()
