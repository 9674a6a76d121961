"""Writes small models with random weights, of the families that the connector is checked on: ``python tiny.py
FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GptOssConfig, GptOssForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # Large enough for attention not to be flat and for answers to differ.
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"head_dim": 32, "sliding_window": 96}),
    # Models with two kinds of layers. vLLM divides the layers of gemma3 into three groups, and those of gpt-oss into two.
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 96,
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"num_hidden_layers": 2, "head_dim": 32, "sliding_window": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def make(folder: Path) -> None:
    for seed, (name, (config, model, more)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        made = model(config(**{**SIZE, **more}))
        made.save_pretrained(folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
