"""Factors of a linear model that follow what is observed: a Kalman filter whose state is a random walk (Kalman, "A new
approach to linear filtering and prediction problems", 1960).

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

NOISE: Final = 0.03
"""Of what is expected, the standard deviation of what is observed of equal steps."""
DRIFT: Final = 0.02
"""Of a factor's first standard deviation, how far it wanders from one observation to the next."""
FAR: Final = 3.0
"""Standard deviations beyond which an observation says that the machine was busy, and nothing else. Two in a row to one
side, or more than `MOST_FAR` to any, say that the factors are other ones: these then are as uncertain as at first."""
MOST_FAR: Final = 4
LEAST, MOST = 1 / 64, 64.0
"""Of its first value, what a factor may become."""


class Following:
    """Factors f, of which observed sums of f_i x_i tell."""

    def __init__(self, values: Sequence[float], deviations: Sequence[float]) -> None:
        """What they are taken to be at first, above 0, and the standard deviations of that."""
        self.values, self._first = list(values), tuple(values)
        self._variances = [deviation * deviation for deviation in deviations]
        self._covariance = self._certain_of_nothing()
        self._far = 0
        """Whether the newest observation was far off, and to which side."""
        self._far_ones = 0
        """How many in a row were."""

    def total(self, parts: Sequence[float]) -> float:
        """The sum that is expected for these x."""
        return sum(value * part for value, part in zip(self.values, parts, strict=True))

    def observe(self, parts: Sequence[float], seen: float, *, beside: float = 0.0) -> bool:
        """The sum for these x, in their unit; whether it was taken in. `beside`: what else was in the quantity that was
        measured, whose noise is in what was seen."""
        expected = self.total(parts)
        noise = (NOISE * (beside + expected)) ** 2
        spread, variance = self._uncertainty(parts, noise)
        off, most = seen - expected, FAR * sqrt(variance)
        before, self._far = self._far, 0 if abs(off) <= most else 1 if off > 0 else -1
        self._far_ones = self._far_ones + 1 if self._far else 0
        if self._far:
            if self._far != before and self._far_ones <= MOST_FAR:
                return False
            self._covariance = self._certain_of_nothing()
            spread, variance = self._uncertainty(parts, noise)
            off = min(max(off, -FAR * sqrt(variance)), FAR * sqrt(variance))
        for i, first in enumerate(self._first):
            self.values[i] = min(max(self.values[i] + spread[i] * off / variance, LEAST * first), MOST * first)
            for j, other in enumerate(spread):
                self._covariance[i][j] -= spread[i] * other / variance
            self._covariance[i][i] += DRIFT * DRIFT * self._variances[i]
        self._bound()
        return True

    def _uncertainty(self, parts: Sequence[float], noise: float) -> tuple[list[float], float]:
        """(covariances of the factors with a sum for these x, the variance of what is seen of it)."""
        spread = [sum(c * x for c, x in zip(row, parts, strict=True)) for row in self._covariance]
        return spread, sum(s * x for s, x in zip(spread, parts, strict=True)) + noise

    def _certain_of_nothing(self) -> list[list[float]]:
        return [[v if i == j else 0.0 for j in range(len(self._first))] for i, v in enumerate(self._variances)]

    def _bound(self) -> None:
        """No factor is less certain than at the beginning, also where nothing was seen of it for long."""
        scale = [min(1.0, sqrt(v / self._covariance[i][i])) for i, v in enumerate(self._variances)]
        for i, row in enumerate(self._covariance):
            self._covariance[i] = [scale[i] * factor * value for factor, value in zip(scale, row, strict=True)]
