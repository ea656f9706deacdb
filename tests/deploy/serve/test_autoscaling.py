"""The rule that says how many replicas the load takes, and what Serve is given to follow it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import TimeStampedValue

from deploy.config.autoscaling import AutoscalingConfig
from deploy.serve.autoscaling import MARGIN, ReplicaLoad, Targets, load_of, loads_in, replicas_for, serve_options
from workers.protocol.messages import Distribution, EngineStats

TARGETS = Targets(slots_used=0.8, pages_used=0.8, backlog_s=2.0)
SLOTS, PAGES = 16, 1000


def load(requests: float = 0, pages: float = 0, backlog_s: float = 0.0, serving: float = 1.0) -> ReplicaLoad:
    return ReplicaLoad(requests, SLOTS, pages, PAGES, backlog_s, serving)


SHARES = st.floats(0.05, 1.0)
TARGETS_DRAWN = st.builds(Targets, slots_used=SHARES, pages_used=SHARES, backlog_s=st.floats(0.1, 60.0))
LOADS = st.builds(
    load, requests=st.integers(0, 8 * SLOTS), pages=st.integers(0, PAGES), backlog_s=st.floats(0.0, 300.0)
)
REPORTS = st.lists(LOADS, min_size=1, max_size=8)
BOUNDS = st.tuples(st.integers(1, 8), st.integers(0, 12)).map(lambda drawn: (drawn[0], sum(drawn)))


def number_for(
    reports: list[ReplicaLoad], now: int, bounds: tuple[int, int] = (1, 8), targets: Targets = TARGETS
) -> int:
    """Of loads that do not change."""
    return replicas_for(reports, reports, targets, now=now, running=len(reports), least=bounds[0], most=bounds[1])


@pytest.mark.parametrize(
    ("reports", "now", "number"),
    [
        ([load(12)], 1, 1),  # three quarters of the slots
        ([load(13)], 1, 2),
        ([load(17)], 1, 3),  # two would do, but not if one of them dies
        ([load(200)], 1, 8),
        ([load(1, pages=800)], 1, 1),
        ([load(1, pages=801)], 1, 2),
        ([load(1, backlog_s=100.0)], 1, 1),  # one long prompt: no other replica can help
        ([load(3, backlog_s=5.9)], 1, 3),
        ([load(3, backlog_s=100.0)], 1, 3),
        ([load(5), load(5)], 2, 1),
        ([load(6), load(5)], 2, 2),  # one would do, but not with a quarter more
        ([load(4)] * 4, 4, 3),  # 20 with a quarter more: they take the slots of two, and one may die
        ([load(3)] * 4, 4, 2),
        ([load()] * 4, 4, 1),
    ],
)
def test_replicas_that_a_load_takes(reports: list[ReplicaLoad], now: int, number: int) -> None:
    assert number_for(reports, now) == number


@given(REPORTS, st.integers(0, 40), BOUNDS, TARGETS_DRAWN)
def test_bounds_are_kept(reports: list[ReplicaLoad], now: int, bounds: tuple[int, int], targets: Targets) -> None:
    assert bounds[0] <= number_for(reports, now, bounds, targets) <= bounds[1]
    assert bounds[0] <= number_for([], now, bounds, targets) <= bounds[1]


@given(REPORTS, st.data(), st.integers(1, 20), BOUNDS, TARGETS_DRAWN)
def test_more_load_never_takes_fewer(
    reports: list[ReplicaLoad], data: st.DataObject, now: int, bounds: tuple[int, int], targets: Targets
) -> None:
    which = data.draw(st.integers(0, len(reports) - 1))
    more = data.draw(LOADS)
    busier = replace(
        reports[which],
        requests=reports[which].requests + more.requests,
        pages=reports[which].pages + more.pages,
        backlog_s=reports[which].backlog_s + more.backlog_s,
    )
    grown = [*reports[:which], busier, *reports[which + 1 :]]
    assert number_for(grown, now, bounds, targets) >= number_for(reports, now, bounds, targets)


@given(REPORTS, st.integers(1, 20), BOUNDS, TARGETS_DRAWN)
def test_what_is_in_use_fits_the_replicas_that_a_death_leaves(
    reports: list[ReplicaLoad], now: int, bounds: tuple[int, int], targets: Targets
) -> None:
    number = number_for(reports, now, bounds, targets)
    if number in (1, bounds[1]):  # nobody is left, or no more are allowed
        return
    assert sum(report.requests for report in reports) <= (number - 1) * SLOTS
    assert sum(report.pages for report in reports) <= (number - 1) * PAGES


@given(REPORTS, st.lists(st.floats(1.0, 1.249), min_size=2, max_size=12), st.integers(1, 20), BOUNDS, TARGETS_DRAWN)
def test_a_load_that_changes_by_less_than_the_margin_makes_no_replica_come_and_go(
    reports: list[ReplicaLoad], factors: list[float], now: int, bounds: tuple[int, int], targets: Targets
) -> None:
    numbers = [number_for(reports, now, bounds, targets)]
    for factor in factors:
        varied = [
            replace(each, requests=each.requests * factor, pages=each.pages * factor, backlog_s=each.backlog_s * factor)
            for each in reports
        ]
        numbers.append(number_for(varied, numbers[-1], bounds, targets))
    assert max(factors) < MARGIN
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


@given(REPORTS, st.integers(1, 20), BOUNDS, TARGETS_DRAWN)
def test_a_steady_load_is_answered_at_once(
    reports: list[ReplicaLoad], now: int, bounds: tuple[int, int], targets: Targets
) -> None:
    number = number_for(reports, now, bounds, targets)
    assert number_for(reports, number, bounds, targets) == number


@pytest.mark.parametrize(
    ("reports", "running"),
    [
        ([load()], 2),  # one of the two has not reported yet
        ([load(), load(serving=0.0)], 2),  # its engine is being started again
    ],
)
def test_while_a_replica_is_unknown_none_is_taken_away(reports: list[ReplicaLoad], running: int) -> None:
    def number(reports: list[ReplicaLoad]) -> int:
        return replicas_for(reports, reports, TARGETS, now=2, running=running, least=1, most=8)

    assert number(reports) == 2
    assert number([load(), load()]) == 1
    assert number([load(60), *reports]) == 5  # more are started all the same


def test_means_ask_for_more_and_peaks_for_fewer() -> None:
    def number(means: list[ReplicaLoad], peaks: list[ReplicaLoad]) -> int:
        return replicas_for(means, peaks, TARGETS, now=2, running=2, least=1, most=8)

    assert number([load(4)] * 2, [load(40)] * 2) == 2  # a peak starts nobody, but keeps those that there are
    assert number([load(3)] * 2, [load(4)] * 2) == 1
    assert number([load(20)] * 2, [load(40)] * 2) == 4


def test_a_replica_reports_what_it_has_to_do() -> None:
    stats = EngineStats(
        running=3,
        waiting=2,
        prefill_backlog=600,
        pages_total=100,
        pages_free=90,
        slots=16,
        step_seconds={
            "decode": Distribution((), 50.0),
            "prefill": Distribution((), 2.0),
            "mixed": Distribution((), 1.0),
        },
        step_prefill_tokens={"prefill": Distribution((), 500.0), "mixed": Distribution((), 100.0)},
    )
    report = load_of(stats, waiting=9, serving=True)
    assert report == {
        "requests": 5,
        "slots": 16,
        "pages": 10,
        "pages_total": 100,
        "backlog_s": pytest.approx(3.0),
        "serving": 1.0,
    }
    assert load_of(stats, waiting=9, serving=False) == {
        **report,
        "requests": 9,
        "pages": 0,
        "backlog_s": 0.0,
        "serving": 0.0,
    }
    assert EngineStats(prefill_backlog=600).prefill_backlog_seconds == 0.0


def samples(*values: float) -> list[TimeStampedValue]:
    return [TimeStampedValue(1000.0 + second, value) for second, value in enumerate(values)]


METRICS = {
    "running_requests": {"a": samples(99.0)},
    "requests": {"a": samples(10.0, 30.0), "b": samples(3.0), "c": samples(0.0), "d": []},
    "slots": {"a": samples(16.0, 16.0), "b": samples(16.0), "c": samples(0.0)},
    "pages": {"a": samples(20.0, 10.0), "b": samples(12.0), "c": samples(0.0)},
    "pages_total": {"a": samples(0.0, 1000.0), "b": samples(1000.0), "c": samples(0.0)},
    "backlog_s": {"a": samples(0.0, 0.5), "b": samples(0.0), "c": samples(0.0)},
    # Of b there is none, and c has not said yet what it has room for.
    "serving": {"a": samples(1.0, 0.0), "c": samples(1.0)},
}


def test_reports_become_means_and_peaks() -> None:
    means, peaks = loads_in(METRICS)
    assert means == [ReplicaLoad(20.0, 16.0, 15.0, 1000.0, 0.25, 0.0)]
    assert peaks == [ReplicaLoad(30.0, 16.0, 20.0, 1000.0, 0.5, 0.0)]
    assert loads_in({}) == ([], [])


def test_serve_makes_the_policy_from_what_it_is_given() -> None:
    """As its controller does, which gets the policy as bytes."""
    settings = AutoscalingConfig(min_replicas=2, max_replicas=6, slots_used=0.5, upscale_delay_s=1.0)
    config = serve_options(settings)["autoscaling_config"]
    assert (config.min_replicas, config.max_replicas, config.upscale_delay_s) == (2, 6, 1.0)
    assert config.look_back_period_s == 2.0
    assert config.downscale_delay_s == settings.downscale_delay_s
    with warnings.catch_warnings(action="ignore"):
        # For a Serve config file with options of deployments the controller makes it anew.
        assert type(config)(**config.model_dump()) == config
    policy = _resolve_policy_callable(config.policy)
    context = SimpleNamespace(
        raw_metrics=METRICS,
        target_num_replicas=2,
        current_num_replicas=2,
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert policy(context) == (3, {})  # 20 requests in the mean, where each should have 8
    assert policy(SimpleNamespace(**{**vars(context), "raw_metrics": None})) == (2, {})
