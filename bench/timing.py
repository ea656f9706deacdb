"""Times work as a step has it: inside CUDA graphs, where the host's time for a launch does not count.

Before a measurement the GPU rests. One that has just computed bears less power and clocks lower: of two launches of one
kernel, the second measured right behind the first took up to a tenth longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

REST_S = 0.25


def captured(runs: Sequence[Callable[[], object]], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A graph that goes through `runs` in turn, `calls` of them; the first has run before, for what it compiles."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of several ranks, a thread of their communication asks the device for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in range(calls):
            runs[call % len(runs)]()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, repeats: int, *, warm: int = 1) -> float:
    """Median time of a replay among `repeats`, which follow each other and `warm` others without a gap."""
    for _ in range(warm):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(events))


def microseconds(runs: Sequence[Callable[[], object]], target_us: float = 4000.0, repeats: int = 5) -> float:
    """Median time of one of `runs`, which a graph of about `target_us` goes through in turn."""
    rough = milliseconds(captured(runs, len(runs)), 2) * 1e3
    calls = len(runs) * max(1, round(target_us / rough))
    graph = captured(runs, calls)
    time.sleep(REST_S)
    return milliseconds(graph, repeats) / calls * 1e3
