"""Caches of fewer bits: keys and values as such a cache gives them back."""

from __future__ import annotations

import contextlib
import sys

from transformers import DynamicCache


class Rounded(DynamicCache):
    """What is cached, rounded where it is stored. `unrotated`: keys were rounded before their rotation; `copied`:
    keys that move are copied, and rounded again; `stored`: rotates keys of a layer to where they are stored, and back
    if it is told so."""

    def __init__(self, dtype, unrotated=False, copied=False, latent=False, stored=lambda keys, layer, back: keys):
        super().__init__()
        self.dtype, self.unrotated, self.copied, self.latent, self.stored = dtype, unrotated, copied, latent, stored

    def update(self, keys, values, layer_idx, *args, **rest):
        rounded = lambda x: x.to(self.dtype).float()
        key = lambda x: x if self.unrotated else self.stored(rounded(self.stored(x, layer_idx, False)), layer_idx, True)
        # Latent attention caches latents as keys and what is rotated as values.
        keys, values = (rounded(keys), key(values)) if self.latent else (key(keys), rounded(values))
        return super().update(keys, values, layer_idx, *args, **rest)

    def moved(self, keys):
        """Keys after a move."""
        return keys.to(self.dtype).float() if self.copied else keys


@contextlib.contextmanager
def before_rotation(model, dtype):
    """The model rounds every key before it rotates it."""
    module = sys.modules[type(model).__module__]
    names = [name for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave") if hasattr(module, name)]
    ordinary = {name: getattr(module, name) for name in names}
    for name, rotate in ordinary.items():
        setattr(module, name, lambda q, k, *args, rotate=rotate, **rest: rotate(q, k.to(dtype).float(), *args, **rest))
    try:
        yield
    finally:
        for name, rotate in ordinary.items():
            setattr(module, name, rotate)
