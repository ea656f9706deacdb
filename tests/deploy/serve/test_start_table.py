"""Seconds of a start by part: every second belongs to one of them, whatever clocks say."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.serve.start_table import ENTRANCE, FRONT, LIBRARIES, lines_of, of_application, of_replica

ROOT = Path(__file__).resolve().parents[3]
FRONT_S = {"processes": 2.0, "tokenizer, beside the ranks": 1.5, "ranks": 6.5, "first step": 0.25}
RANK_S = {"weights": 3.0, "self-test": 4.0}


def test_what_the_front_waits_for_is_what_ranks_do() -> None:
    parts = of_replica(FRONT_S, RANK_S)
    assert list(parts.items()) == [
        *(("processes", 2.0), (LIBRARIES, 1.0)),
        *(("weights", 3.0), ("self-test", 4.0), ("first step", 0.25)),
    ]
    assert sum(parts.values()) == sum(FRONT_S.values())


def test_a_rank_that_began_before_the_front_waited_leaves_nothing_over() -> None:
    assert of_replica(FRONT_S, {"weights": 8.5})[LIBRARIES] == 0.0


@given(waited=st.floats(10.25, 1000), until=st.floats(-5000, 5000))
def test_every_second_belongs_to_one_part(waited: float, until: float) -> None:
    """Also where the clocks of two nodes differ: then the front's share is wrong, and no other."""
    replica = of_replica(FRONT_S, RANK_S)
    parts = of_application({"imports": 1.0, "Ray": 2.0}, waited, until, replica)
    assert min(parts.values()) >= 0
    if 0 <= until <= waited - 10.25:
        assert parts[FRONT] == until
        assert sum(parts.values()) == pytest.approx(3.0 + waited)
    assert {name: parts[name] for name in replica} == replica
    assert list(parts)[:3] == ["imports", "Ray", FRONT]
    assert list(parts)[-1] == ENTRANCE


def test_the_table_has_a_line_per_part_that_can_be_seen() -> None:
    assert lines_of({"imports": 1.26, "kernels": 0.04, "libraries of the ranks": 112.0}) == [
        "the first answer was possible 113.3 s after the command:",
        "    imports                   1.3 s",
        "    libraries of the ranks  112.0 s",
    ]


def test_the_age_of_a_process_is_not_longer_than_it_is_there() -> None:
    code = "import time; time.sleep(0.5); from deploy.serve.start_table import process_age_s; print(process_age_s())"
    begin = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # Ticks of the kernel's clock are a hundredth of a second.
    assert 0.49 < float(ran.stdout) < time.monotonic() - begin + 0.02
