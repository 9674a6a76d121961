"""Compares the answers that two computations of one model give, token by token."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE = 1e-3
"""The maximum difference between f32 log-probabilities that counts as rounding, and the maximum margin
between two tokens that rounding can reverse."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities and, for a reference, each token's margin over the
    runner-up.
    """

    tokens: list[int]
    logprobs: list[float]
    margins: list[float] | None = None


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison."""

    compared: int
    """The number of tokens compared: all of them, or only the ones before a near-tie where the answers
    differ."""
    apart: float
    """The largest difference between their log-probabilities."""
    fault: str | None

    @property
    def words(self) -> str:
        return f"{self.compared} tokens, log-probabilities apart {self.apart:.0e}"


def compare(got: Answer, reference: Answer) -> Comparison:
    """Compares an answer with a reference.

    Rounding may decide between tokens whose margin is at most ``CLOSE``. Answers may differ after such a
    near-tie, so the comparison ends there. An answer that differs from the reference at any other token is
    wrong.
    """
    apart, compared = 0.0, 0
    if len(got.tokens) != len(reference.tokens):
        return Comparison(0, apart, f"{len(got.tokens)} tokens instead of {len(reference.tokens)}")
    for at, (token, expected) in enumerate(zip(got.tokens, reference.tokens)):
        margin = reference.margins[at] if reference.margins else float("inf")
        if token != expected and margin > CLOSE:
            return Comparison(compared, apart, f"token {at} is {token} instead of {expected}, which is ahead by {margin:.1e}")
        # At a near-tie, the likeliest token has nearly the same probability in both. `not <=` also rejects
        # NaN.
        difference = abs(got.logprobs[at] - reference.logprobs[at])
        if not difference <= CLOSE:
            fault = f"the log-probability of token {at} is {got.logprobs[at]:.5f} instead of {reference.logprobs[at]:.5f}"
            return Comparison(compared, difference, fault)
        apart = max(apart, difference)
        if token != expected:
            break
        compared = at + 1
    fault = None if compared else "a near-tie at the first token leaves nothing to compare; use another prompt"
    return Comparison(compared, apart, fault)
