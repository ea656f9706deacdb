"""Factors of a linear model that follow what is observed, by a Kalman filter, and leave out what was held up.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import Final

from workers.scheduler.kalman import Kalman

NOISE: Final = 0.03
"""Standard deviation of what is observed of equal steps, as a share of what is expected."""
DRIFT: Final = 0.02
"""Distance that a factor wanders from one observation to the next, as a share of its first standard deviation."""
FAR: Final = 3.0
"""Standard deviations beyond which an observation says that the machine was busy, and nothing else. Two in a row to one
side, or more than `MOST_FAR` to any, say that the factors are other ones: these then are as uncertain as at first. So
do two of one kind that were less than expected, whatever came between them: nothing is held up to take less."""
MOST_FAR: Final = 4
"""Observations in a row that are far off, of which nothing is believed unless two follow to one side."""
LEAST, MOST = 1 / 64, 64.0
"""Bounds of a factor, as multiples of its first value."""


class Following:
    """Factors f, of which observed sums of f_i x_i tell."""

    def __init__(self, values: Sequence[float], deviations: Sequence[float], common: Sequence[float] = ()) -> None:
        """`values`: first values of the factors, above 0. `deviations`, `common`: standard deviations, as for a
        `Kalman`."""
        self._filter, self._first = Kalman(values, deviations, common), tuple(values)
        self._drift = [(DRIFT * deviation) ** 2 for deviation in deviations]
        self._far = 0
        """Whether the newest observation was far off, and to which side."""
        self._far_ones = 0
        """Number of observations in a row that were far off."""
        self._far_of: dict[Hashable, int] = {}
        """Whether the newest observation of each kind was, and to which side."""

    @property
    def values(self) -> list[float]:
        """The factors."""
        return self._filter.values

    def total(self, parts: Sequence[float]) -> float:
        """The sum that is expected for these x."""
        return sum(value * part for value, part in zip(self.values, parts, strict=True))

    def observe(self, parts: Sequence[float], seen: float, *, beside: float = 0.0, kind: Hashable = None) -> bool:
        """The sum for these x, in their unit; whether it was taken in. `beside`: what else was in the quantity that was
        measured, whose noise is in what was seen. `kind`: of x, of which there are few."""
        expected = self.total(parts)
        noise = (NOISE * (beside + expected)) ** 2
        spread, variance = self._filter.uncertainty(parts, noise)
        off, most = seen - expected, FAR * sqrt(variance)
        before, self._far = self._far, 0 if abs(off) <= most else 1 if off > 0 else -1
        self._far_ones = self._far_ones + 1 if self._far else 0
        less = self._far < 0 and self._far_of.get(kind, 0) < 0
        self._far_of[kind] = self._far
        if self._far:
            if self._far != before and self._far_ones <= MOST_FAR and not less:
                return False
            self._filter.forget()
            spread, variance = self._filter.uncertainty(parts, noise)
            off = min(max(off, -FAR * sqrt(variance)), FAR * sqrt(variance))
        self._filter.move(spread, off, variance)
        for i, first in enumerate(self._first):
            self.values[i] = min(max(self.values[i], LEAST * first), MOST * first)
        self._filter.wander(self._drift)
        self._filter.bound()
        return True
