"""The token-wise segments of mixed steps as graphs, a set of them for every token bucket, and tails for all buckets.

Attention and all else that depends on rows runs eagerly between the segments. A logits-only tail lies at the same place
whatever the bucket is, so one graph per number of tokens that are wanted serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from typing_extensions import override

from workers.graphs.record import record
from workers.memory.scratch import Scratch
from workers.protocol.plan import TokenKey
from workers.step.mixed import Stage, Tail
from workers.step.parts import StepParts


class CapturedTail(Tail):
    """A logits-only tail that is a graph, replayed for the stages of all buckets."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        """Captures at once. `inner` is this tail's alone, out of the buffer that the stages' inner memory is."""
        super().__init__(parts, tokens, inner)
        self._graph, _ = record(parts.device, super().run)

    @override
    def run(self) -> None:
        """Replay it."""
        self._graph.replay()

    def drop(self) -> None:
        """Destroy the graph; its process group must still live."""
        self._graph.reset()


class CapturedStage(Stage):
    """A stage whose segments are graphs, replayed. They hold no state from one step to the next."""

    def __init__(
        self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch, tails: Mapping[TokenKey, Tail]
    ) -> None:
        """Captures its segments at once, on padding alone; `tails` are all stages'."""
        super().__init__(parts, tokens, scratch, inner)
        self._tails = tails
        self.clear()
        self._graphs: list[list[torch.cuda.CUDAGraph]] = []
        for which in range(len(self.segments)):
            run = partial(super().run_segment, which)
            self._graphs.append([record(parts.device, partial(run, index))[0] for index in self.indices(which)])

    @property
    def graphs(self) -> int:
        """Number of its graphs, without those of tails."""
        return sum(map(len, self._graphs))

    @override
    def run_segment(self, which: int, index: int) -> None:
        """Replay segment `index` of a pass."""
        self._graphs[which][index].replay()

    @override
    def tail(self, key: TokenKey) -> Tail:
        """Return the tail that all stages share, or an eager one for more tokens than steps sample: prompts that are
        scored need that."""
        return self._tails.get(key) or super().tail(key)

    def drop(self) -> None:
        """Destroy the graphs; their process group must still live."""
        for graphs in self._graphs:
            for graph in graphs:
                graph.reset()
        self._graphs.clear()
