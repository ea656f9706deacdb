"""Captures a call into a CUDA graph, for the tests of kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REPLAYS = 20


def capture(call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of `call`, which must neither allocate nor wait. It runs once before, so that everything is compiled.
    `stream`: on which it is captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0, f"the captured call allocated {allocated} times"
    return graph


def check_replays(graph: torch.cuda.CUDAGraph, refill: Callable[[], None], outputs: list[Tensor]) -> None:
    """Replay many times, each after `refill`; all outputs must be bitwise the same. They are left as the last wrote."""
    first: list[Tensor] = []
    for _ in range(REPLAYS):
        refill()
        graph.replay()
        now = [output.clone() for output in outputs]
        first = first or now
        assert all(same_bits(a, b) for a, b in zip(first, now, strict=True))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in every bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
