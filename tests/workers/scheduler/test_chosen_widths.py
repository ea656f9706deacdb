"""The chosen width against every fixed one where steps take other times than the self-test found: one chooser, whose
rows and whose drafts change while it runs.

What counts is what the taken widths give on average, tokens and seconds, so that a comparison has no noise of its own.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from test_speculation import MOST, row
from workload import config

from workers.protocol.plan import DecodeBuckets
from workers.protocol.report import StepTime
from workers.scheduler.speculation import TIMED, Speculation
from workers.scheduler.step_times import UNUSUAL_IN_A_ROW, StepTimes

MILLISECONDS = {
    1: (1.65, 2.21, 2.36, 2.45),
    8: (4.7, 6.5, 6.6, 6.7),
    32: (7.93, 8.4, 9.0, 9.1),
    64: (8.5, 9.3, 9.6, 10.2),
}
"""Milliseconds of a step of so many rows, by width: of a mixture of experts on an H200."""
CHANCES = (0.0, 0.3, 0.6, 0.9)
SETTLE_S, COUNTED_S = 5.0, 2.0
NOISE = 0.02
"""Standard deviation of a step's time, of the time."""
BUSY = 0.005
"""Share of the steps that take longer since the machine is busy: by a half, or three times as long."""
SEEDS = range(3)
Factor = Callable[[random.Random, int, int], float]
"""Ratio between what the self-test finds a step of so many rows and of this width to take, and what it takes."""


def as_it_is(draw: random.Random, rows: int, width: int) -> float:
    """Return the factor where nothing is off."""
    return 1.0


def anything(draw: random.Random, rows: int, width: int) -> float:
    """Every width is off by something else, and in every bucket."""
    return draw.uniform(0.7, 1.3)


def wide_looks_cheap(draw: random.Random, rows: int, width: int) -> float:
    """Real tokens wake fewer experts than those of the self-test, most of all where few are fed."""
    return (1.3, 1.15, 1.0, 0.9)[width - 1]


def narrow_looks_cheap(draw: random.Random, rows: int, width: int) -> float:
    """Return factors with which narrow steps look cheap and wide ones dear."""
    return (0.8, 0.9, 1.0, 1.1)[width - 1]


class Served:
    """Steps of one chooser after the other."""

    def __init__(self, factor: Factor, seed: int, growth: float = 0.0) -> None:
        """`growth`: by how much of their time steps become longer in a second, for as long as rows stay the same."""
        self.random = random.Random(seed)
        times = tuple(
            StepTime(rows, width + 1, 1e-3 * by_width[width] * factor(self.random, rows, width + 1))
            for rows, by_width in MILLISECONDS.items()
            for width in range(MOST)
        )
        self.speculation = Speculation(config(width=MOST, adaptive=True, step_times=times, token_budget=2000))
        self.modes, self.growth = DecodeBuckets(64, MOST, adaptive=True).modes(), growth
        self.widths: Counter[int] = Counter()

    def run(self, requests: list[Any], chance: float, until: float, begun: float = 0.0) -> float:
        """Tokens a second of a row that the taken widths give on average, in so many seconds, two plans in flight."""
        speculation, flights, now, tokens, spent = self.speculation, deque[int](), 0.0, 0.0, 0.0
        self.widths.clear()
        while flights or now < until:
            while len(flights) < 2 and now < until:
                width, drafts = speculation.choose(len(requests))
                assert (width, drafts) in self.modes
                speculation.planned(drafts)
                flights.append(width)
            width = flights.popleft()
            usual = 1e-3 * MILLISECONDS[len(requests)][width - 1]
            seconds = usual * (1 + self.growth * (begun + now)) * self.random.gauss(1.0, NOISE)
            if self.random.random() < BUSY:
                seconds *= self.random.choice([1.5, 3.0])
            now += seconds
            spent += usual
            tokens += gained(width, chance)
            self.widths[width] += 1
            speculation.observe(width, [(one, self.accepted(width, chance)) for one in requests], seconds, alone=True)
        return tokens / spent

    def accepted(self, width: int, chance: float) -> int:
        """Draw how many drafts of a row are accepted."""
        accepted = 0
        while accepted < width - 1 and self.random.random() < chance:
            accepted += 1
        return accepted


def gained(width: int, chance: float) -> float:
    """Tokens of a row, on average."""
    return sum(chance**position for position in range(width))


def ratios(factor: Factor, seed: int, growth: float = 0.0) -> dict[tuple[int, float], float]:
    """Return what is reached of the best fixed width, by rows and by how probable it is that a draft is accepted."""
    served, found = Served(factor, seed, growth), {}
    for rows, by_width in MILLISECONDS.items():
        for chance in CHANCES:
            # Streams that have just begun, of which nothing is known.
            served.run([row() for _ in range(rows)], chance, SETTLE_S)
            reached = served.run([row() for _ in range(rows)], chance, COUNTED_S, begun=SETTLE_S)
            best = max(gained(width + 1, chance) / (1e-3 * by_width[width]) for width in range(MOST))
            found[rows, chance] = reached / best
    return found


def mean_ratios(factor: Factor, growth: float = 0.0) -> dict[tuple[int, float], float]:
    """Over some seeds."""
    runs = [ratios(factor, seed, growth) for seed in SEEDS]
    return {at: sum(run[at] for run in runs) / len(runs) for at in runs[0]}


