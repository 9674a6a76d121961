"""Recomputation by deviation in its plain form: one pass over all tokens under full attention. Starting at
the layer of the check, tokens that were not chosen have their stored keys and values.

Starting at that layer, no token sees the rows that unchosen tokens compute.
"""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache


class Blended(DynamicCache):
    """A cache in which, starting at `layer`, the tokens in `kept` have the keys and values of the cache
    `stored`.
    """

    def __init__(self, stored, kept, layer):
        super().__init__()
        self.stored, self.kept, self.layer = stored, kept, layer

    def update(self, keys, values, layer_idx, *args, **rest):
        if layer_idx >= self.layer and keys.shape[2] > 1:
            keys, values = keys.clone(), values.clone()
            keys[:, :, self.kept] = self.stored.layers[layer_idx].keys[:, :, self.kept]
            values[:, :, self.kept] = self.stored.layers[layer_idx].values[:, :, self.kept]
        return super().update(keys, values, layer_idx, *args, **rest)

    def settle(self):
        """After the pass, gives the tokens that were not chosen their stored rows in the layers before the
        check too.
        """
        for ours, stored in zip(self.layers[:self.layer], self.stored.layers):
            ours.keys[:, :, self.kept] = stored.keys[:, :, self.kept]
            ours.values[:, :, self.kept] = stored.values[:, :, self.kept]


def deviations(fresh, stored, layer, tokens):
    """Returns the squared distances of K and of V for each of `tokens`, divided by the fresh rows' mean
    square.
    """
    total = torch.zeros(len(tokens))
    for kind in ("keys", "values"):
        ours, theirs = (getattr(cache.layers[layer], kind)[0][:, tokens] for cache in (fresh, stored))
        square = lambda x: x.square().sum(dim=(0, 2))
        total += square(ours - theirs) / square(ours).mean()
    return total


def chosen(fresh, stored, layer, candidates, share_of, share):
    """Returns the candidates that deviate most, in ascending order: the `share` of `share_of` tokens."""
    count = min(math.ceil(share_of * share - 1e-9), len(candidates))
    scores = deviations(fresh, stored, layer, candidates)
    order = torch.argsort(scores, descending=True, stable=True)
    gap = scores[order[count - 1]] - (scores[order[count]] if count < len(candidates) else 0.0)
    assert gap > 1e-4 * scores[order[count - 1]], f"the choice hangs on rounding: {gap}"
    return sorted(candidates[i] for i in order[:count].tolist())
