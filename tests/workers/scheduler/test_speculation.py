"""The chosen width against every fixed one, in simulated time; what drafts do, and what follows from it."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from workload import config

from workers.protocol.plan import DecodeBuckets, row_buckets
from workers.protocol.report import StepTime
from workers.scheduler.speculation import SETTLED, WINDOW, Acceptance, Baseline, Speculation
from workers.scheduler.step_times import StepTimes

MOST = 4
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MILLISECONDS = {
    "experts": (1.6, 2.3, 3.2, 4.7, 6.7, 7.6, 8.4, 9.4, 11.1),
    "dense": (5.0, 5.0, 5.1, 5.1, 5.2, 5.4, 5.8, 6.9, 9.0),
}
"""Milliseconds of a step by its tokens: of a model whose experts each token wakes anew, and of one that reads the same
weights."""


def step_seconds(kind: str, rows: int, width: int) -> float:
    """Return the seconds of a step with a draft pass for each draft, whose cost is that of its rows' share."""
    spent = MILLISECONDS[kind][bisect_left(TOKENS, rows * width)]
    return 1e-3 * (spent + (width - 1) * (0.1 + 0.04 * MILLISECONDS[kind][bisect_left(TOKENS, rows)]))


def measured(kind: str) -> tuple[StepTime, ...]:
    """Return times as a self-test measures them."""
    return tuple(
        StepTime(rows, width, step_seconds(kind, rows, width))
        for rows in row_buckets(64)
        for width in range(1, MOST + 1)
    )


def row() -> Any:
    """Make a row with what is followed of a request."""
    return SimpleNamespace(drafts_tried=[], drafts_accepted_at=[])


class Simulation:
    """A replica whose drafts are accepted with the probability that `chance` says, given the time and the row."""

    def __init__(
        self, kind: str, rows: int, chance: Callable[[float, int], float], times: Sequence[StepTime], seed: int = 0
    ) -> None:
        self.kind, self.chance = kind, chance
        self.requests: list[Any] = [row() for _ in range(rows)]
        self.random = random.Random(rows + 1000 * seed)
        self.speculation = Speculation(config(width=MOST, adaptive=True, step_times=tuple(times), token_budget=2000))
        self.buckets = DecodeBuckets(max(rows, 1), MOST, adaptive=True)
        self.seconds, self.tokens = 0.0, 0
        self.widths: Counter[int] = Counter()

    def run(self, until: float, length: int = 0) -> None:
        """Two plans in flight. With `length`, a row is another request after so many tokens."""
        flights: deque[int] = deque()
        gained = [0] * len(self.requests)
        while self.seconds < until:
            while len(flights) < 2:
                width, drafts = self.speculation.choose(len(self.requests))
                assert (width, drafts) in self.buckets.modes()
                self.speculation.planned(drafts)
                flights.append(width)
            width = flights.popleft()
            seconds = step_seconds(self.kind, len(self.requests), width)
            rows = []
            for index, request in enumerate(self.requests):
                accepted = 0
                while accepted < width - 1 and self.random.random() < self.chance(self.seconds, index):
                    accepted += 1
                rows.append((request, accepted))
                self.tokens += 1 + accepted
                gained[index] += 1 + accepted
                if length and gained[index] >= length:
                    self.requests[index], gained[index] = row(), 0
            self.seconds += seconds
            self.widths[width] += 1
            self.speculation.observe(width, rows, seconds, alone=True)


def fixed(kind: str, rows: int, width: int, chance: float) -> float:
    """Tokens a second of a width, exactly."""
    return rows * sum(chance**position for position in range(width)) / step_seconds(kind, rows, width)


@pytest.mark.parametrize("kind", MILLISECONDS)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    "rows", [1, pytest.param(8, marks=pytest.mark.long), 32, pytest.param(64, marks=pytest.mark.long)]
)
def test_never_much_slower_than_the_best_fixed_width(kind: str, rows: int, chance: float) -> None:
    tokens, seconds, widths = 0, 0.0, Counter[int]()
    for seed in range(4 if rows == 1 else 1):  # what a single row's drafts do differs by percents
        run = Simulation(kind, rows, lambda now, index: chance, measured(kind), seed)
        run.run(8.0 + rows / 4, length=200)
        tokens, seconds, widths = tokens + run.tokens, seconds + run.seconds, widths + run.widths
    best = max(fixed(kind, rows, width, chance) for width in range(1, MOST + 1))
    assert tokens / seconds >= 0.97 * best, widths


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_times_that_nobody_measured_are_learnt(chance: float) -> None:
    run = Simulation("experts", 1, lambda now, index: chance, ())
    run.run(20.0)
    best = max(fixed("experts", 1, width, chance) for width in range(1, MOST + 1))
    assert run.tokens / run.seconds >= 0.9 * best, run.widths


