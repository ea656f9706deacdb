"""Cost of waiting for a real device, of a processor, and how late its ends are found."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from workers.rank.waiting import RECENT, Waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 60


def cycles_of(seconds: float) -> int:
    """Return the cycles for which the device is busy for so long."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 * 1e3 * seconds / begin.elapsed_time(end))


def measured(cycles: int, wait: Callable[[torch.cuda.Event, float], None]) -> tuple[float, float]:
    """Measure steps one after the other, which nothing is launched behind: their time, and the share of a processor
    that this thread was busy for."""
    times: list[float] = []
    first = busy = 0.0
    for step in range(RECENT + STEPS):
        if step == RECENT:
            first, busy = time.perf_counter(), time.thread_time()
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)
        event = torch.cuda.Event()
        event.record()
        wait(event, begin)
        assert event.query()
        times.append(time.perf_counter() - begin)
    share = (time.thread_time() - busy) / (time.perf_counter() - first)
    return median(times[RECENT:]), share


@pytest.mark.parametrize("milliseconds", [1, 10, 30])
def test_a_rank_sleeps_while_the_device_computes_and_is_there_when_it_ends(milliseconds: int) -> None:
    cycles = cycles_of(1e-3 * milliseconds)
    waiting = Waiting()
    spun, all_of_it = measured(cycles, lambda event, begin: event.synchronize())
    slept, share = measured(cycles, lambda event, begin: waiting.launched("kind", event, begin).wait())
    # On the host of an H200 it was 23 us later after sleeps, of 10 ms: a quarter of a percent.
    assert slept - spun < (50e-6 if milliseconds >= 10 else 20e-6)
    if milliseconds >= 10:
        assert share < 0.25 < 0.9 < all_of_it
