"""Writes kvmodel's golden files: tiny random models and their logits, by Hugging Face transformers.

    pip install torch==2.15.0 transformers==5.23.0 safetensors numpy
    python proof/goldens/models/make.py engine/kvmodel/tests/goldens

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
    overlapped_full                         logits of the question at overlapped positions; every token sees all
                                            tokens before it
    error_f16.NAME, error_int8:4.NAME, …    the reference's own error: for each row of the question, the largest
                                            difference of logits when transformers caches keys and values in that
                                            format. A key is rounded once, at the position where a chunk cache stores
                                            it: starting at 0 for chunks computed alone, otherwise right after the system
                                            prompt. `absolute_alone` is sequential_alone with keys rounded at the
                                            position of use
    error_f16.full.CELL, …                  the same for full attention at the cell's positions, with keys rounded at
                                            the positions where the cell stores chunks
    error_f16_unrotated.NAME, …             the same with keys rounded before their rotation
    error_f16_copied.NAME, …                the same with moved keys rounded a second time, after the move
    scaled.CELL                             logits of the question in the overlapped cells, with a temperature and a
                                            scale for documents, `scaling` (see scaled_attention.py)
    blend.CELL.LAYER, blend_chosen.CELL.LAYER, blend_next.CELL.LAYER
                                            for some models, recomputation by deviation at a layer (see blending.py):
                                            logits of the question, the recomputed tokens, counted from the first token
                                            of the first chunk, and logits of the likeliest next token

Masks are explicit. Under a sliding window `w`, a row sees a key if `position − key position < w`, with the
positions of the pass. One pass has one set of positions. In two phases, chunks are computed at their stored
positions, and the question sees them at the used ones.

A request has one regime of RoPE. transformers selects it from the largest position of a pass; in two phases,
both use the frequencies of the largest used position. Models that transformers cannot express are run as
another one: `llama-ntk` with theta scaled before, partial rotary embeddings as Phi-3, and `qwen2-layers`,
whose layer types have different embeddings, with one module per type. Gemma 3's own module has one embedding per
layer type.

proof/goldens/models/tables.py writes tables of cosines and sines.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig,
    LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from blending import Blended, chosen
from rounding import FORMATS, Rounded, before_rotation
from scaled_attention import scaled

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
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
# Overlapped cells end at 17 positions and sequential ones at 28, which are in different regimes.
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.25], long_factor=[1.5, 3.0, 7.5],
                original_max_position_embeddings=20, partial_rotary_factor=0.75)
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
NTK = dict(rope_type="ntk", rope_theta=10000.0, factor=4.0)
DEEPSEEK_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, mscale=0.8,
                     mscale_all_dim=1.0)
LAYER_TYPES = ["sliding_attention", "full_attention"]
BY_TYPE = dict(sliding_attention=dict(rope_type="default", rope_theta=500.0),
               full_attention=dict(rope_type="linear", rope_theta=20000.0, factor=2.0))
DEEPSEEK = dict(
    num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5,
    first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=12,
    n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, rope_interleave=True,
)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**{**BASE, "tie_word_embeddings": True}, rope_parameters=DEFAULT)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, head_dim=12)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=YARN)),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=LINEAR)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**BASE, rope_parameters=DEFAULT)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**BASE, rope_parameters=DEFAULT, head_dim=16)),
    "llama-ntk": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=dict(
        DEFAULT, rope_theta=NTK["rope_theta"] * NTK["factor"] ** (8 / (8 - 2))))),
    "llama-dynamic": (LlamaForCausalLM, LlamaConfig(**{**BASE, "max_position_embeddings": 16}, rope_parameters=DYNAMIC)),
    "llama-longrope": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=LONGROPE)),
    "llama-partial": (LlamaForCausalLM, LlamaConfig(**BASE, rope_parameters=PARTIAL)),
    "mistral": (MistralForCausalLM, MistralConfig(**BASE, rope_parameters=DEFAULT, sliding_window=8)),
    "qwen2-layers": (Qwen2ForCausalLM, Qwen2Config(**BASE, rope_parameters=DEFAULT, use_sliding_window=True,
                                                   sliding_window=8, layer_types=LAYER_TYPES)),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**{**BASE, **DEEPSEEK}, rope_parameters=DEEPSEEK_YARN)),
    "deepseek-v3-plain": (DeepseekV3ForCausalLM, DeepseekV3Config(
        **{**BASE, **DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True,
           "rope_interleave": False},
        rope_parameters=DEFAULT)),
    # A check in the middle of a model has layers before and after it.
    "llama-deep": (LlamaForCausalLM, LlamaConfig(**{**BASE, "num_hidden_layers": 4}, rope_parameters=DEFAULT)),
    # Every sixth layer has full attention.
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(
        **{**BASE, "num_hidden_layers": 7, "tie_word_embeddings": True}, rope_parameters=BY_TYPE, head_dim=16,
        query_pre_attn_scalar=24, sliding_window=8)),
}
# Temperature and scale of the context, to the bit in every float.
SCALING = (0.5, 0.75)
# The layers where a blend measures deviation (only models with fixed frequencies), and the share of
# tokens that it recomputes.
BLENDS = {"llama-deep": (1, 2, 3), "llama-yarn": (1,), "qwen3": (1,), "mistral": (1,), "deepseek-v3": (1,),
          "gemma3": (3,)}
SHARE = 0.4
# Cells computed in one pass: (positions overlap, chunks see the system prompt).
SINGLE = dict(overlapped_with_system=(True, True), overlapped_alone=(True, False), sequential_alone=(False, False),
              sequential_with_system_single=(False, True))
# Cells whose chunks may move, in the same format.
CELLS = dict(overlapped_with_system=(True, True), overlapped_alone=(True, False), sequential_alone=(False, False),
             sequential_with_system_two_phase=(False, True))
# Settings that differ between config.json and transformers.
SAYS = {"llama-ntk": dict(rope_parameters=NTK), "qwen2-layers": dict(rope_parameters=BY_TYPE)}


class ByLayerType(torch.nn.Module):
    """Two embeddings. Each layer uses one of them."""

    def __init__(self, config):
        super().__init__()
        of = lambda kind: modeling_llama.LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=dict(BY_TYPE[kind])))
        self.kinds = {kind: of(kind) for kind in LAYER_TYPES}

    def forward(self, x, position_ids):
        return {kind: rotary(x, position_ids) for kind, rotary in self.kinds.items()}


def take_own_embedding(layer, kind):
    forward = layer.forward
    layer.forward = lambda *args, position_embeddings, **rest: forward(
        *args, position_embeddings=position_embeddings[kind], **rest)


def rotary_of(name, config):
    """Returns a fresh embedding, because a used dynamic one remembers its longest pass."""
    if name == "qwen2-layers":
        return ByLayerType(config)
    if config.model_type == "gemma3_text":
        return modeling_gemma3.Gemma3RotaryEmbedding(config)
    if "partial_rotary_factor" in config.rope_parameters:
        return modeling_phi3.Phi3RotaryEmbedding(config)
    return modeling_llama.LlamaRotaryEmbedding(config)


def pinned(rotary, config, longest):
    """Returns a fresh embedding with the frequencies for `longest` positions, for passes of any length."""
    kind = config.rope_parameters.get("rope_type")
    if kind in ("dynamic", "longrope"):
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=torch.tensor(longest))
        rotary.rope_type = "default"
    return rotary


def windows_of(config):
    """Returns the sliding window of every layer type, or of all layers under the key None."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" in kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in kinds}
    return {None: window}


