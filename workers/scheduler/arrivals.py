"""Numbers that order requests by when they arrived, here or at an engine that had them before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Final

_BELOW: Final = 64
"""Bits for the count of those that arrived in the same microsecond."""


class Arrivals:
    """Gives arrival numbers: the earlier a request arrived, the lower its number is; of two that arrived in one
    microsecond the first to be numbered has the lower one. No two numbers are equal."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock, self._count = clock, count()

    def number(self, arrived: float | None = None) -> int:
        """The number of a request that arrived at that time of the clock, by default now."""
        at = self._clock() if arrived is None else arrived
        return (round(at * 1e6) << _BELOW) + next(self._count)
