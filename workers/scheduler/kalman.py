"""The Kalman filter of values that wander (Kalman, "A new approach to linear filtering and prediction problems", 1960),
and factors of a linear model that follow what is observed by one, and leave out what was held up.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import Final


class Kalman:
    """Values v, of which observed sums of v_i x_i tell. No value is ever less certain than at the beginning, also where
    nothing was seen of it for long."""

    def __init__(self, values: Sequence[float], deviations: Sequence[float], common: Sequence[float] = ()) -> None:
        """`values`: first values. `deviations`: standard deviation of each by itself. `common`: standard deviation of
        its part in what the values have in common, if anything."""
        self.values = list(values)
        self._deviations, self._common = tuple(deviations), tuple(common) or (0.0,) * len(self.values)
        self.forget()

    def forget(self) -> None:
        """Make the values as uncertain as at the beginning."""
        self._covariance = [
            [self._common[i] * self._common[j] + (own * own if i == j else 0.0) for j in range(len(self.values))]
            for i, own in enumerate(self._deviations)
        ]

    def uncertainty(self, parts: Sequence[float], noise: float) -> tuple[list[float], float]:
        """(covariances of the values with the sum for these x, the variance of what is seen of that sum). `noise`: the
        variance of observations alike."""
        spread = [sum(c * x for c, x in zip(row, parts, strict=True)) for row in self._covariance]
        return spread, sum(s * x for s, x in zip(spread, parts, strict=True)) + noise

    def move(self, spread: Sequence[float], off: float, variance: float) -> None:
        """Take in an observation that was `off` what was expected. The others: of `uncertainty`."""
        for i, of_value in enumerate(spread):
            self.values[i] += of_value * off / variance
            for j, other in enumerate(spread):
                self._covariance[i][j] -= of_value * other / variance

    def wander(self, own: Sequence[float], common: float = 0.0) -> None:
        """Make the values less certain, by variances: of each value, and of all alike."""
        for i, row in enumerate(self._covariance):
            for j in range(len(row)):
                row[j] += common
            row[i] += own[i]

    def bound(self) -> None:
        """Hold it to what was uncertain at the beginning."""
        most = [shared * shared + own * own for shared, own in zip(self._common, self._deviations, strict=True)]
        scale = [min(1.0, sqrt(limit / self._covariance[i][i])) for i, limit in enumerate(most)]
        for i, row in enumerate(self._covariance):
            self._covariance[i] = [scale[i] * factor * value for factor, value in zip(scale, row, strict=True)]


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
