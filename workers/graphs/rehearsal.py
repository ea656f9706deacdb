"""Mixed steps that nobody asked for, run before a replica serves: they say how much memory mixed steps need, and
compile what runs between the segments. Their rows are of slot -1, whose pages are the null page, whose state nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.page import PAGE_TOKENS
from workers.batch import Batch, DecodeBatch
from workers.graphs.ladder import TokenLadder
from workers.graphs.segments import Stage
from workers.mixed_step import MixedStep
from workers.models.prefill import entries_of_a_row
from workers.plan import BatchLayout, PrefillRow, StepPlan
from workers.step import StepParts

NOBODY = -1
_SHORT = 16
"""Tokens of a short chunk, for which attention has a kernel of its own."""


def rehearsals(parts: StepParts, budget: int) -> Iterator[StepPlan]:
    """Plans of every kind of mixed step: all but one slot decoding, at either width, or none; long chunks and short
    ones, with cached context and without."""
    longest = min(parts.model.max_positions, parts.state.pages_per_row * PAGE_TOKENS) - parts.width
    slots, widths = parts.state.slots, sorted({1, parts.width}, reverse=True)
    for context in (0, min(PAGE_TOKENS, longest - 1)):
        for width in widths:
            decode = (NOBODY,) * min(slots - 1, (budget - 1) // width)
            room = budget - width * len(decode)
            yield _plan(width, parts.width - 1, decode, _chunks(room, context, longest, slots - len(decode)))
        yield _plan(parts.width, parts.width - 1, (), _chunks(min(_SHORT, budget), context, longest, slots))
    # Rows with more context than is expanded at once: the more rows, the less of each.
    rows = min(slots, budget)
    context = entries_of_a_row(rows) + PAGE_TOKENS
    if context < longest:
        yield StepPlan(1, 1, parts.width - 1, (), tuple(next(_chunks(1, context, longest, 1)) for _ in range(rows)))


def companies(parts: StepParts, budget: int) -> Iterator[StepPlan]:
    """Plans of a short chunk beside every power of two of decode rows, at either width: how attention deals them out
    and merges them is compiled in."""
    rows = 1
    while rows < parts.state.slots:
        for width in {1, parts.width}:
            if rows * width < budget:
                yield _plan(width, parts.width - 1, (NOBODY,) * rows, _chunks(1, 0, 1, 1))
        rows *= 2


def _chunks(tokens: int, context: int, longest: int, rows: int) -> Iterator[PrefillRow]:
    """Rows that feed so many tokens behind `context` cached ones, or what so many rows can; the first ends its
    prompt."""
    begun = 0
    while begun < tokens and rows:
        rows -= 1
        count = min(tokens - begun, longest - context)
        final = not begun
        yield PrefillRow(NOBODY, context, (0,) * count, 0, final, -1 if final else 0)
        begun += count


def _plan(width: int, drafts: int, decode: tuple[int, ...], prefill: Iterator[PrefillRow]) -> StepPlan:
    return StepPlan(1, width, drafts, decode, tuple(prefill))


def rehearse(stage: Stage) -> None:
    """Run every kind of mixed step in `stage`, and take the memory that the largest context needs, and that segments
    and endings of any smaller bucket do. No slot's state changes, and of the cache only the null page."""
    parts, ladder = stage.parts, TokenLadder(stage.tokens)
    # More than any step wants: the self-test's prefill path has no padding either, and feeds all tokens of its rows.
    endings = set(ladder.endings(parts.state.slots * parts.width))
    for key in ladder:
        # Fewer tokens may need more: their products are cut up another way.
        bucket = Stage(parts, key.tokens, stage.scratch.another(), stage.inner)
        bucket.clear()
        for which in range(len(bucket.segments)):
            for index in bucket.indices(which):
                bucket.run_segment(which, index)
        if key in endings:
            bucket.end(bucket.token_T)
    step = MixedStep(parts)
    for plan in rehearsals(parts, stage.tokens):
        step.run(plan, stage)
    for plan in companies(parts, stage.tokens):
        step.run(plan, Stage(parts, ladder.key(plan.layout).tokens, stage.scratch.another(), stage.inner))
    flow, attention = stage.tensors[0].flow, parts.model.segments.layers[0].attention
    pages, device = parts.state.pages_per_row, parts.device
    rows = min(parts.state.slots - 1, (stage.tokens - 1) // parts.width)
    length_R = torch.zeros(rows, dtype=torch.int32, device=device)
    decode = DecodeBatch(length_R, length_R.new_zeros(rows, pages)) if rows else None
    layout = BatchLayout(parts.width, rows, (stage.tokens - rows * parts.width,), (True,))
    batch = Batch(layout, stage.position_T, stage.cache_slot_T, decode, None)
    for geometry in attention.largest_geometries(stage.tokens, parts.state.slots, pages, device):
        with stage.scratch.scope(), stage.inner.scope():
            planned, rotation_PO = attention.planned(batch, stage.scratch), parts.model.rotation_PO
            attention.attending(flow.projected, flow.attended_THV, planned, geometry, rotation_PO, stage.inner)
    # What was sampled for nobody.
    for tensor_S in (parts.state.tensors.length_S, parts.state.tensors.last_S):
        tensor_S[NOBODY] = 0
    if parts.sampling is not None:
        parts.sampling.fault_1.zero_()
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)
