"""Waiting of a rank for its steps: what that costs of a processor, and how late it finds their ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_device import LOOK_S, Device, Host

from workers.protocol.plan import PrefillRow, StepPlan
from workers.rank.waiting import (
    LEAST_SLICE_S,
    MARGIN_S,
    MOST_KINDS,
    RECENT,
    SHORTEST_S,
    SLICES,
    StepEnd,
    Waiting,
    kind_of,
)

AT_ONCE_S = 3 * LOOK_S
"""Delay with which one who looks all the time finds an end."""


class Rank:
    """Runs steps of given lengths, always two of them launched, and notes how late it finds each end."""

    def __init__(self, host: Host | None = None) -> None:
        self.host = host or Host()
        self.device = Device(self.host)
        self.waiting = Waiting(self.host.clock, self.host.sleep)

    def launch(self, seconds: float, kind: object = None) -> StepEnd:
        begun = self.host.now
        return self.waiting.launched(kind, self.device.launch(seconds), begun)

    def run(self, steps: Sequence[tuple[object, float] | float]) -> list[float]:
        named = [step if isinstance(step, tuple) else ("decode", step) for step in steps]
        late: list[float] = []
        begun = len(self.device.events)
        ends = [self.launch(named[0][1], named[0][0])]
        for number in range(len(named)):
            if number + 1 < len(named):
                ends.append(self.launch(named[number + 1][1], named[number + 1][0]))
            ends[number].wait()
            assert ends[number].passed
            late.append(self.host.now - self.device.events[begun + number].at)
        return late

    def share(self, steps: Sequence[tuple[object, float] | float]) -> tuple[float, float]:
        """Return the share of a processor, and the latest that an end was found."""
        now, busy = self.host.now, self.host.busy
        late = self.run(steps)
        return (self.host.busy - busy) / (self.host.now - now), max(late)


def test_steps_of_one_length_are_slept_through_and_found_at_once() -> None:
    for milliseconds, most in ((10, 0.16), (30, 0.08), (100, 0.05)):
        rank = Rank()
        rank.run([1e-3 * milliseconds])
        share, late = rank.share([1e-3 * milliseconds] * 50)
        assert share < most
        assert late <= AT_ONCE_S


def test_steps_that_differ_little_are_found_at_once() -> None:
    draws = random.Random(0)
    rank = Rank(Host(lambda: draws.uniform(60e-6, 150e-6)))
    lengths = [10e-3 + draws.uniform(0, 0.3e-3) for _ in range(200)]
    rank.run(lengths[:RECENT])
    share, late = rank.share(lengths[RECENT:])
    assert share < 0.2
    assert late <= AT_ONCE_S


def test_short_steps_are_looked_at_all_the_time() -> None:
    rank = Rank()
    assert max(rank.run([0.99 * SHORTEST_S] * 50)) <= AT_ONCE_S
    assert not rank.host.sleeps
    rank.run([1.5 * SHORTEST_S] * 2 * RECENT)
    assert rank.host.sleeps


def test_the_first_step_of_a_kind_is_looked_at_all_the_time() -> None:
    rank = Rank()
    for kind in range(5):
        rank.run([(kind, 30e-3)])
        assert not rank.host.sleeps
    rank.run([(3, 30e-3)])
    assert rank.host.sleeps


@pytest.mark.parametrize("seconds", [4e-3, 15e-3, *(30e-3 + 0.1e-3 * tenths for tenths in range(10))])
def test_a_step_that_ends_early_is_found_soon_and_the_next_one_at_once(seconds: float) -> None:
    rank = Rank()
    late = rank.run([*[40e-3] * 20, *[seconds] * 20])
    assert late[20] < max(LEAST_SLICE_S, seconds / SLICES) + 0.1e-3
    assert max(late[:20] + late[21:]) <= AT_ONCE_S


def test_a_step_that_ends_late_is_found_at_once_and_soon_slept_through() -> None:
    rank = Rank()
    assert max(rank.run([*[10e-3] * 20, *[30e-3] * RECENT])) <= AT_ONCE_S
    share, late = rank.share([30e-3] * 20)
    assert share < 0.08
    assert late <= AT_ONCE_S


def test_shorter_steps_between_longer_ones_are_not_forgotten() -> None:
    rank = Rank()
    lengths = [12e-3 if number % (RECENT - 1) == 0 else 20e-3 for number in range(100)]
    assert max(rank.run(lengths)) <= AT_ONCE_S


def test_nothing_is_known_of_a_step_whose_forerunner_is_not_known_to_have_ended() -> None:
    rank = Rank()
    rank.run([10e-3] * 3)
    slept = rank.host.sleeps
    first, second = rank.launch(10e-3, "decode"), rank.launch(10e-3, "decode")
    second.wait()
    assert rank.host.sleeps == slept
    first.wait()
    # Nor did it teach that steps take 20 ms.
    assert max(rank.run([10e-3] * 5)) <= AT_ONCE_S


def test_time_before_a_launch_is_no_time_of_the_step() -> None:
    rank = Rank()
    for _ in range(20):
        rank.host.sleep(50e-3)
        assert max(rank.run([10e-3])) <= AT_ONCE_S


def test_a_host_that_is_busy_while_a_step_ends_learns_nothing_from_it() -> None:
    rank = Rank()
    rank.run([20e-3] * RECENT)
    end = rank.launch(20e-3, "decode")
    assert not end.passed
    rank.host.work(25e-3)
    end.wait()
    share, late = rank.share([20e-3] * 10)
    assert share < 0.12
    assert late <= AT_ONCE_S


@pytest.mark.parametrize("longer", range(10))
def test_where_sleeps_take_long_it_wakes_sooner_and_later_trusts_them_again(longer: int) -> None:
    oversleep = 2e-3
    rank = Rank(Host(lambda: oversleep))
    late = rank.run([20e-3 + longer * 0.2e-3] * 30)
    # One may be late: what sleeps take is known from the first one on.
    assert sum(each > AT_ONCE_S for each in late) <= 1
    oversleep = 50e-6
    rank.run([20e-3] * 30)
    share, late_now = rank.share([20e-3] * 30)
    assert share < 0.1
    assert late_now <= AT_ONCE_S


def test_a_very_long_sleep_does_not_end_all_sleep() -> None:
    sleeps = iter([85e-6] * 100 + [1.0])
    rank = Rank(Host(lambda: next(sleeps, 85e-6)))
    rank.run([20e-3] * 200)
    assert rank.share([20e-3] * 10)[0] < 0.12


def test_rest_sleeps_where_it_is_told_to_and_may_be_woken() -> None:
    rank = Rank()
    rank.run([20e-3] * 3)
    end, asked = rank.launch(20e-3, "decode"), []

    def woken(seconds: float) -> None:
        asked.append(seconds)
        rank.host.now += 1e-6  # something came at once

    slept = rank.host.sleeps
    assert end.rest(woken)
    assert asked == [LEAST_SLICE_S]
    assert rank.host.sleeps == slept
    rank.host.now = rank.device.events[-1].at - MARGIN_S
    assert not end.rest(woken)
    rank.host.now += MARGIN_S
    assert not end.rest(woken)
    assert end.passed
    assert len(asked) == 1


def test_an_end_is_looked_for_no_more_once_it_is_known() -> None:
    rank = Rank()
    end = rank.launch(1e-3)
    end.wait()
    busy = rank.host.busy
    end.wait()
    assert end.passed
    assert rank.host.busy == busy


def test_a_step_behind_one_that_was_found_late_teaches_no_more_than_it_took() -> None:
    rank = Rank()
    late = rank.run([*[("one", 40e-3)] * 20, ("one", 30.8e-3), ("another", 20e-3)])
    assert late[20] > 0.5e-3
    assert not rank.waiting.spare("another", 20e-3 - MARGIN_S - LEAST_SLICE_S)
    assert rank.waiting.spare("another", 20e-3 - MARGIN_S - LEAST_SLICE_S - late[20] - 1e-3)


def test_kinds_are_forgotten_and_steps_do_not_keep_those_before() -> None:
    rank = Rank()
    rank.run([(kind, 10e-3) for number in range(3 * MOST_KINDS) for kind in (number, -1)])
    assert not rank.waiting.spare(0, 0.0)
    assert rank.waiting.spare(-1, 0.0), "it is met all the time"
    assert rank.waiting.spare(3 * MOST_KINDS - 1, 0.0)
    end, ends = rank.launch(1e-3), 0
    while (before := end._before) is not None:
        end, ends = before, ends + 1
    assert ends <= 1


@example([(0, 55e-3), (0, 47e-3), (0, 0.1e-3)], 0.0)
@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.floats(0.1e-3, 60e-3)), min_size=1, max_size=60),
    oversleep=st.floats(0.0, 0.3e-3),
)
def test_no_end_is_found_later_than_a_slice(steps: list[tuple[int, float]], oversleep: float) -> None:
    """But for one that has ended by the time at which the end of the step before is found."""
    rank = Rank(Host(lambda: oversleep))
    before = 0.0
    for (_, seconds), late in zip(steps, rank.run(steps), strict=True):
        assert late <= max(max(LEAST_SLICE_S, 1.1 * seconds / SLICES) + oversleep + AT_ONCE_S, before)
        before = late


def plan(slots: int, *chunks: tuple[int, int], drafts: int = 2, constrained: tuple[int, ...] = ()) -> StepPlan:
    prefill = tuple(
        PrefillRow(100 + slot, start, (1,) * length, 0, True) for slot, (start, length) in enumerate(chunks)
    )
    return StepPlan(1, 3, drafts, tuple(range(slots)), prefill, constrained=constrained)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (plan(4), plan(4), True),
        (plan(4), plan(5), False),
        (plan(4), plan(4, drafts=1), False),
        (plan(4), plan(4, constrained=(1,)), False),
        (plan(64), plan(66), True),
        (plan(4), plan(4, (0, 1)), False),
        (plan(4, (0, 1000)), plan(4, (0, 1020)), True),
        (plan(4, (0, 1000)), plan(4, (0, 1300)), False),
        (plan(4, (0, 1000)), plan(4, (20, 1000)), True),
        (plan(4, (0, 1000)), plan(4, (50_000, 1000)), False),
    ],
)
def test_kinds(one: StepPlan, other: StepPlan, alike: bool) -> None:
    assert (kind_of(one) == kind_of(other)) == alike
