"""Factors that follow what is observed of sums."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler.step_times import DRIFT, LEAST, MOST, NOISE, Following


def parts_of(rng: random.Random) -> list[float]:
    return [5.0, rng.uniform(0, 10), rng.choice([0.0, rng.uniform(0, 8)])]


def total(factors: list[float], parts: list[float]) -> float:
    return sum(factor * part for factor, part in zip(factors, parts, strict=True))


@pytest.mark.parametrize("true", [[1.0, 1.0, 1.0], [0.5, 1.5, 0.0], [1.6, 0.6, 2.5], [4.0, 0.1, 0.3]])
def test_sums_are_met_after_some_steps(true: list[float]) -> None:
    rng, following = random.Random(0), Following([1.0, 1.0, 1.0], [0.5, 0.5, 1.0])
    for _ in range(60):
        parts = parts_of(rng)
        following.observe(parts, total(true, parts) * rng.gauss(1, 0.01))
    for _ in range(20):
        parts = parts_of(rng)
        assert total(following.values, parts) == pytest.approx(total(true, parts), rel=0.1)


def test_it_is_kalmans_filter() -> None:
    """While nothing is far off and nobody reaches a limit: numpy's matrices give the same."""
    rng, following = random.Random(1), Following([1.0, 1.0, 1.0], [0.5, 0.5, 1.0])
    state, first = np.ones(3), np.diag([0.25, 0.25, 1.0])
    covariance = first.copy()
    for _ in range(30):
        parts = parts_of(rng)
        seen = total([1.1, 0.95, 1.2], parts)
        following.observe(parts, seen, beside=3.0)
        h = np.array(parts)
        gain = covariance @ h / (h @ covariance @ h + (NOISE * (3.0 + h @ state)) ** 2)
        state = state + gain * (seen - h @ state)
        covariance = covariance - np.outer(gain, h) @ covariance + DRIFT**2 * first
        scale = np.diag(np.minimum(1, np.sqrt(np.diag(first) / np.diag(covariance))))
        covariance = scale @ covariance @ scale
        assert following.values == pytest.approx(list(state))


def test_one_that_is_far_off_says_nothing_and_two_say_much() -> None:
    following = Following([1.0, 1.0], [0.5, 0.5])
    for _ in range(20):
        following.observe([5.0, 5.0], 10.0)
    before = list(following.values)
    for seen in (120.0, 10.0, 120.0, 0.1, 120.0):
        following.observe([5.0, 5.0], seen)
    assert following.values == pytest.approx(before)
    for _ in range(8):
        following.observe([5.0, 5.0], 40.0)
    assert sum(following.values) == pytest.approx(8, rel=0.05)


def test_a_rare_kind_that_is_far_off_each_time_is_believed() -> None:
    """A small step comes now and then between large steps, of which the sum alone is known. It is not held up each
    time: it tells that less of the sum is fixed than was thought."""
    following, large, small = Following([1.6, 0.4], [0.2, 0.2], [0.5, 0.5]), [5.0, 5.0], [5.0, 0.5]
    for turn in range(200):
        parts, kind = (small, "small") if turn % 8 == 7 else (large, "large")
        following.observe(parts, total([1.0, 1.0], parts), beside=5.0, kind=kind)
    for parts in (large, small):
        assert following.total(parts) == pytest.approx(total([1.0, 1.0], parts), rel=0.1)


def test_several_far_off_to_alternating_sides_are_believed() -> None:
    """Steps of two kinds, of which one takes more than was thought, and the other less."""
    following, kinds = Following([1.0, 1.0], [0.5, 0.5]), ([1.0, 10.0], [1.0, 0.1])
    for turn in range(200):
        following.observe(kinds[turn % 2], total([1.0, 1.0], kinds[turn % 2]), beside=5.0)
    for turn in range(200):
        following.observe(kinds[turn % 2], total([3.0, 0.4], kinds[turn % 2]), beside=5.0)
    for kind in kinds:
        assert following.total(kind) == pytest.approx(total([3.0, 0.4], kind), rel=0.15)


@given(
    seen=st.lists(
        st.tuples(st.floats(0, 1e9), st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.floats(1e-9, 1e3)),
        max_size=60,
    )
)
def test_whatever_is_seen_factors_stay_finite_and_above_0(seen: list[tuple[float, list[float], float]]) -> None:
    following = Following([1.0, 1.0, 1.0], [0.5, 0.5, 1.0])
    for total_seen, parts, beside in seen:
        following.observe(parts, total_seen, beside=beside)
        assert all(LEAST <= value <= MOST for value in following.values)
