"""Writes the golden files of kvmodel: tiny random models and their logits, by Hugging Face transformers.

    pip install torch==2.15.0 transformers==5.23.0 safetensors numpy
    python tools/model_goldens/make.py crates/kvmodel/tests/goldens

Each folder holds a model in the Hugging Face format (every parameter random, norms and biases
included) and `golden.safetensors` with, in float32 on the CPU with eager attention:

    system, chunk0..chunk2, question        token ids of a prompt
    full                                    logits of all its tokens, ordinary causal attention
    overlapped_with_system, overlapped_alone, sequential_alone
                                            logits of the question under an explicit mask in which
                                            chunks do not see each other, at explicit positions
    sequential_with_system_two_phase        chunks under overlapped positions, their cached keys
                                            rotated to sequential ones, then the question
    sequential_with_system_single           the same mask in one pass at sequential positions, which
                                            the two-phase result must NOT equal
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

BASE = dict(
    vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
DEFAULT = dict(rope_type="default", rope_theta=10000.0)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**{**BASE, "tie_word_embeddings": True}, rope_parameters=DEFAULT)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, head_dim=12)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=YARN)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=LINEAR)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**BASE, rope_parameters=DEFAULT)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**BASE, rope_parameters=DEFAULT, head_dim=16)),
}


def logits(model, tokens, positions, mask, cache=None):
    """Logits `[n, vocab]`; `mask` is `[n, keys]`, true where a row sees a key."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(torch.tensor([tokens]), position_ids=torch.tensor([positions]), attention_mask=bias,
                     past_key_values=cache, use_cache=cache is not None).logits[0]


def mask_of(parts, with_system):
    """Causal, chunks seeing themselves and maybe the system prompt, the question seeing everything."""
    part = torch.tensor([i for i, p in enumerate(parts) for _ in p])
    asks = part[:, None] == len(parts) - 1
    allowed = (part[:, None] == part[None]) | asks
    if with_system:
        allowed |= part[None] == 0
    return allowed & torch.tril(torch.ones(len(part), len(part), dtype=torch.bool))


def positions_of(parts, overlapped):
    system, longest = len(parts[0]), max(len(p) for p in parts[1:-1])
    out, at = list(range(system)), system
    for chunk in parts[1:-1]:
        start = system if overlapped else at
        out += range(start, start + len(chunk))
        at += len(chunk)
    start = system + longest if overlapped else at
    return out + list(range(start, start + len(parts[-1])))


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def two_phase(model, parts):
    """Chunks at their stored positions, cached keys moved to sequential ones, then the question."""
    flat = [t for p in parts for t in p]
    context = len(flat) - len(parts[-1])
    stored, used = positions_of(parts, True), positions_of(parts, False)
    cache = DynamicCache(config=model.config)
    logits(model, flat[:context], stored[:context], mask_of(parts, True)[:context, :context], cache)
    delta = torch.tensor([u - s for s, u in zip(stored[:context], used[:context])], dtype=torch.float64)
    angle = delta[:, None] * model.model.rotary_emb.inv_freq.double()[None]
    angle = torch.cat((angle, angle), dim=-1)
    for layer in cache.layers:
        k = layer.keys.double()
        layer.keys = (k * angle.cos() + rotate_half(k) * angle.sin()).float()
    return logits(model, parts[-1], used[context:], mask_of(parts, True)[context:], cache)


def main():
    out = pathlib.Path(sys.argv[1])
    for index, (name, (cls, config)) in enumerate(MODELS.items()):
        torch.manual_seed(1000 + index)
        config._attn_implementation = "eager"
        model = cls(config).eval().float()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.data += 1.0
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(index)
        draw = lambda n: torch.randint(0, config.vocab_size, (n,), generator=generator).tolist()
        parts = [draw(5), draw(7), draw(4), draw(9), draw(3)]
        flat, asked = [t for p in parts for t in p], -len(parts[-1])
        causal = torch.tril(torch.ones(len(flat), len(flat), dtype=torch.bool))
        masked = lambda overlapped, with_system: logits(
            model, flat, positions_of(parts, overlapped), mask_of(parts, with_system))[asked:]
        golden = {
            "full": logits(model, flat, list(range(len(flat))), causal),
            "overlapped_with_system": masked(True, True),
            "overlapped_alone": masked(True, False),
            "sequential_alone": masked(False, False),
            "sequential_with_system_single": masked(False, True),
            "sequential_with_system_two_phase": two_phase(model, parts),
        }
        with torch.no_grad():
            plain = model(torch.tensor([flat])).logits[0]
        assert torch.allclose(plain, golden["full"], atol=1e-5), "an explicit causal mask changes nothing"
        for key, part in zip(["system", "chunk0", "chunk1", "chunk2", "question"], parts):
            golden[key] = torch.tensor(part, dtype=torch.int32)
        save_file({k: v.contiguous() for k, v in golden.items()}, str(folder / "golden.safetensors"),
                  metadata={"torch": torch.__version__, "transformers": transformers.__version__})
        state = {k: v.contiguous() for k, v in model.state_dict().items() if not (config.tie_word_embeddings and k == "lm_head.weight")}
        save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
        text = json.loads(config.to_json_string(use_diff=False))
        keep = {k: v for k, v in text.items() if k in BASE or k in (
            "model_type", "rope_parameters", "head_dim", "attention_bias", "mlp_bias", "hidden_act", "use_sliding_window")}
        (folder / "config.json").write_text(json.dumps(keep, indent=2) + "\n")
        print(name, "largest logit", golden["full"].abs().max().item())


if __name__ == "__main__":
    main()
