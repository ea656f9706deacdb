"""Seconds of a start by its parts."""

from __future__ import annotations

import re
import threading
import time

import pytest

from workers.rank.start_times import StartTimes


def test_every_second_belongs_to_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 101.5, 102.0, 104.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    times = StartTimes()
    for part in ("weights", "buffers", "weights"):
        times.end(part)
    assert str(times) == "4.0 s: weights 3.5 s, buffers 0.5 s"


def test_what_runs_beside_them_is_told_apart_and_its_error_is_raised_where_it_is_wanted() -> None:
    times = StartTimes()
    going_on = threading.Event()
    result = times.beside("identity", lambda: going_on.wait(60) and "found")
    times.end("weights")
    assert not result.done()
    going_on.set()
    assert result.result(60) == "found"
    assert re.fullmatch(r"\d+\.\d s: weights \d+\.\d s; beside them identity \d+\.\d s", str(times))
    wrong = times.beside("identity", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        wrong.result(60)
