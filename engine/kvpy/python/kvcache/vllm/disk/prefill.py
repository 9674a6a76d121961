"""The measured time that computing takes, with which loads are compared."""

SURE = 1024
"""The number of tokens after which a measurement is relied on. Shorter steps take longer per token."""
KEPT = 0.75
"""The part of earlier steps that is kept when another step is measured."""


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

    def cost(self, tokens: int, stored: float = 0.0) -> float:
        """Returns the number of seconds to compute tokens, or 0 if it is not known. ``stored`` is what it took when they
        were stored. As long as too few tokens were measured, the smaller number of the two is returned, so that a request
        does not wait longer than computing takes.
        """
        if not self._tokens:
            return stored
        own = self._seconds / self._tokens * tokens
        return min(own, stored) if stored and self._all < SURE else own