@pytest.mark.parametrize(
    ("factor", "growth"),
    [
        pytest.param(as_it_is, 0.0, marks=pytest.mark.long),
        pytest.param(anything, 0.0, marks=pytest.mark.soak),
        pytest.param(anything, 0.02, marks=pytest.mark.long),
        pytest.param(wide_looks_cheap, 0.02, marks=pytest.mark.long),
        pytest.param(narrow_looks_cheap, 0.0, marks=pytest.mark.long),
    ],
)
def test_the_best_width_is_found_whatever_the_self_test_found(factor: Factor, growth: float) -> None:
    found = mean_ratios(factor, growth)
    assert min(found.values()) >= 0.97, {at: round(ratio, 3) for at, ratio in found.items()}


def self_test(factor: float = 1.0) -> tuple[StepTime, ...]:
    """Make a self-test's times of all buckets and widths."""
    return tuple(
        StepTime(rows, width + 1, 1e-3 * factor * by_width[width])
        for rows, by_width in MILLISECONDS.items()
        for width in range(MOST)
    )


def test_a_width_that_is_never_run_costs_nothing_less_than_one_that_is() -> None:
    """All widths are taken to be as much faster as the one that runs; a few steps of another show what is its own, in
    this bucket alone for the most part."""
    times = StepTimes(self_test(), MOST)
    for _ in range(300):
        times.observe(32, 4, 0.8 * 9.1e-3)
    assert times.seconds(32, 1) == pytest.approx(0.85 * 7.93e-3, rel=0.03)
    for _ in range(TIMED):
        times.observe(32, 1, 7.93e-3)
    assert times.seconds(32, 1) == pytest.approx(7.93e-3, rel=0.02)
    assert times.seconds(32, 4) == pytest.approx(0.8 * 9.1e-3, rel=0.02)
    assert 0.85 * 8.5e-3 < times.seconds(64, 1) < 0.97 * 8.5e-3
    for _ in range(20):
        times.observe(32, 4, 0.8 * 9.1e-3)
    # Longer contexts, all at once.
    for _ in range(100):
        times.observe(32, 4, 1.2 * 9.1e-3)
    assert times.seconds(32, 1) == pytest.approx(1.5 * 7.93e-3, rel=0.05)


def test_steps_that_are_held_up_change_little() -> None:
    times, draw = StepTimes(self_test(), MOST), random.Random(0)
    for _ in range(2000):
        seconds = 1e-3 * 9.0 * draw.gauss(1.0, NOISE)
        times.observe(32, 3, seconds * (draw.choice([1.5, 2.5, 10.0]) if draw.random() < 0.02 else 1.0))
    assert times.seconds(32, 3) == pytest.approx(9.0e-3, rel=0.05)
    assert times.seconds(32, 1) == pytest.approx(7.93e-3, rel=0.06)


def test_a_self_test_that_is_far_off_is_not_believed_for_ever() -> None:
    times = StepTimes(self_test(0.1), MOST)
    for _ in range(UNUSUAL_IN_A_ROW):
        times.observe(8, 2, 6.5e-3)
    assert times.seconds(8, 2) == pytest.approx(0.65e-3)
    for _ in range(50):
        times.observe(8, 2, 6.5e-3)
    assert times.seconds(8, 2) == pytest.approx(6.5e-3, rel=0.02)


def served(rows: int, steps: int, speculation: Speculation, accept: bool = False) -> list[tuple[int, int]]:
    """Width and drafts of so many steps, which take what the self-test found; a draft is accepted never or always."""
    made = []
    requests = [row() for _ in range(rows)]
    for _ in range(steps):
        width, drafts = speculation.choose(rows)
        speculation.planned(drafts)
        made.append((width, drafts))
        # The step that drafts more than the next one of its width feeds takes longer.
        seconds = 1e-3 * MILLISECONDS[rows][width - 1] * (1.0 if drafts < width else 1.5)
        speculation.observe(width, [(one, (width - 1) * accept) for one in requests], seconds, alone=True)
    return made


def chooser() -> Speculation:
    """Make a chooser with times as the self-test found them."""
    return Speculation(config(width=MOST, adaptive=True, step_times=self_test(), token_budget=2000))


def test_all_widths_are_tried_in_turn() -> None:
    speculation = chooser()
    made = served(64, 3000, speculation)
    assert speculation.best == 1
    assert {width for width, _ in made[-1000:]} == {1, 2, 3, 4}
    assert sum(width == 1 for width, _ in made) > 0.85 * len(made)
    speculation = chooser()
    made = served(64, 3000, speculation, accept=True)
    assert speculation.best == 4
    assert {width for width, _ in made[-1000:]} == {2, 3, 4}, "one token a row is hopeless where four are accepted"


def test_other_widths_are_tried_while_every_step_has_prompts() -> None:
    """Nothing is known then of what steps of decode rows alone take."""
    speculation, requests = chooser(), [row() for _ in range(32)]
    for turn in range(6000):
        width, drafts = speculation.choose(len(requests))
        speculation.planned(drafts)
        accepted = width - 1 if turn >= 600 else 0
        speculation.observe(width, [(one, accepted) for one in requests], 0.01, alone=False)
        if turn == 599:
            assert speculation.best == 1
    assert speculation.best == MOST


def test_the_time_of_steps_that_draft_for_wider_ones_is_not_that_of_their_width() -> None:
    speculation = chooser()
    made = served(64, 3000, speculation)
    assert (1, 1) in made[-1000:]
    for width in range(1, MOST + 1):
        assert speculation.times.seconds(64, width) == pytest.approx(1e-3 * MILLISECONDS[64][width - 1], rel=0.01)


def test_an_exploration_ends_soon_when_nearly_all_rows_leave() -> None:
    speculation = chooser()
    served(64, 200, speculation)
    while speculation.choose(64)[0] < 3:
        served(64, 1, speculation)
    widths = [width for width, _ in served(1, 2 * TIMED, speculation)]
    assert widths[-1] == 1
