"""Writes tables for every kind of rotary embedding, by Hugging Face transformers.

    pip install torch==2.15.0 transformers==5.23.0 safetensors numpy
    python proof/goldens/models/tables.py engine/kvmodel/tests/goldens/rope

`kinds.json` maps a kind to `longest`, a request's number of positions, and `config`, its config.json.
`tables.safetensors` holds for each kind, computed in one pass whose largest position is `longest − 1` or
less:

    KIND.inv_freq           [rotary_dim / 2], float32
    KIND.attention_factor   [1]
    KIND.positions          [n], int32
    KIND.cos, KIND.sin      [n, rotary_dim / 2], with the attention factor
    KIND.rotated            [n, head_dim]: the row KIND.key rotated to each position by the model's own function

Static NTK has no name in transformers; its theta is scaled before. DeepSeek's function returns interleaved
pairs as halves, which are interleaved again here.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

HEAD_DIM, LONG, ORIGINAL = 64, 131072, 4096
POSITIONS = [0, 1, 7, 100, 4095, 32767, 131071]
BASE = dict(vocab_size=8, hidden_size=HEAD_DIM, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=LONG, rms_norm_eps=1e-5)
LATENT = dict(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=HEAD_DIM, v_head_dim=8,
              first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=1, n_shared_experts=1,
              moe_intermediate_size=8, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0)
SHORT_FACTOR = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
LONG_FACTOR = [1.0 + 0.11 * i * i for i in range(HEAD_DIM // 2)]


def rope(kind, theta=10000.0, **more):
    return dict(rope_type=kind, rope_theta=theta, **more)


LLAMA3 = rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)
YARN = rope("yarn", 1000000.0, factor=4.0, original_max_position_embeddings=32768)
DEEPSEEK = rope("yarn", factor=40.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=0.7)
LONGROPE = rope("longrope", short_factor=SHORT_FACTOR, long_factor=LONG_FACTOR, original_max_position_embeddings=ORIGINAL)
NTK = rope("ntk", factor=8.0)

# kind: (config.json, longest, what transformers runs instead)
KINDS = {
    "default": (dict(rope_parameters=rope("default")), LONG, {}),
    "linear": (dict(rope_parameters=rope("linear", factor=3.0)), LONG, {}),
    "static-ntk": (dict(rope_parameters=NTK), LONG,
                   dict(rope_parameters=rope("default", 10000.0 * 8.0 ** (HEAD_DIM / (HEAD_DIM - 2))))),
    "dynamic-original": (dict(rope_parameters=rope("dynamic", factor=32.0), max_position_embeddings=ORIGINAL), ORIGINAL, {}),
    "dynamic": (dict(rope_parameters=rope("dynamic", factor=32.0), max_position_embeddings=ORIGINAL), LONG, {}),
    "llama3": (dict(rope_parameters=LLAMA3), LONG, {}),
    "yarn": (dict(rope_parameters=YARN), LONG, {}),
    "yarn-untruncated": (dict(rope_parameters=dict(YARN, truncate=False)), LONG, {}),
    "longrope-short": (dict(rope_parameters=LONGROPE), ORIGINAL, {}),
    "longrope-long": (dict(rope_parameters=LONGROPE), LONG, {}),
    "partial": (dict(rope_parameters=rope("default", partial_rotary_factor=0.5)), LONG, {}),
    "partial-yarn": (dict(rope_parameters=dict(YARN, partial_rotary_factor=0.75)), LONG, {}),
    "interleaved": (dict(LATENT, model_type="deepseek_v3", rope_parameters=rope("default")), LONG, {}),
    "interleaved-yarn": (dict(LATENT, model_type="deepseek_v3", rope_parameters=DEEPSEEK), LONG, {}),
}


def rotary_of(config):
    if config["model_type"] == "deepseek_v3":
        return LlamaRotaryEmbedding(DeepseekV3Config(**config))
    kind = Phi3RotaryEmbedding if "partial_rotary_factor" in config["rope_parameters"] else LlamaRotaryEmbedding
    return kind(LlamaConfig(**config))


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    kinds, tables = {}, {}
    for index, (kind, (says, longest, runs)) in enumerate(KINDS.items()):
        config = json.loads(json.dumps({**BASE, "model_type": "llama", **says}))
        kinds[kind] = dict(longest=longest, config=config)
        rotary = rotary_of(json.loads(json.dumps({**config, **runs})))
        positions = [p for p in POSITIONS if p < longest]
        key = torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(index))
        rows = key.expand(1, 1, len(positions), HEAD_DIM)
        cos, sin = rotary(rows, torch.tensor([positions]))
        if config["model_type"] == "deepseek_v3":
            halves = apply_rotary_pos_emb_interleave(rows, rows, cos, sin)[1]
            rotated = torch.stack(halves.chunk(2, dim=-1), dim=-1).flatten(-2)
        else:
            rotated = apply_rotary_pos_emb(rows, rows, cos, sin)[1]
        half = rotary.inv_freq.numel()
        for name, value in dict(
            inv_freq=rotary.inv_freq, attention_factor=torch.tensor([rotary.attention_scaling]), key=key,
            positions=torch.tensor(positions, dtype=torch.int32), cos=cos[0, :, :half], sin=sin[0, :, :half],
            rotated=rotated[0, 0],
        ).items():
            tables[f"{kind}.{name}"] = value.contiguous().clone()
    save_file(tables, str(out / "tables.safetensors"),
              metadata={"torch": torch.__version__, "transformers": transformers.__version__})
    (out / "kinds.json").write_text(json.dumps(kinds, indent=1) + "\n")


if __name__ == "__main__":
    main()