def test_drafts_that_begin_to_be_accepted_are_noticed() -> None:
    """Drafts that stop to be accepted are noticed, too."""
    run = Simulation("experts", 1, lambda now, index: 0.95 if 10 < now < 30 else 0.0, measured("experts"))
    run.run(10.0)
    assert run.widths[1] > 0.95 * run.widths.total()
    run.run(18.0)
    run.widths.clear()
    run.run(30.0)
    assert run.widths[1] < 0.05 * run.widths.total()
    run.run(31.0)
    run.widths.clear()
    run.run(40.0)
    assert run.widths[1] > 0.95 * run.widths.total()


def test_few_rows_are_followed_one_by_one() -> None:
    """The history of a row that ended is no reason to leave the width that pays for those that stay."""
    acceptance = Acceptance(2)
    good, bad = (row() for _ in range(2))
    for _ in range(200):
        acceptance.observe(2, [(good, 2), (bad, 0)])
    both = acceptance.tokens(3, 2)
    acceptance.observe(2, [(good, 2)])
    alone = acceptance.tokens(3, 2)
    assert 1.9 < both < 2.1
    assert alone > 2.6


def test_what_was_not_tried_for_long_gives_way_to_what_is() -> None:
    acceptance = Acceptance(1)
    request = row()
    for _ in range(500):
        acceptance.observe(1, [(request, 0)])
    assert acceptance.after(0) < 0.02
    for _ in range(16):
        acceptance.observe(1, [(request, 1)])
    assert acceptance.after(0) < 0.1
    for _ in range(1000):
        acceptance.observe(0, [(request, 0)])
    for _ in range(16):
        acceptance.observe(1, [(request, 1)])
    assert acceptance.after(0) > 0.6


def test_a_fixed_width_stays() -> None:
    speculation = Speculation(config(width=3))
    for _ in range(100):
        assert speculation.choose(1) == (3, 2)
        speculation.planned(2)
        speculation.observe(3, [(row(), 0)], 0.01, alone=True)
    assert Speculation(config(width=1, adaptive=True)).choose(2) == (1, 0)


def test_times_follow_what_steps_take() -> None:
    times = StepTimes(measured("experts"), MOST)
    assert times.seconds(5, 2) == step_seconds("experts", 6, 2), "in the bucket that holds the rows"
    assert times.seconds(1000, 2) == step_seconds("experts", 64, 2)
    before = times.seconds(1, 1), times.seconds(1, 3)
    for _ in range(200):
        times.observe(1, 1, 2 * step_seconds("experts", 1, 1))
    assert times.seconds(1, 1) == pytest.approx(2 * before[0], rel=0.05)
    assert times.seconds(1, 3) > 1.3 * before[1], "longer contexts are felt by every width"
    times.observe(1, 1, 100.0)
    assert times.seconds(1, 1) == pytest.approx(2 * before[0], rel=0.05)


def test_times_of_widths_that_were_not_measured() -> None:
    times = StepTimes([StepTime(4, 3, 0.010), StepTime(1, 3, 0.006)], MOST)
    assert times.seconds(1, 3) == 0.006
    assert times.seconds(2, 3) == 0.010
    assert times.seconds(1, 1) < 0.006 < times.seconds(1, 4)


def test_a_fall_to_half_of_the_baseline_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    baseline, request = Baseline(), row()

    def windows(count: int, share: float) -> None:
        for index in range(count * WINDOW):
            baseline.observe([(request, int(index % 100 < 100 * share))])

    windows(SETTLED, 0.8)
    windows(3, 0.5)
    assert baseline.falls == 0
    windows(3, 0.1)
    assert baseline.falls == 1
    windows(2, 0.8)
    windows(1, 0.1)
    assert baseline.falls == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "fewer drafts are accepted than usual: 11%" in warnings[0]
