"""Recomputation by deviation, said plainly: one pass over all tokens under full attention, in which tokens that
were not chosen have their stored keys and values from the layer of the check on.

What an unchosen token's own row computes from there on is seen by nobody.
"""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache


class Blended(DynamicCache):
    """From `layer` on the tokens in `kept` have the keys and values of the cache `stored`."""

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
        """Before the check too, tokens that were not chosen are as they are stored once the pass is over."""
        for ours, stored in zip(self.layers[:self.layer], self.stored.layers):
            ours.keys[:, :, self.kept] = stored.keys[:, :, self.kept]
            ours.values[:, :, self.kept] = stored.values[:, :, self.kept]


def deviations(fresh, stored, layer, tokens):
    """Of each of `tokens`: squared distances of K and of V, each by the mean square of what is fresh."""
    total = torch.zeros(len(tokens))
    for kind in ("keys", "values"):
        ours, theirs = (getattr(cache.layers[layer], kind)[0][:, tokens] for cache in (fresh, stored))
        square = lambda x: x.square().sum(dim=(0, 2))
        total += square(ours - theirs) / square(ours).mean()
    return total


def chosen(fresh, stored, layer, candidates, share_of, share):
    """The `share` of `share_of` tokens that deviate most, of `candidates`, rising."""
    count = min(math.ceil(share_of * share - 1e-9), len(candidates))
    scores = deviations(fresh, stored, layer, candidates)
    order = torch.argsort(scores, descending=True, stable=True)
    gap = scores[order[count - 1]] - (scores[order[count]] if count < len(candidates) else 0.0)
    assert gap > 1e-4 * scores[order[count - 1]], f"the choice hangs on rounding: {gap}"
    return sorted(candidates[i] for i in order[:count].tolist())
