"""The reference answers for reused chunks, computed by transformers in f32 on a CPU.

``alone``: one pass in which a chunk attends only to itself. ``with-system`` and ``behind:N``: two phases. Each
chunk is computed right after the system prompt, or after the system prompt and N decoys, and its keys are moved
to its place; then the question is computed over the system prompt and all chunks.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from .compare import Answer


def load(path: str):
    """Loads a model in f32, with attention that accepts any mask."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def causal(start: int, count: int) -> torch.Tensor:
    """Returns the mask of ``count`` tokens from ``start`` on: a row for each of them, True for the tokens that it sees."""
    return torch.ones(start + count, start + count, dtype=torch.bool).tril()[start:]


def masks(model, mask: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
    """Returns a mask of a pass over a model's last tokens as the model takes it, with its sliding window: one mask, or one
    for each kind of layer."""
    window, kinds = getattr(model.config, "sliding_window", None), set(getattr(model.config, "layer_types", None) or ())
    count, total = mask.shape
    places = torch.arange(total)
    near = places[total - count :, None] - places[None] < (window or total)

    def additive(mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]

    of_kind = {kind: additive(mask if kind == "full_attention" else mask & near) for kind in kinds}
    return of_kind if len(kinds) > 1 else next(iter(of_kind.values()), additive(mask & near))


@torch.no_grad()
def rest(model, cache: DynamicCache, start: int, tokens: list[int], mask: torch.Tensor):
    """Runs tokens after a cache, at positions starting at ``start``. Returns their log-probabilities."""
    positions = torch.arange(start, start + len(tokens))[None]
    ids = torch.tensor([tokens])
    out = model(ids, past_key_values=cache, position_ids=positions, use_cache=True, attention_mask=masks(model, mask))
    return torch.log_softmax(out.logits[0].double(), -1)


def visible(parts: list[int], question: int, mode: str) -> torch.Tensor:
    """Returns the mask of one pass: a row for each token, True for the tokens that it sees."""
    total = sum(parts) + question
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    start = parts[0]
    for length in parts[1:]:
        mask[start : start + length, (0 if mode == "alone" else parts[0]) : start] = False
        start += length
    return mask


@torch.no_grad()
def alone(model, parts: list[list[int]], question: list[int], count: int) -> Answer:
    """Returns greedy tokens and log-probabilities with a mask under which chunks attend only to
    themselves.
    """
    tokens = [t for part in parts for t in part] + question
    cache = DynamicCache()
    logs = rest(model, cache, 0, tokens, visible([len(p) for p in parts], len(question), "alone"))
    return continued(model, cache, len(tokens), logs[-1], count)


@torch.no_grad()
def plain(model, parts: list[list[int]], question: list[int], count: int) -> Answer:
    """Returns greedy tokens and log-probabilities under ordinary attention."""
    tokens = [t for part in parts for t in part] + question
    cache = DynamicCache()
    logs = rest(model, cache, 0, tokens, causal(0, len(tokens)))
    return continued(model, cache, len(tokens), logs[-1], count)


@torch.no_grad()
def first(model, parts: list[list[int]], question: list[int]) -> torch.Tensor:
    """Returns the log-probabilities of the first token under ordinary attention."""
    tokens = [t for part in parts for t in part] + question
    return rest(model, DynamicCache(), 0, tokens, causal(0, len(tokens)))[-1]


@torch.no_grad()
def continued(model, cache, length: int, last: torch.Tensor, count: int) -> Answer:
    """Returns greedy tokens after a cached prompt of ``length`` tokens. ``last`` are its last
    log-probabilities.
    """
    tokens, logprobs, margins = [], [], []
    for _ in range(count):
        best, second = last.topk(2).values.tolist()
        tokens.append(int(last.argmax()))
        logprobs.append(best)
        margins.append(best - second)
        if len(tokens) == count:
            break
        last = rest(model, cache, length + len(tokens) - 1, tokens[-1:], causal(length + len(tokens) - 1, 1))[-1]
    return Answer(tokens, logprobs, margins)


def turn(model, layer: int, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines by which a layer's keys are rotated when they move by ``distance`` positions."""
    rotary, probe = model.base_model.rotary_emb, torch.zeros(1, 1, 1)
    # A model with several kinds of layers can have an embedding for each of them.
    kind = [model.config.layer_types[layer]] if hasattr(rotary, "layer_types") else []
    factor = float(getattr(rotary, "".join([*(f"{one}_" for one in kind), "attention_scaling"])))
    cos, sin = rotary(probe, torch.tensor([[distance]]), *kind)
    return cos[0, 0] / factor, sin[0, 0] / factor


def moved(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates keys. The elements to rotate come first; the others stay unchanged."""
    width = cos.shape[-1]
    turning, still = keys[..., :width], keys[..., width:]
    turned = torch.cat([-turning[..., width // 2 :], turning[..., : width // 2]], -1)
    return torch.cat([turning * cos + turned * sin, still], -1)


@torch.no_grad()
def after(model, before: list[int], parts: list[list[int]], question: list[int], count: int) -> Answer:
    """Returns greedy tokens and log-probabilities of the two-phase computation. ``before`` are the tokens that
    each chunk sees before its own.
    """
    system = parts[0]
    merged = DynamicCache()
    rest(model, merged, 0, system, causal(0, len(system)))
    start = len(system)
    for chunk in parts[1:]:
        own = DynamicCache()
        both = [*before, *chunk]
        rest(model, own, 0, both, causal(0, len(both)))
        for layer, kept in enumerate(own.layers):
            keys, values = kept.keys[:, :, len(before) :], kept.values[:, :, len(before) :]
            merged.update(moved(keys, *turn(model, layer, start - len(before))), values, layer)
        start += len(chunk)
    logs = rest(model, merged, start, question, causal(start, len(question)))
    return continued(model, merged, start + len(question), logs[-1], count)
