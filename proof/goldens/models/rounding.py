"""Caches with fewer bits: rounds keys and values to what such a cache returns."""

from __future__ import annotations

import contextlib
import sys

import torch
from transformers import DynamicCache


def dense(dtype):
    """Rounds to an element type. In eight-bit floats, values that are too large become the maximum."""
    limit = torch.finfo(dtype).max
    return lambda x: x.clamp(-limit, limit).to(dtype).float()


def integers(largest, group):
    """Rounds to codes from -largest to largest. Each group of a row's elements has an f16 scale, rounded
    up.
    """
    def rounded(x):
        parts = x.unflatten(-1, (-1, group))
        most = parts.abs().amax(dim=-1, keepdim=True)
        near = (most / largest).half()
        scale = torch.where(near.float() * largest < most, torch.nextafter(near, near.new_tensor(float("inf"))), near)
        step = scale.float()
        codes = torch.where(step > 0, (parts / step).clamp(-largest, largest).round(), 0.0)
        return (codes * step).flatten(-2)
    return rounded


# The cache formats, by name.
FORMATS = {
    "f16": dense(torch.float16), "bf16": dense(torch.bfloat16), "int8:4": integers(127, 4), "int4:4": integers(7, 4),
    "fp8-e4m3": dense(torch.float8_e4m3fn), "fp8-e5m2": dense(torch.float8_e5m2),
}


# Decision: docs/decisions/tools.md#the-reference-rounds-where-this-cache-stores
class Rounded(DynamicCache):
    """Cached rows, rounded to a format at their stored position. `unrotated`: keys were rounded before their
    rotation; `copied`: moved keys are copied, and rounded again; `latent`: rows of latent attention;
    `interleaved`: keys whose pairs transformers de-interleaves are rounded interleaved; `stored`: rotates
    keys of a layer to their stored position, or back."""

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
        # Latent attention caches latents as keys and the rotated part as values.
        keys, values = (rounded(keys), key(values)) if self.latent else (key(keys), rounded(values))
        return super().update(keys, values, layer_idx, *args, **rest)

    def moved(self, keys):
        """Returns the keys after they are moved."""
        return self.key(keys) if self.copied else keys


@contextlib.contextmanager
def before_rotation(model, rounded):
    """Makes the model round every key before its rotation."""
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
