"""The captured graphs of one rank, one a bucket: which of them serves a step, and how the others come while it serves.

Where an engine serves before all of its graphs are captured, the others follow portion by portion. A step whose bucket
has no graph that may be used runs in the smallest larger bucket that has one, or else eagerly: padded like its bucket,
for which kernels were compiled, and in the memory that was reserved for graphs. Which graph a step takes follows from
the portions that are captured, and all ranks capture one at the same place among their steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kernels.sampling import TokenMasks
from workers.graphs.capture import (
    CapturedSplitStep,
    CapturedStep,
    Warmed,
    capture_split_steps,
    warm_up,
    warm_up_portion,
)
from workers.graphs.portions import Buckets, Portion
from workers.graphs.record import no_garbage_collection
from workers.graphs.segments import CapturedStage, CapturedTail
from workers.graphs.stats import GraphStats
from workers.memory.scratch import Scratch
from workers.protocol.plan import BatchLayout, GraphKey, StepPlan, TokenBuckets, TokenKey, alike
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepOutput, StepParts

NOT_YET = "not captured yet"
"""Reason for an eager step."""


@dataclass(frozen=True)
class UncapturedStep:
    """A decode step of a bucket without a graph; like `CapturedStep` and `CapturedSplitStep`, but it runs eagerly."""

    step: DecodeStep

    def replay(self, masks: Callable[[], TokenMasks | None] | None = None) -> StepOutput:
        """Run it for the slots in `step.slot_R`."""
        return self.step.run(masks)


def all_keys(parts: StepParts, max_rows: int, token_budget: int) -> Buckets:
    """Return the keys of all graphs of a rank."""
    return Buckets.of(parts.buckets(max_rows), TokenBuckets(token_budget), parts.most_tail_tokens(max_rows))


class GraphRunner:
    """The graphs of one rank."""

    def __init__(
        self,
        parts: StepParts,
        max_rows: int,
        token_budget: int,
        stats: GraphStats,
        progress: Callable[[str], None] | None = None,
        *,
        masks: TokenMasks | None = None,
        waiting: int | None = None,
        warmed: Warmed | None = None,
    ) -> None:
        """Captures every key of decode and token buckets, largest first. What happens is counted in `stats`. `masks`:
        where those of rows with a grammar will be, on ranks that sample. `waiting`: number of rows that wait for an
        engine which is to serve as soon as possible: only the first portion is captured then, and `left` has the
        others. `warmed`: what warming up has found before, in an engine of the same of everything; then each portion is
        warmed up by itself, right before it is captured. None: all are, now."""
        self.buckets = parts.buckets(max_rows)
        self.token_buckets = TokenBuckets(token_budget)
        self.stats = stats
        self._parts = parts
        self._masks = masks
        self._graphs: dict[GraphKey, CapturedStep] = {}
        self._split_steps: dict[GraphKey, CapturedSplitStep] = {}
        self._tails: dict[TokenKey, CapturedTail] = {}
        self._stages: dict[TokenKey, CapturedStage] = {}
        self.keys = all_keys(parts, max_rows, token_budget)
        """Keys of all graphs, those included that are not captured yet."""
        self.left = deque([self.keys.everything()] if waiting is None else self.keys.in_order(waiting))
        """Portions that are not captured yet, in their order."""
        self._uncaptured: dict[GraphKey, DecodeStep] = {}
        self._cold = warmed is not None
        """Whether portions are still to be warmed up."""
        with self._counted():
            self.warmed = warmed or warm_up(parts, max_rows, token_budget, masks)
            self._reserve()
        self.capture()
        stats.portions_left = len(self.left)
        if progress is not None:
            progress(self.summary())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time of the block, and the memory that it takes of the device, among those of captures."""
        device, begin = self._parts.device, time.perf_counter()
        free, _ = torch.cuda.mem_get_info(device)
        yield
        torch.cuda.synchronize(device)
        after, _ = torch.cuda.mem_get_info(device)
        self.stats.bytes += max(free - after, 0)
        self.stats.capture_seconds += time.perf_counter() - begin

    def _reserve(self) -> None:
        """Take the memory that all steps share."""
        device, sizes = self._parts.device, (self.warmed.scratch, self.warmed.inner)
        self._buffer, self._inner_buffer = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)

    def _scratch(self) -> Scratch:
        return Scratch(self._parts.device, self._buffer)

    def _inner(self) -> Scratch:
        return Scratch(self._parts.device, self._inner_buffer)

    @torch.inference_mode()
    def capture(self) -> Portion:
        """Capture the graphs of the next portion, and return that: steps take them from now on. All ranks together,
        between two steps; waits for the device."""
        portion, parts = self.left.popleft(), self._parts
        with self._counted(), no_garbage_collection():
            if self._cold:
                warm_up_portion(parts, portion, self._scratch(), self._inner(), self._masks)
            for key in portion.steps:
                self._graphs[key] = CapturedStep(DecodeStep(parts, key, self._scratch()))
            for keys in alike(portion.split_steps):
                split = capture_split_steps(parts, keys, self._scratch(), self._masks)
                self._split_steps |= zip(keys, split, strict=True)
            for tail_key in portion.tails:
                self._tails[tail_key] = CapturedTail(parts, tail_key.tokens, self._inner())
            for token_key in portion.stages:
                memory = self._scratch(), self._inner()
                self._stages[token_key] = CapturedStage(parts, token_key.tokens, *memory, self._tails)
        return portion

    def summary(self) -> str:
        """Return a line that says what is captured."""
        segments, stats = sum(stage.graphs for stage in self._stages.values()), self.stats
        left = f"; {len(self.left)} portions follow while it serves" if self.left else ""
        return (
            f"captured {len(self._graphs)} decode steps, {len(self._split_steps)} in two halves, {segments} segments "
            f"of {len(self._stages)} token buckets and "
            f"{len(self._tails)} endings in {stats.capture_seconds:.1f} s, {stats.bytes / 2**20:.0f} MiB{left}"
        )

    def stage(self, layout: BatchLayout) -> Stage:
        """Return the stage in which a mixed step of this layout runs; ValueError if it exceeds the token budget."""
        key = self.token_buckets.key(layout)
        if (stage := self._stages.get(key)) is None:
            self.stats.eager[NOT_YET] += 1
            return Stage(self._parts, key.tokens, self._scratch(), self._inner())
        self.stats.mixed_steps += 1
        self.stats.tokens += layout.tokens
        self.stats.padded_tokens += key.tokens - layout.tokens
        return stage

    def captured(self, plan: StepPlan, *, dense: bool) -> CapturedStep | UncapturedStep | None:
        """The graph for a plan of decode rows alone, or an eager step in its place, its slots filled in; None, with the
        reason counted, when there is no bucket for it. `dense`: see `DecodeBuckets.key`."""
        own: GraphKey | None = None
        for key in self.buckets.holding(plan.layout, plan.drafts, dense=dense):
            if key in self._graphs:
                self._take(self._graphs[key].step, plan)
                return self._graphs[key]
            own = own or key
        if own is None:
            self.stats.eager[f"width {plan.width}, {plan.drafts} drafts"] += 1
            return None
        return self._eager(own, plan)

    def split_step(self, plan: StepPlan) -> CapturedSplitStep | UncapturedStep | None:
        """Return the split step for a plan with rows that have a grammar, or an eager step in its place, its slots
        filled in; None, with the reason counted, when there is no bucket for it."""
        own: GraphKey | None = None
        for key in self.buckets.holding_split(plan.layout, plan.drafts):
            if key in self._split_steps:
                self._take(self._split_steps[key].step, plan)
                return self._split_steps[key]
            own = own or key
        if own is None:
            self.stats.eager[f"width {plan.width}, {plan.drafts} drafts, masks"] += 1
            return None
        return self._eager(own, plan)

    def _eager(self, key: GraphKey, plan: StepPlan) -> UncapturedStep:
        self.stats.eager[NOT_YET] += 1
        if key not in self._uncaptured:
            self._uncaptured[key] = DecodeStep(self._parts, key, self._scratch())
        _fill_in(self._uncaptured[key], plan)
        return UncapturedStep(self._uncaptured[key])

    def _take(self, step: DecodeStep, plan: StepPlan) -> None:
        """Fill a plan's slots in, and count the step."""
        self.stats.replays += 1
        self.stats.rows += len(plan.decode_slots)
        self.stats.padded_rows += step.key.rows - len(plan.decode_slots)
        _fill_in(step, plan)

    def split_steps(self) -> list[CapturedSplitStep]:
        """Every step that was captured as a forward graph and a sampling graph, in the order of the buckets."""
        return list(self._split_steps.values())

    def all(self) -> list[CapturedStep]:
        """Every captured step, in the order of the buckets."""
        return list(self._graphs.values())

    def stages(self) -> list[CapturedStage]:
        """The captured segments of every token bucket, in the order of the buckets."""
        return list(self._stages.values())

    def tails(self) -> list[CapturedTail]:
        """The captured tails, which all token buckets share, in the order of the buckets."""
        return list(self._tails.values())

    def step_of(self, key: GraphKey) -> CapturedStep:
        """The graph of a decode step. KeyError where it is not captured."""
        return self._graphs[key]

    def split_step_of(self, key: GraphKey) -> CapturedSplitStep:
        """The two graphs of a decode step under masks. KeyError where they are not captured."""
        return self._split_steps[key]

    def stage_of(self, key: TokenKey) -> CapturedStage:
        """The segments of a token bucket. KeyError where they are not captured."""
        return self._stages[key]

    def tail_of(self, key: TokenKey) -> CapturedTail:
        """The logits-only tail of a token bucket. KeyError where it is not captured."""
        return self._tails[key]

    @property
    def there(self) -> Portion:
        """The keys of all graphs that are captured."""
        return Portion(tuple(self._graphs), tuple(self._split_steps), tuple(self._tails), tuple(self._stages))

    @property
    def count(self) -> int:
        """Graphs there are."""
        return (
            len(self._graphs)
            + len(self._split_steps)
            + len(alike(list(self._split_steps)))
            + len(self._tails)
            + sum(stage.graphs for stage in self._stages.values())
        )

    def close(self) -> None:
        """Destroy the graphs. Before the process group, or its last collectives wait for ever."""
        for buckets in (self._graphs, self._split_steps, self._stages, self._tails):
            for captured in buckets.values():
                captured.drop()
            buckets.clear()


def _fill_in(step: DecodeStep, plan: StepPlan) -> None:
    slots = torch.tensor([*plan.decode_slots, *[-1] * (step.key.rows - len(plan.decode_slots))], dtype=torch.int64)
    step.slot_R.copy_(slots.pin_memory() if step.slot_R.is_cuda else slots, non_blocking=True)
