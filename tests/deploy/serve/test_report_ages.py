"""Ages of reports by a clock of one's own, against the true ones."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serve.report_ages import KEPT, ReportAges


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0.01, 5.0), st.booleans(), st.floats(-1e5, 1e5)), min_size=2, max_size=20),
)
def test_an_age_is_right_to_the_time_between_two_looks_whatever_clocks_say(
    skew: float, steps: list[tuple[float, bool, float]]
) -> None:
    """A step is: time passes, a report is made at its end or not, the clock of who makes it jumps."""
    now, made, between = [0.0], None, 0.0
    ages = ReportAges(lambda: now[0])
    stamp = time.time() + skew
    ages.made("a", stamp)
    for passed, reports, jump in steps:
        now[0] += passed
        skew += jump
        if reports:
            stamp, made, between = time.time() + now[0] + skew, now[0], passed
        age = ages.age("a", stamp)
        if made is not None:  # of the first report nothing but its stamp is known
            assert -1e-6 <= age - (now[0] - made) <= between + 1e-6


def test_the_first_report_is_as_old_as_it_says() -> None:
    ages = ReportAges()
    assert ages.age("a", time.time() - 50.0) == pytest.approx(50.0, abs=5.0)
    assert ages.age("b", time.time() + 50.0) == pytest.approx(0.0, abs=5.0)


def test_what_is_not_told_again_grows_old() -> None:
    now = [0.0]
    ages = ReportAges(lambda: now[0])
    stamp = time.time() + 1000.0
    for second in range(5):
        now[0] = float(second)
        assert ages.age("a", stamp) == second


def test_few_replicas_are_remembered() -> None:
    ages = ReportAges()
    for number in range(2 * KEPT):
        ages.made(str(number), 0.0)
    assert len(ages._seen) == KEPT
