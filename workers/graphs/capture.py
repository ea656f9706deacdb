"""Captures decode steps into CUDA graphs and replays them: warm up, capture, replay, drop."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kernels.linear import MOST_STREAMED
from workers.decode_step import DecodeStep
from workers.graphs.guard import capture_guard
from workers.graphs.ladder import Ladder
from workers.graphs.stats import GraphStats
from workers.plan import GraphKey, StepPlan
from workers.scratch import Scratch
from workers.step import StepOutput, StepParts

logger = logging.getLogger(__name__)


class CapturedStep:
    """One decode step as a graph. Its inputs are the slots' state and `slot_R`; all addresses are its own for life."""

    def __init__(self, step: DecodeStep) -> None:
        """Captures at once. The rows are padding then, so that only the null page is touched and no state changes."""
        self.step = step
        step.slot_R.fill_(-1)
        # Real launches first: they compile, load and set up what a capture could not.
        step.run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        violations: list[Exception] = []
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                try:
                    with capture_guard(step.parts.device):
                        self.output = step.run()
                except Exception as error:
                    violations.append(error)
                    raise
        except Exception as error:
            # Ending a broken capture raises as well, and would hide what broke it.
            raise violations[0] if violations else error from None

    def replay(self) -> StepOutput:
        """Run the step for the slots in `step.slot_R`; returns the tensors that the capture made, with new contents."""
        self._graph.replay()
        return self.output

    def drop(self) -> None:
        """Destroy the graph; its process group must still live."""
        self._graph.reset()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph of a former runner that the collector destroys during a capture would invalidate it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphRunner:
    """The captured ladder of one rank."""

    def __init__(
        self, parts: StepParts, max_rows: int, stats: GraphStats, progress: Callable[[str], None] | None = None
    ) -> None:
        """Captures every key of the ladder, largest first. What happens is counted in `stats`."""
        self.ladder = Ladder(max_rows, parts.width)
        self.stats = stats
        self._parts = parts
        self._graphs: dict[GraphKey, CapturedStep] = {}
        self._capture(progress)

    @torch.inference_mode()
    def _capture(self, progress: Callable[[str], None] | None) -> None:
        begin, device = time.perf_counter(), self._parts.device
        free, _ = torch.cuda.mem_get_info(device)
        keys = list(self.ladder)
        # The largest steps of each kind say how much scratch memory all need; they share it. Steps of few tokens may
        # take another way through the model.
        measured = Scratch(device)
        largest = {(key.width, key.drafts, key.rows * key.width <= MOST_STREAMED): key for key in reversed(keys)}
        for key in largest.values():
            DecodeStep(self._parts, key, measured).run()
        buffer = torch.empty(measured.peak, dtype=torch.uint8, device=device)
        with _no_garbage_collection():
            for key in keys:
                self._graphs[key] = CapturedStep(DecodeStep(self._parts, key, Scratch(device, buffer)))
        torch.cuda.synchronize(device)
        after, _ = torch.cuda.mem_get_info(device)
        stats = self.stats
        stats.capture_seconds = time.perf_counter() - begin
        stats.bytes = max(free - after, 0)
        if progress is not None:
            progress(f"captured {len(keys)} graphs in {stats.capture_seconds:.1f} s, {stats.bytes / 2**20:.0f} MiB")

    def captured(self, plan: StepPlan) -> CapturedStep | None:
        """The graph for a plan, its slots filled in; None, with the reason counted, when there is none."""
        layout = plan.layout
        key = self.ladder.key(layout, plan.drafts)
        if key is None:
            reason = "prefill rows" if plan.prefill else f"width {plan.width}, {plan.drafts} drafts"
            self.stats.eager[reason] += 1
            return None
        graph = self._graphs[key]
        self.stats.replays += 1
        self.stats.rows += layout.decode_rows
        self.stats.padded_rows += key.rows - layout.decode_rows
        slots = [*plan.decode_slots, *[-1] * (key.rows - layout.decode_rows)]
        graph.step.slot_R.copy_(torch.tensor(slots, dtype=torch.int64).pin_memory(), non_blocking=True)
        return graph

    def all(self) -> list[CapturedStep]:
        """Every captured step, in ladder order."""
        return list(self._graphs.values())

    def close(self) -> None:
        """Destroy the graphs. Before the process group, or its last collectives wait for ever."""
        for graph in self._graphs.values():
            graph.drop()
        self._graphs.clear()
