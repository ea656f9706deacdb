"""Times of steps of decode rows: measured at the start, and followed since.

What was measured is off by a factor for every bucket of rows and every width: real tokens wake other experts, contexts
grow. In a bucket most of it is common to all widths, and changes fast; the rest is a width's own, and changes slowly.
So the logarithms of a bucket's factors are followed by a Kalman filter whose variances say just that.
A step of one width moves what is expected of the others by as much as is likely to be common, and what is known of a
width counts for less the longer it has not been run.

The filter is that of values that wander (Kalman, "A new approach to linear filtering and prediction problems", 1960).
The factors of a linear model follow what is observed by one as well (`Following`), and leave out what was held up.

Imports no torch, as all of the scheduler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from math import exp, log, sqrt
from typing import Final

from workers.protocol.report import StepTime


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
"""Standard deviation of what is observed of equal steps, as a share of what is expected; of logarithms the same."""
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


DRAFT_COST: Final = 0.25
"""Share of a step that each draft is taken to cost where nothing was measured."""
UNUSUAL: Final = 3.0
"""A step that took so many times what was expected, or so little of it, says nothing: the machine was busy."""
UNUSUAL_IN_A_ROW: Final = 3
"""Unusual steps in a row after which the expectation, and not the steps, is taken to be wrong."""
COMMON, OWN = 0.3, 0.2
"""Standard deviations of what the self-test may be off, for all widths of a bucket alike, and for each by itself. This
and all below are of logarithms: shares of a step's time."""
COMMON_UNMEASURED: Final = 2.0
"""The first where there was no self-test."""
COMMON_DRIFT, OWN_DRIFT = 0.01, 0.001
"""Standard deviations of how both change from a step to the next one."""
LONGEST: Final = 1000
"""Steps after which what was known of a bucket is as uncertain as it gets by not being run."""
SURPRISING: Final = 3.0
"""Standard deviations beyond which a step counts for no more than this, as it may be one that was held up. But what is
known is as uncertain from then on as would make it less surprising, and those that follow count for more."""
FRESH: Final = 8
"""Steps after a change of width in which what is surprising is taken to be the width's own."""


class StepTimes:
    """Seconds of a step of decode rows, by rows and width."""

    def __init__(self, measured: Iterable[StepTime], width: int) -> None:
        """`measured`: at the start, in any order; steps of up to `width` tokens per row, and mixed ones, which do not
        count here."""
        points: dict[int, dict[int, float]] = {}
        for time in measured:
            if time.width <= width and time.seconds > 0 and not time.prompt_tokens:
                points.setdefault(time.width, {})[time.rows] = time.seconds
        # Of some widths only: what a draft costs is taken from those there are, else from nothing.
        self._tables = {w: (sorted(table), [table[rows] for rows in sorted(table)]) for w, table in points.items()}
        self._sizes = sorted({rows for table in points.values() for rows in table})
        self._width = width
        self._followed: dict[int, _Bucket] = {}
        self._steps = self._unusual = 0

    def seconds(self, rows: int, width: int) -> float:
        """Return the seconds that a step is expected to take."""
        place = self._bucket(rows)
        factors, measured = self._nearest(place), self._measured(rows, width)
        if factors is None:
            return measured
        logs = factors.log if place in self._followed else factors.likely()
        return measured * exp(logs[width - 1])

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Take in the time of a step."""
        found = seconds / self.seconds(rows, width)
        self._unusual = 0 if 1 / UNUSUAL < found < UNUSUAL else self._unusual + 1
        if 0 < self._unusual <= UNUSUAL_IN_A_ROW and self._tables:
            return
        self._steps += 1
        place = self._bucket(rows)
        factors = self._followed.get(place)
        if factors is None:
            nearest = self._nearest(place)
            begin = [0.0] * self._width if nearest is None else nearest.likely()
            factors = self._followed[place] = _Bucket(begin, COMMON if self._tables else COMMON_UNMEASURED)
        factors.observe(width - 1, log(seconds / self._measured(rows, width)), self._steps)

    def known(self, rows: int) -> bool:
        """Whether steps were observed in the bucket of so many rows."""
        return self._bucket(rows) in self._followed

    def _bucket(self, rows: int) -> int:
        """Rows run in the smallest bucket that holds them; beyond the last one they take as long as that."""
        sizes = self._sizes
        return min(bisect_left(sizes, rows), len(sizes) - 1) if sizes else rows.bit_length()

    def _nearest(self, place: int) -> _Bucket | None:
        """Return the factors of a bucket, or of the nearest one in which steps were observed."""
        found = self._followed.get(place)
        if found is None and self._followed:
            found = self._followed[min(self._followed, key=lambda known: abs(known - place))]
        return found

    def _measured(self, rows: int, width: int) -> float:
        table = self._tables.get(width)
        if table is None:
            others = sorted(self._tables, key=lambda known: abs(known - width))
            if not others:
                return 1e-3 * (1 + DRAFT_COST * (width - 1))
            scale = (1 + DRAFT_COST * (width - 1)) / (1 + DRAFT_COST * (others[0] - 1))
            return scale * self._measured(rows, others[0])
        sizes, seconds = table
        return seconds[min(bisect_left(sizes, rows), len(sizes) - 1)]


class _Bucket:
    """Factors by which each width's steps are off what was measured, as far as they are known."""

    def __init__(self, begin: list[float], common: float) -> None:
        self._filter = Kalman(begin, [OWN] * len(begin), [common] * len(begin))
        self._seen = 0
        """The step that was observed last."""
        self._index, self._run = -1, 0
        """Index of that step's width, and the number of steps of this width in a row."""

    @property
    def log(self) -> list[float]:
        """Logarithms of the factors, by width."""
        return self._filter.values

    def observe(self, index: int, found: float, step: int) -> None:
        """A step of the width of this index, whose logarithm is off by `found`."""
        widths, known = range(len(self.log)), self._filter
        gone = min(step - self._seen, LONGEST) if self._seen else 1
        self._seen = step
        known.wander([gone * OWN_DRIFT**2] * len(widths), gone * COMMON_DRIFT**2)
        known.bound()
        self._run = self._run + 1 if index == self._index else 1
        self._index = index
        off = found - self.log[index]
        spread, variance = known.uncertainty([float(i == index) for i in widths], NOISE**2)
        most = SURPRISING * sqrt(variance)
        more = (off / 2) ** 2 if abs(off) > most else 0.0
        known.move(spread, min(max(off, -most), most), variance)
        if more and self._run <= FRESH:
            known.wander([min(more, OWN**2) * (i == index) for i in widths])
        elif more:
            known.wander([0.0] * len(widths), min(more, COMMON**2))

    def likely(self) -> list[float]:
        """Return the factors to expect in another bucket: the same in common, and half of what is a width's own."""
        common = sum(self.log) / len(self.log)
        return [(common + own) / 2 for own in self.log]
