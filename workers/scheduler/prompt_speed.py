"""How fast prompts are computed, by the steps of late."""

from __future__ import annotations

from typing import Final

FORGETS_TOKENS: Final = 100_000
"""After so many prompt tokens, what was measured before counts half."""


class PromptSpeed:
    """Seconds that a token of a long prompt takes to be computed, beside the decode rows of late.

    A step with a few prompt tokens takes about as long as one with many, so their mean would say nothing of a long
    prompt. It is a line through the origin, fitted to the steps: one with ten times as many tokens counts a hundred
    times as much.
    """

    def __init__(self) -> None:
        self._products = self._squares = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        if tokens > 0:
            kept = 0.5 ** (tokens / FORGETS_TOKENS)
            self._products = kept * self._products + tokens * seconds
            self._squares = kept * self._squares + tokens * tokens

    def token_s(self) -> float | None:
        """Seconds a token; None before the first step with any."""
        return self._products / self._squares if self._squares else None
