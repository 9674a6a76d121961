"""A Llama in plain torch with explicit masks and positions, for training tiny-rag.

The parameters have the same layout as in transformers' LlamaForCausalLM, so the state dict is saved as an
ordinary Hugging Face checkpoint. At the end, `train.py` compares the two models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = dict(
    vocab_size=0,  # set from the tokenizer
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv_heads, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin, mask):
        b, n, _ = x.shape
        q = rope(self.q_proj(x).view(b, n, self.heads, self.dim).transpose(1, 2), cos, sin)
        k = rope(self.k_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, n, self.kv_heads, self.dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))


class Mlp(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        # Blocks start small compared with the embeddings, so a token's identity survives to the end of the
        # residual stream. Otherwise, lookups do not form.
        for name, p in self.named_parameters():
            if p.dim() > 1:
                inner = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.1 if "embed" in name else 0.02 if inner else p.shape[1] ** -0.5)

    def hidden(self, tokens, positions, mask):
        """Returns hidden states `[b, n, hidden]`; positions are `[b, n]`, and the bool mask is `[b, 1, n,
        n]`."""
        dim = self.c["head_dim"]
        freq = self.c["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angle = positions[:, None, :, None].float() * freq
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def logits(self, hidden):
        return hidden @ self.embed_tokens.weight.T
