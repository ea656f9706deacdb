"""Graphs on a CPU that are none: a replay calls what was captured once more, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from typing_extensions import override

from workers.graphs import capture, segments
from workers.memory.scratch import Scratch
from workers.rank import proven_before, rank


class CalledGraph:
    """Stands for a `torch.cuda.CUDAGraph`."""

    def __init__(self, call: Callable[[], Any], memory: list[tuple[Scratch, int]]) -> None:
        """`memory`: of a capture, and how much of it was in use when the capture began."""
        self._call: Callable[[], Any] | None = call
        self._memory = memory

    def replay(self) -> None:
        """Call it."""
        assert self._call is not None, "a graph that was dropped is replayed"
        before = [scratch._used for scratch, _ in self._memory]
        for scratch, used in self._memory:
            scratch._used = used
        self._call()
        for (scratch, _), used in zip(self._memory, before, strict=True):
            scratch._used = used

    def reset(self) -> None:
        """Drop it."""
        self._call = None


def call_graphs(patch: pytest.MonkeyPatch) -> list[CalledGraph]:
    """Let ranks on a CPU capture steps from now on, and note nothing of it in Triton's cache. Returns the list that
    fills with the graphs."""
    made: list[CalledGraph] = []
    known: WeakSet[Noted] = WeakSet()

    class Noted(Scratch):
        @override
        def __init__(self, *rest: Any, **options: Any) -> None:
            super().__init__(*rest, **options)
            known.add(self)

    def record(device: torch.device, call: Callable[[], Any]) -> tuple[CalledGraph, Any]:
        made.append(CalledGraph(call, [(scratch, scratch._used) for scratch in known if scratch._buffer is not None]))
        return made[-1], call()

    patch.setattr(capture, "record", record)
    patch.setattr(segments, "record", record)
    patch.setattr("workers.graphs.graph_runner.Scratch", Noted)
    patch.setattr(rank, "captures_steps", lambda device: True)
    patch.setattr(proven_before, "cache_folder", lambda: None)
    for name, value in {"mem_get_info": (0, 0), "synchronize": None, "empty_cache": None}.items():
        patch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return made