def logits(model, tokens, positions, mask, key_positions=None, cache=None):
    """Returns logits `[n, vocab]`; `mask` is `[n, keys]`, true where a row sees a key within its layer's
    window."""
    q, k = torch.tensor(positions)[:, None], torch.tensor(key_positions or positions)[None]
    bias = {}
    for kind, window in windows_of(model.config).items():
        seen = mask & (q - k < window) if window else mask
        bias[kind] = torch.zeros(mask.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        return model(torch.tensor([tokens]), position_ids=torch.tensor([positions]),
                     attention_mask=bias.get(None, bias), past_key_values=cache, use_cache=cache is not None).logits[0]


def mask_of(parts, with_system):
    """Returns a causal mask: chunks see themselves and, optionally, the system prompt; the question sees
    everything."""
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


def move(keys, delta, inv_freq):
    """Returns cached keys rotated by `delta` positions, in float64. DeepSeek caches its pairs de-interleaved,
    as halves."""
    angle = delta[:, None] * inv_freq.double()[None]
    angle = torch.cat((angle, angle), dim=-1)
    rotated, rest = keys[..., :angle.shape[-1]].double(), keys[..., angle.shape[-1]:]
    return torch.cat(((rotated * angle.cos() + rotate_half(rotated) * angle.sin()).float(), rest), dim=-1)


def stored_positions(parts, with_system):
    """Returns the first stored position: right after the system prompt, or 0."""
    return positions_of(parts, True) if with_system else [i for p in parts for i in range(len(p))]


def frequencies(name, rotary, layer):
    if name == "gemma3":
        return getattr(rotary, f"{rotary.config.layer_types[layer]}_inv_freq")
    return (rotary.kinds[LAYER_TYPES[layer]] if name == "qwen2-layers" else rotary).inv_freq


def two_phase(name, model, parts, cache, overlapped=False, with_system=True):
    """Computes chunks at their stored positions, moves the cached keys, computes the question. Returns all
    logits.
    """
    flat = [t for p in parts for t in p]
    context = len(flat) - len(parts[-1])
    used, stored = positions_of(parts, overlapped), stored_positions(parts, with_system)
    rotary = model.model.rotary_emb = pinned(rotary_of(name, model.config), model.config, max(used) + 1)
    mask = mask_of(parts, with_system)
    before = logits(model, flat[:context], stored[:context], mask[:context, :context], cache=cache)
    delta = torch.tensor([u - s for s, u in zip(stored[:context], used[:context])], dtype=torch.float64)
    after = getattr(cache, "moved", lambda keys: keys)
    for index, layer in enumerate(cache.layers):
        inv_freq = frequencies(name, rotary, index)
        if name.startswith("deepseek"):
            layer.values = after(move(layer.values, delta, inv_freq))
        else:
            layer.keys = after(move(layer.keys, delta, inv_freq))
    asked = logits(model, parts[-1], used[context:], mask[context:], used, cache)
    return torch.cat((before, asked))


def own_errors(name, model, parts, rounded, word, passes, exact, **how_rounded):
    """Returns the error in each question row's logits if the cached rows are `rounded`."""
    flat, asked = [t for p in parts for t in p], -len(parts[-1])
    interleaved = getattr(model.config, "rope_interleave", False)
    cache = lambda **more: Rounded(
        rounded, latent=name.startswith("deepseek"), interleaved=interleaved, **how_rounded, **more)
    # Decision: docs/decisions/tools.md#with-experts-only-the-questions-error-counts
    error = lambda got, exact: (got - exact)[asked:].abs().amax(dim=-1)
    out = {}
    for what, how in passes.items():
        model.model.rotary_emb = rotary_of(name, model.config)
        got = logits(model, flat, *how, cache=cache())
        out[f"{word}.{'absolute_alone' if what == 'sequential_alone' else what}"] = error(got, exact[what])
    for what, overlapped in (("overlapped_alone", True), ("sequential_alone", False)):
        out[f"{word}.{what}"] = error(two_phase(name, model, parts, cache(), overlapped, False), exact[what])
    for what, (overlapped, with_system) in CELLS.items():
        used, stored = positions_of(parts, overlapped), stored_positions(parts, with_system)
        stored[asked:] = used[asked:]
        rotary = model.model.rotary_emb = pinned(rotary_of(name, model.config), model.config, max(used) + 1)
        delta = torch.tensor([s - u for s, u in zip(stored, used)], dtype=torch.float64)
        there = lambda keys, layer, back: move(keys, -delta if back else delta, frequencies(name, rotary, layer))
        causal = torch.tril(torch.ones(len(flat), len(flat), dtype=torch.bool))
        got = logits(model, flat, used, causal, cache=cache(stored=there))
        out[f"{word}.full.{what}"] = error(got, exact["overlapped_full" if overlapped else "full"])
    got = two_phase(name, model, parts, cache())
    out[f"{word}.sequential_with_system_two_phase"] = error(got, exact["two_phase"])
    return out


def blends(name, model, parts, single):
    """Recomputation by deviation in every cell, at every layer of `BLENDS`."""
    flat = [t for p in parts for t in p]
    system, first, context = len(parts[0]), len(parts[0]) + len(parts[1]), len(flat) - len(parts[-1])
    causal = torch.tril(torch.ones(len(flat), len(flat), dtype=torch.bool))
    model.model.rotary_emb = rotary_of(name, model.config)
    out = {}
    for cell in (*SINGLE, "sequential_with_system_two_phase"):
        stored, fresh = DynamicCache(), DynamicCache()
        positions = positions_of(parts, cell.startswith("overlapped"))
        if cell in SINGLE:
            again = logits(model, flat, positions, single[cell][1], cache=stored)
            assert torch.allclose(again, single[cell][2], atol=1e-5)
        else:
            two_phase(name, model, parts, stored)
        logits(model, flat, positions, causal, cache=fresh)
        # The first chunk saw the system prompt, so it already matches full attention.
        candidates = list(range(first if "with_system" in cell else system, context))
        for layer in BLENDS[name]:
            recomputed = chosen(fresh, stored, layer, candidates, context - system, SHARE)
            kept = [token for token in range(system, context) if token not in recomputed]
            cache = Blended(stored, kept, layer)
            asked = logits(model, flat, positions, causal, cache=cache)[context:]
            cache.settle()
            following, all_seen = positions[-1] + 1, torch.ones(1, len(flat) + 1, dtype=torch.bool)
            more = logits(model, [asked[-1].argmax().item()], [following], all_seen, positions + [following], cache)
            out[f"blend.{cell}.{layer}"], out[f"blend_next.{cell}.{layer}"] = asked, more
            out[f"blend_chosen.{cell}.{layer}"] = torch.tensor([t - system for t in recomputed], dtype=torch.int32)
    return out


def randomise(model):
    """Draws all parameters at random, with norms around 1 and a router bias that changes choices."""
    for key, parameter in list(model.named_parameters()) + [
            (key, buffer) for key, buffer in model.named_buffers() if key.endswith("correction_bias")]:
        torch.nn.init.normal_(parameter, std=0.4 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    for key, parameter in model.named_parameters():
        # Gemma 3 adds the 1 itself.
        if key.endswith("norm.weight") and model.config.model_type != "gemma3_text":
            parameter.data += 1.0
        # Small enough that the epsilon of the norms inside latent attention matters.
        if "q_a_proj" in key or "kv_a_proj_with_mqa" in key:
            parameter.data[:model.config.q_lora_rank if "q_a_proj" in key else model.config.kv_lora_rank] *= 0.02


def checkpoint(model, config):
    """Returns tensors under the names of published checkpoints: experts one by one, and layers past the last,
    which predict further tokens and must be ignored."""
    state = {}
    for key, value in model.state_dict().items():
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        if key.endswith("experts.gate_up_proj") or key.endswith("experts.down_proj"):
            at = key.rsplit(".", 1)[0]
            for i, expert in enumerate(value):
                if key.endswith("down_proj"):
                    state[f"{at}.{i}.down_proj.weight"] = expert
                else:
                    state[f"{at}.{i}.gate_proj.weight"], state[f"{at}.{i}.up_proj.weight"] = expert.chunk(2)
        else:
            state[key] = value
    if config.model_type == "deepseek_v3":
        state[f"model.layers.{config.num_hidden_layers}.eh_proj.weight"] = torch.ones(4, 8)
    return {k: v.clone().contiguous() for k, v in state.items()}


def main():
    out = pathlib.Path(sys.argv[1])
    # Phi-3's function rotates as many elements as there are cosines. For other models, these are all
    # elements.
    modeling_llama.apply_rotary_pos_emb = modeling_phi3.apply_rotary_pos_emb
    for index, (name, (cls, config)) in enumerate(MODELS.items()):
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        torch.manual_seed(1000 + index)
        config._attn_implementation = "eager"
        model = cls(config).eval().float()
        randomise(model)
        if name == "qwen2-layers":
            for layer, kind in zip(model.model.layers, LAYER_TYPES):
                take_own_embedding(layer, kind)
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        generator = torch.Generator().manual_seed(index)
        draw = lambda n: torch.randint(0, config.vocab_size, (n,), generator=generator).tolist()
        parts = [draw(5), draw(7), draw(4), draw(9), draw(3)]
        flat, asked = [t for p in parts for t in p], -len(parts[-1])
        causal = torch.tril(torch.ones(len(flat), len(flat), dtype=torch.bool))

        def one_pass(positions, mask):
            model.model.rotary_emb = rotary_of(name, config)
            result = logits(model, flat, positions, mask)
            model.model.rotary_emb = pinned(rotary_of(name, config), config, max(positions) + 1)
            assert torch.equal(result, logits(model, flat, positions, mask)), "a pass is of the regime of its length"
            return result

        passes = {"full": (list(range(len(flat))), causal), "overlapped_full": (positions_of(parts, True), causal), **{
            cell: (positions_of(parts, overlapped), mask_of(parts, with_system))
            for cell, (overlapped, with_system) in SINGLE.items()}}
        single = {what: one_pass(*how) for what, how in passes.items()}
        phases = two_phase(name, model, parts, DynamicCache())
        golden = {
            "full": single["full"],
            "overlapped_full": single["overlapped_full"][asked:],
            **{cell: single[cell][asked:] for cell in SINGLE},
            "sequential_with_system_two_phase": phases[asked:],
        }
        for cell, overlapped in (("overlapped_alone", True), ("sequential_alone", False)):
            moved = two_phase(name, model, parts, DynamicCache(), overlapped, False)[asked:]
            assert torch.allclose(moved, golden[cell], atol=1e-5), "what sees itself alone may be moved"
        exact = {**single, "two_phase": phases}
        for word, rounded in FORMATS.items():
            errors = lambda word, **how: own_errors(name, model, parts, rounded, f"error_{word}", passes, exact, **how)
            golden.update(errors(word))
            if word in ("f16", "bf16"):
                golden.update(errors(f"{word}_copied", copied=True))
            with before_rotation(model, rounded):
                golden.update(errors(f"{word}_unrotated", unrotated=True))
        documents = torch.zeros(len(flat), dtype=torch.bool)
        documents[len(parts[0]):asked] = True
        golden["scaling"] = torch.tensor(SCALING)
        for cell in ("overlapped_with_system", "overlapped_alone"):
            with scaled(model, slice(len(flat) + asked, None), documents, *SCALING):
                golden[f"scaled.{cell}"] = one_pass(*passes[cell])[asked:]
        if name in BLENDS:
            golden.update(blends(name, model, parts, {cell: (*passes[cell], single[cell]) for cell in SINGLE}))
        model.model.rotary_emb = rotary_of(name, config)
        with torch.no_grad():
            plain = model(torch.tensor([flat])).logits[0]
        assert torch.allclose(plain, golden["full"], atol=1e-5), "an explicit causal mask changes nothing"
        for key, part in zip(["system", "chunk0", "chunk1", "chunk2", "question"], parts):
            golden[key] = torch.tensor(part, dtype=torch.int32)
        save_file({k: v.contiguous() for k, v in golden.items()}, str(folder / "golden.safetensors"),
                  metadata={"torch": torch.__version__, "transformers": transformers.__version__})
        save_file(checkpoint(model, config), str(folder / "model.safetensors"), metadata={"format": "pt"})
        text = json.loads(config.to_json_string(use_diff=False))
        keep = {k: v for k, v in text.items() if k in BASE or k in DEEPSEEK or k in (
            "model_type", "rope_parameters", "head_dim", "attention_bias", "mlp_bias", "hidden_act", "use_sliding_window",
            "hidden_activation", "query_pre_attn_scalar")}
        if "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type == "mistral":
            keep.update({k: text[k] for k in ("sliding_window", "layer_types") if text.get(k) is not None})
        keep.update(SAYS.get(name, {}))
        (folder / "config.json").write_text(json.dumps(keep, indent=2) + "\n")
        print(name, "largest logit", golden["full"].abs().max().item())


if __name__ == "__main__":
    main()
