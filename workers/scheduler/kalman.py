"""The Kalman filter of values that wander (Kalman, "A new approach to linear filtering and prediction problems", 1960).

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


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
