"""Decode steps as CUDA graphs, and the warm-up before a capture (`workers.graphs.graph_runner` has a rank's graphs)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernels.runtime import ahead
from kernels.runtime.ahead import Compiled, Share, compile_ahead
from kernels.sampling import TokenMasks
from workers.graphs.compiled_stage import CompiledStage
from workers.graphs.mixed_warm_up import forget_nobody, warm_up_mixed_steps, warm_up_plans, warm_up_segments
from workers.graphs.portions import Portion
from workers.graphs.record import record
from workers.memory.scratch import Scratch
from workers.models.deepseek_v4_model import CompressedModel
from workers.protocol.plan import GraphKey, TokenBuckets
from workers.step.decode import DecodeStep
from workers.step.mixed import MixedStep, Stage
from workers.step.parts import StepOutput, StepParts

logger = logging.getLogger(__name__)


class CapturedStep:
    """One decode step as a graph. Its inputs are the slots' state and `slot_R`; all addresses are its own for life."""

    def __init__(self, step: DecodeStep) -> None:
        """Captures at once. The rows are padding then, so that only the null page is touched and no state changes."""
        self.step = step
        step.slot_R.fill_(-1)
        self._graph, self.output = record(step.parts.device, step.run)

    def replay(self) -> StepOutput:
        """Run the step for the slots in `step.slot_R`; returns the tensors that the capture made, with new contents."""
        self._graph.replay()
        return self.output

    def drop(self) -> None:
        """Destroy the graph; its process group must still live."""
        self._graph.reset()


class CapturedSplitStep:
    """A decode step split into a forward graph (the target's pass) and a sampling graph (all that follows from it);
    masks are filled between them."""

    def __init__(
        self, step: DecodeStep, target: torch.cuda.CUDAGraph, rest: torch.cuda.CUDAGraph, output: StepOutput
    ) -> None:
        self.step, self._target, self._rest, self.output = step, target, rest, output

    def replay(self, masks: Callable[[], TokenMasks | None]) -> StepOutput:
        """Run the step for the slots in `step.slot_R`. `masks` is called when the forward graph is launched, and puts
        the masks where they were captured; it may wait."""
        self._target.replay()
        masks()
        self._rest.replay()
        return self.output

    def drop(self) -> None:
        """Destroy the graphs; their process group must still live. Of a graph that is shared that is done more than
        once, which does nothing."""
        self._target.reset()
        self._rest.reset()


def capture_split_steps(
    parts: StepParts, keys: Sequence[GraphKey], scratch: Scratch, masks: TokenMasks | None
) -> list[CapturedSplitStep]:
    """Captures split steps, both graphs of each at once, as `CapturedStep` does. They differ by their drafts alone, so
    the forward graph is one for all. `masks`: where they will be, on ranks that sample."""
    first = DecodeStep(parts, keys[0], scratch)
    first.slot_R.fill_(-1)
    captured: list[CapturedSplitStep] = []
    with first.memory():
        target, passed = record(parts.device, first.target)
        for key in keys:
            step = first if key == keys[0] else first.drafting(key.drafts)
            with step.memory():
                rest, output = record(parts.device, partial(step.rest, passed, masks))
            captured.append(CapturedSplitStep(step, target, rest, output))
    return captured


GRAPH_BYTES = 1 << 19
"""Device memory for a graph itself, and its share of what the driver and cuBLAS take while graphs are captured: more
than the 0.22 MiB (of 718 graphs) and 0.4 MiB (of 1,131) that starts on an H200 took beyond the scratch memory."""
COMPRESSED_GRAPH_BYTES = 1 << 20
"""The same of DeepSeek V4, whose layers launch more: a start of Flash on two H200, with 1,152 graphs, took 0.84 MiB for
each beyond the scratch memory that is estimated of it."""


@dataclass(frozen=True)
class Warmed:
    """Memory and graphs that a rank needs, as found by warming up."""

    scratch: int
    """Bytes for decode steps, and for what mixed steps hand on."""
    inner: int
    """Bytes for what the segments and tails of mixed steps, or attention between them, need on their way."""
    graphs: int
    of_graph: int = GRAPH_BYTES
    """Bytes for each."""

    @property
    def bytes(self) -> int:
        """Device memory that a capture will take in all, in bytes."""
        return self.scratch + self.inner + self.graphs * self.of_graph


@torch.inference_mode()
def compile_steps(
    parts: StepParts,
    max_rows: int,
    token_budget: int,
    threads: int,
    *,
    proof: bool = True,
    masks: TokenMasks | None = None,
) -> Compiled:
    """Compile what steps of all shapes launch, and with `proof` what the self-test launches besides, so many kernels at
    a time; nothing is computed. Where Triton cannot compile ahead, `warm_up` compiles those of steps one after the
    other. `masks`: where those of rows with a grammar will be, on ranks that sample."""
    if not ahead.possible():
        return Compiled()
    few, scratch = _shallow(parts), Scratch(parts.device, zeroed=True)
    model, keys = few.model, list(parts.buckets(max_rows))
    world = parts.group.mesh.world
    with compile_ahead(parts.device, threads, Share(world.rank, world.size)) as compiled:
        _decode(few, keys, parts.buckets(max_rows).split_keys(), scratch, masks)
        warm_up_mixed_steps(CompiledStage(few, token_budget, scratch, scratch.another()), masks)
        if proof and model.paths.quantizes_activations(token_budget, model.norm_E.dtype, parts.device):
            with model.paths.without_w8a8():
                _decode(few, keys, (), scratch)
                warm_up_segments(CompiledStage(few, token_budget, scratch, scratch.another()))
    return compiled


