"""Seconds of a start by its parts."""

from __future__ import annotations

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
