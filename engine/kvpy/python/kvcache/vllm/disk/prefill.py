"""The measured time that computing takes, with which loads are compared."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

SURE = 1024
"""The number of tokens after which a measurement is relied on. Shorter steps take longer per token."""
KEPT = 0.75
"""The part of earlier steps that is kept when another step is measured."""

RELIED_ON = 0.8
"""The part of a stored time that is relied on. The process that stored it also copied and wrote records meanwhile."""


class PrefillRate:
    """The moving average of a prefill's time per token, in which longer steps weigh more."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._all = 0

    def measured(self, tokens: int, seconds: float) -> None:
        """Notes how long a step took to compute this many tokens."""
        self._seconds = KEPT * self._seconds + seconds
        self._tokens = KEPT * self._tokens + tokens
        self._all += tokens

    def cost(self, tokens: int, other: float = 0.0) -> float:
        """Returns the number of seconds to compute tokens, or 0 if it is not known. ``other`` is another measurement of the same
        tokens. As long as too few tokens were measured, the smaller number of the two is returned, so that a request does not
        wait longer than computing takes.
        """
        if not self._tokens:
            return other
        own = self._seconds / self._tokens * tokens
        return min(own, other) if other and self._all < SURE else own

    def cost_of_stored(self, tokens: int, stored: float) -> float:
        """Returns the number of seconds to compute tokens that took ``stored`` seconds when they were stored, or 0."""
        return self.cost(tokens, RELIED_ON * stored)


@dataclass(eq=False)
class FirstStep:
    """A step in which requests were scheduled for the first time."""

    began: float
    steps: int = 0
    """The number of steps that began after it."""
    seconds: float = 0.0
    """The time that it took, once it has ended."""
    tokens: int = 0
    """The number of tokens that it has computed, as far as their blocks are stored."""


class FirstSteps:
    """Measures computing by what a secondary tier sees: the steps in which requests begin, and the blocks that such a step
    leaves, of which vLLM tells a step later. Blocks of later steps are not measured, because most of them contain a token per
    step.
    """

    LONGEST = 4
    """The number of steps within which vLLM tells of a step's blocks, after its end."""

    def __init__(self, rate: PrefillRate, under_way: int = 1) -> None:
        self.rate, self.under_way = rate, under_way
        """vLLM begins as many steps before the first of them has ended."""
        self.steps: dict[str, FirstStep] = {}

    def step(self, new: Iterable[str]) -> None:
        """Notes that a step begins, with the requests that it schedules for the first time."""
        now, over = time.monotonic(), set()
        for step in set(self.steps.values()):
            step.steps += 1
            if step.steps == self.under_way:
                step.seconds = now - step.began
            elif step.seconds and step.tokens:
                self.rate.measured(step.tokens, step.seconds)
                over.add(step)
            elif step.steps >= self.under_way + self.LONGEST:
                over.add(step)
        self.steps = {name: step for name, step in self.steps.items() if step not in over}
        self.steps.update(dict.fromkeys(new, FirstStep(now)))

    def stored(self, request: str, tokens: list[int]) -> list[float]:
        """Notes that vLLM has blocks with this many more tokens each. Returns the number of seconds to compute each, or 0 if it
        is not known.
        """
        own, step = 0.0, self.steps.get(request)
        if step is not None:
            step.tokens += sum(tokens)
            # The first prompt of a process is measured by itself.
            own = (step.seconds or time.monotonic() - step.began) / max(step.tokens, 1)
        each = self.rate.cost(1, own)
        return [each * count for count in tokens]