def _decode(
    parts: StepParts,
    keys: Iterable[GraphKey],
    split_keys: Iterable[GraphKey],
    scratch: Scratch,
    masks: TokenMasks | None = None,
) -> None:
    """Launch what decode steps launch, those of `split_keys` under `masks`, where launches compute nothing. Steps that
    differ by their drafts or masks alone share one forward pass, which knows of neither."""
    alike: dict[tuple[int, int, bool], list[tuple[GraphKey, TokenMasks | None]]] = {}
    for some, own_masks in ((keys, None), (split_keys, masks)):
        for key in some:
            alike.setdefault((key.rows, key.width, key.dense), []).append((key, own_masks))
    for steps in alike.values():
        first = DecodeStep(parts, steps[0][0], scratch)
        with first.memory():
            passed = first.target()
            for key, own_masks in steps:
                step = first.drafting(key.drafts)
                with step.memory():
                    step.rest(passed, own_masks)


@torch.inference_mode()
def compile_first(parts: StepParts, portion: Portion, token_budget: int, threads: int) -> Compiled:
    """The same, but only what the steps of this portion launch, and the mixed steps that fill prompts: for an engine
    that is to serve at once, where all kernels are in Triton's cache. Others are loaded when they are first launched.
    """
    if not ahead.possible():
        return Compiled()
    few, scratch = _shallow(parts), Scratch(parts.device, zeroed=True)
    world = parts.group.mesh.world
    with compile_ahead(parts.device, threads, Share(world.rank, world.size)) as compiled:
        _decode(few, portion.steps, (), scratch)
        stage, step = CompiledStage(few, token_budget, scratch, scratch.another()), MixedStep(few)
        for plan in warm_up_plans(few, token_budget):
            step.run(plan, stage)
    forget_nobody(parts)
    return compiled


@torch.inference_mode()
def warm_up_portion(
    parts: StepParts, portion: Portion, scratch: Scratch, inner: Scratch, masks: TokenMasks | None = None
) -> None:
    """Launch for real what the graphs of a portion launch, for an engine that has not warmed up: on padding, and in the
    memory that graphs use. No step may be under way."""
    few = _shallow(parts)
    for key in portion.steps:
        DecodeStep(few, key, scratch).run()
    for key in portion.split_steps:
        DecodeStep(few, key, scratch).run(lambda: masks)
    for token_key in portion.stages:
        with scratch.scope(), inner.scope():
            stage = Stage(few, token_key.tokens, scratch, inner)
            stage.clear()
            for which in range(len(stage.segments)):
                for index in stage.indices(which):
                    stage.run_segment(which, index)
            if token_key in portion.tails:
                stage.end(stage.token_T)


@torch.inference_mode()
def warm_up(parts: StepParts, max_rows: int, token_budget: int, masks: TokenMasks | None = None) -> Warmed:
    """Launch for real what steps of all shapes launch, and measure how much memory they need. The rows are padding, so
    that only the null page is touched and no state changes."""
    device, few = parts.device, _shallow(parts)
    keys = list(parts.buckets(max_rows))
    scratch, inner = Scratch(device), Scratch(device)
    # All share scratch memory. Fewer tokens may need more: of some numbers of them products are left in parts.
    for key in keys:
        DecodeStep(few, key, scratch).run()
    for key in parts.buckets(max_rows).split_keys():
        DecodeStep(few, key, scratch).run(lambda: masks)
    warm_up_mixed_steps(Stage(few, token_budget, scratch, inner), masks)
    graphs = count_graphs(parts, max_rows, token_budget)
    if isinstance(parts.model, CompressedModel):
        return Warmed(scratch.peak, inner.peak, graphs, COMPRESSED_GRAPH_BYTES)
    return Warmed(scratch.peak, inner.peak, graphs)


def count_graphs(parts: StepParts, max_rows: int, token_budget: int) -> int:
    """Return the number of graphs that a capture will make."""
    buckets = TokenBuckets(token_budget)
    segments = sum(map(len, parts.passes)) - 1  # the last one's are the tails
    rows = parts.buckets(max_rows)
    split = len(list(rows.split_keys())) + len(rows.forward_graph_keys())
    steps, tails = len(list(rows)) + split, len(list(buckets.tails(parts.most_tail_tokens(max_rows))))
    return steps + segments * len(list(buckets)) + tails


def _shallow(parts: StepParts) -> StepParts:
    return replace(parts, model=parts.model.shallow())
