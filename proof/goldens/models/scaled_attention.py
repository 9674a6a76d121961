"""Attention with a temperature and a scale for documents, as defined by its formula.

    softmax over the documents     at logits / T, with the log-sum-exp L_d
    softmax over all other tokens  at their logits, with the log-sum-exp L_r
    merged                         (e^(S L_d) documents + e^L_r others) / (e^(S L_d) + e^L_r)

after APE (Yang et al., 2025), with the temperature T and the scale S.
"""

from __future__ import annotations

import contextlib
import sys

import torch


def merged(scores, values, documents, temperature, scale):
    """Returns the attention of rows `[..., rows, keys]`; `documents` are the scaled columns."""
    parts = []
    for columns, divisor, factor in ((documents, temperature, scale), (~documents, 1.0, 1.0)):
        logits = scores[..., columns] / divisor
        weights = torch.softmax(logits, dim=-1).nan_to_num()  # of rows that see none of them
        parts.append((factor * torch.logsumexp(logits, dim=-1, keepdim=True), weights @ values[..., columns, :]))
    total = torch.logaddexp(parts[0][0], parts[1][0])
    return sum((lse - total).exp() * out for lse, out in parts)


@contextlib.contextmanager
def scaled(model, rows, documents, temperature, scale):
    """Replaces the model's eager attention: `rows` attend to `documents` with the temperature and scale, all
    other rows as usual."""
    module = sys.modules[type(model).__module__]
    ordinary = module.eager_attention_forward

    def forward(layer, query, key, value, attention_mask, scaling, dropout=0.0, **rest):
        out, weights = ordinary(layer, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **rest)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = (query[:, :, rows] @ key.transpose(2, 3)) * scaling
        scores = scores.masked_fill(attention_mask[:, :, rows] < 0, float("-inf"))
        out = out.clone()
        out[:, rows] = merged(scores, value, documents, temperature, scale).transpose(1, 2)
        return out, weights

    module.eager_attention_forward = forward
    try:
        yield
    finally:
        module.eager_attention_forward = ordinary
