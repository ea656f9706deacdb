"""Memory of a GPU that the graphs of an engine take, beside what was reserved for them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs.capture import Warmed
from workers.graphs.graph_runner import GraphRunner
from workers.rank.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,  # what other processes take of the device would be measured too
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_capture_takes_no_more_memory_than_was_reserved_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a start keeps from the cache for its graphs, before it knows how large the cache is, covers what they
    take of the device: torch's tensors, and the driver's share. What torch's allocator has and does not use is left
    out: it is a matter of 20 MiB a buffer, which is much only for a model as small as this one.

    The driver's share is measured on the whole device, and so is what threads of former engines let go only then: in
    that case it is tried again, with the former graphs still alive."""
    warm_up, capture = Runner.warm_up, Runner.capture
    reserved: list[Warmed] = []
    taken: list[int] = []
    tensors: list[int] = []

    def reserve(self: Runner) -> Warmed:
        reserved.append(warm_up(self))
        return reserved[-1]

    def in_use() -> tuple[int, int]:
        """Bytes of the device without what torch's allocator has but does not use, and of torch's tensors."""
        gc.collect()  # former engines
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        return total - free - (torch.cuda.memory_reserved() - allocated), allocated

    def measured(self: Runner, *rest: Any, **options: Any) -> GraphRunner:
        warm_up(self)  # layers still hold a little of the trial run's memory, which a pass of this one's replaces
        device, allocated = in_use()
        graphs = capture(self, *rest, **options)
        device_after, allocated_after = in_use()
        taken.append(device_after - device)
        tensors.append(allocated_after - allocated)
        return graphs

    monkeypatch.setattr(Runner, "warm_up", reserve)
    monkeypatch.setattr(Runner, "capture", measured)
    config = EngineConfig(
        model="demo",
        device="cuda",
        dtype="bfloat16",
        width=3,
        max_rows=32,
        token_budget=512,
        cache_pages=120,
        graphs=True,
        selftest=False,
    )
    runs: list[InlineEngine] = []
    for _ in range(4):
        runs.append(InlineEngine(config, torch.device("cuda")))
        if taken[-1] <= reserved[-1].bytes and tensors[-1] >= reserved[-1].scratch + reserved[-1].inner:
            break
    graphs, warmed = runs[-1].runner.graphs, reserved[-1]
    assert graphs is not None
    assert graphs.count == warmed.graphs
    assert tensors[-1] >= warmed.scratch + warmed.inner, (tensors, reserved)
    assert taken[-1] <= warmed.bytes, (taken, reserved)
