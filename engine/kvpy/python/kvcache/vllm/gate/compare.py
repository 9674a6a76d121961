"""Answers of two computations of one model, compared token by token."""

from __future__ import annotations

from dataclasses import dataclass

CLOSE = 1e-3
"""Log-probabilities in f32 may be so far apart, and two tokens so near to each other that rounding decides between them."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the log-probability of each and, for a reference, how far each is ahead of the second likeliest."""

    tokens: list[int]
    logprobs: list[float]
    margins: list[float] | None = None


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison."""

    compared: int
    """The number of tokens that were compared: those before a near-tie at which the answers part."""
    apart: float
    """The largest difference of their log-probabilities."""
    fault: str | None

    @property
    def words(self) -> str:
        return f"{self.compared} tokens, log-probabilities apart {self.apart:.0e}"


def compare(got: Answer, reference: Answer) -> Comparison:
    """Compares an answer with a reference's.

    Rounding decides between tokens that are no farther apart than ``CLOSE``. Behind such a near-tie the texts differ, so that answers
    that part there are compared up to there. An answer that parts from the reference anywhere else is wrong.
    """
    apart, compared = 0.0, 0
    if len(got.tokens) != len(reference.tokens):
        return Comparison(0, apart, f"{len(got.tokens)} tokens instead of {len(reference.tokens)}")
    for at, (token, expected) in enumerate(zip(got.tokens, reference.tokens)):
        margin = reference.margins[at] if reference.margins else float("inf")
        if token != expected and margin > CLOSE:
            return Comparison(compared, apart, f"token {at} is {token} instead of {expected}, which is ahead by {margin:.1e}")
        # The likeliest has nearly the same probability in both, whichever token it is. A difference that is no number is too large.
        difference = abs(got.logprobs[at] - reference.logprobs[at])
        if not difference <= CLOSE:
            fault = f"the log-probability of token {at} is {got.logprobs[at]:.5f} instead of {reference.logprobs[at]:.5f}"
            return Comparison(compared, difference, fault)
        apart = max(apart, difference)
        if token != expected:
            break
        compared = at + 1
    fault = None if compared else "a near-tie at the first token leaves nothing to compare: take another prompt"
    return Comparison(compared, apart, fault)
