"""Writes the same random weights as a Hugging Face directory and as GGUF."""

from __future__ import annotations

import json
import pathlib

import gguf
import numpy as np
from safetensors.numpy import save_file

HEAD, VOCAB, POSITIONS, THETA, EPS = 64, 4096, 8192, 500_000.0, 1e-5


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns all parameters of kvmodel's `ModelConfig::benchmark(layers, hidden)`."""
    kv, inner = hidden // 4, hidden * 11 // 4
    all_shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        all_shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_proj.weight": (hidden, hidden),
            at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    return all_shapes


def random_weights(layers: int, hidden: int) -> dict[str, np.ndarray]:
    """Draws weights: norms near 1, and projections that keep the magnitude of their input."""
    rng = np.random.default_rng(1)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        centre, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, (3 / shape[-1]) ** 0.5)
        return (centre + spread * rng.uniform(-1, 1, shape)).astype(np.float32)

    return {name: values(shape) for name, shape in shapes(layers, hidden).items()}


def write_hugging_face(folder: pathlib.Path, layers: int, hidden: int, weights: dict[str, np.ndarray]) -> None:
    heads = hidden // HEAD
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 4, "head_dim": HEAD,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "rope_theta": THETA,
        "rms_norm_eps": EPS, "tie_word_embeddings": True, "torch_dtype": "float32",
        "attention_bias": False, "mlp_bias": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors")


def interleaved(weight: np.ndarray) -> np.ndarray:
    """Returns a projection's rows in llama.cpp's order, which rotates neighbours rather than halves of a
    head.
    """
    rows, width = weight.shape
    return weight.reshape(rows // HEAD, 2, HEAD // 2, width).swapaxes(1, 2).reshape(rows, width).copy()


PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: pathlib.Path, layers: int, hidden: int, weights: dict[str, np.ndarray]) -> None:
    heads = hidden // HEAD
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden * 11 // 4)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 4)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(VOCAB)
    # Prompts are token ids, but the server needs a vocabulary.
    special = [b"<unk>", b"<s>", b"</s>"]
    tokens = special + [f"<0x{i:02X}>".encode() for i in range(256)]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    words = VOCAB - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"w{i}".encode() for i in range(words)])
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * words)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for i in range(layers):
        for part, name in PARTS.items():
            weight = weights[f"model.layers.{i}.{part}.weight"]
            if name in ("attn_q", "attn_k"):
                weight = interleaved(weight)
            writer.add_tensor(f"blk.{i}.{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
