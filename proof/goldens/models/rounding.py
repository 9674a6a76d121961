"""Caches of fewer bits: keys and values as such a cache gives them back."""

from __future__ import annotations

import contextlib
import sys

import torch
from transformers import DynamicCache


def dense(dtype):
    """An element type; of eight-bit floats what is too large becomes the largest."""
    limit = torch.finfo(dtype).max
    return lambda x: x.clamp(-limit, limit).to(dtype).float()


def integers(largest, group):
    """Codes from -largest to largest, with a scale in f16, rounded up, for each group of a row's elements."""
    def rounded(x):
        parts = x.unflatten(-1, (-1, group))
        most = parts.abs().amax(dim=-1, keepdim=True)
        near = (most / largest).half()
        scale = torch.where(near.float() * largest < most, torch.nextafter(near, near.new_tensor(float("inf"))), near)
        step = scale.float()
        codes = torch.where(step > 0, (parts / step).clamp(-largest, largest).round(), 0.0)
        return (codes * step).flatten(-2)
    return rounded


# What caches store, by the word for it.
FORMATS = {
    "f16": dense(torch.float16), "bf16": dense(torch.bfloat16), "int8:4": integers(127, 4), "int4:4": integers(7, 4),
    "fp8-e4m3": dense(torch.float8_e4m3fn), "fp8-e5m2": dense(torch.float8_e5m2),
}


class Rounded(DynamicCache):
    """What is cached, in a format and rounded where it is stored. `unrotated`: keys were rounded before their rotation;
    `copied`: keys that move are copied, and rounded again; `latent`: of latent attention; `interleaved`: keys whose pairs
    transformers takes apart are rounded as they were; `stored`: rotates keys of a layer to where they are stored, and
    back if it is told so."""

    def __init__(self, rounded, unrotated=False, copied=False, latent=False, interleaved=False,
                 stored=lambda keys, layer, back: keys):
        super().__init__()
        self.rounded, self.unrotated, self.copied, self.latent = rounded, unrotated, copied, latent
        self.interleaved, self.stored = interleaved, stored

    def key(self, keys):
        if not self.interleaved:
            return self.rounded(keys)
        pairs = self.rounded(keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))
        return pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def update(self, keys, values, layer_idx, *args, **rest):
        rounded = self.rounded
        key = lambda x: x if self.unrotated else self.stored(self.key(self.stored(x, layer_idx, False)), layer_idx, True)
        # Latent attention caches latents as keys and what is rotated as values.
        keys, values = (rounded(keys), key(values)) if self.latent else (key(keys), rounded(values))
        return super().update(keys, values, layer_idx, *args, **rest)

    def moved(self, keys):
        """Keys after a move."""
        return self.key(keys) if self.copied else keys


@contextlib.contextmanager
def before_rotation(model, rounded):
    """The model rounds every key before it rotates it."""
    module = sys.modules[type(model).__module__]
    names = [name for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave") if hasattr(module, name)]
    ordinary = {name: getattr(module, name) for name in names}
    for name, rotate in ordinary.items():
        setattr(module, name, lambda q, k, *args, rotate=rotate, **rest: rotate(q, rounded(k), *args, **rest))
    try:
        yield
    finally:
        for name, rotate in ordinary.items():
            setattr(module, name, rotate)
