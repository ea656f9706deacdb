"""The warm-up of mixed steps, before a replica serves. Its steps say how much memory mixed steps need, and
compile what runs between the segments. Their rows are of slot -1, whose pages are the null page, whose state nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from msgspec.structs import replace

from kernels.linear import MOST_STREAMED
from kernels.page import PAGE_TOKENS
from kernels.sampling import TokenMasks
from workers.memory.scratch import Scratch
from workers.models.attention.decode_rows import MOST_MERGED
from workers.models.attention.expanded import entries_of_a_row
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.deepseek_v4_model import CompressedModel
from workers.protocol.plan import BatchLayout, PrefillRow, StepPlan, TokenBuckets
from workers.step.mixed import MixedStep, Stage, at_once
from workers.step.parts import StepParts

NOBODY = -1
_SHORT = 16
"""Tokens of the shortest chunk: fewer take no other kernels, but in invariant mode (`decode_batch_plans`)."""


def warm_up_plans(parts: StepParts, budget: int) -> Iterator[StepPlan]:
    """Plans of every kind of mixed step: all but one slot decoding, at every width, or none; chunks of every length
    for which attention may have a kernel of its own, with cached context and without."""
    slots, widths, drafts = parts.state.slots, sorted(parts.widths, reverse=True), parts.width - 1
    longest = _longest(parts)
    for context in (0, PAGE_TOKENS):
        for width in widths:
            decode = (NOBODY,) * min(slots - 1, (budget - 1) // width)
            room = budget - width * len(decode)
            yield _plan(width, drafts, decode, _chunks(room, context, longest, slots - len(decode)))
            yield _plan(width, drafts, (), _chunks(1, context, longest, slots))
        for tokens in _doubled(_SHORT, budget):
            yield _plan(parts.width, drafts, (), _chunks(tokens, context, longest, slots))
    for tokens in parts.model.segments.short_chunks:
        if tokens <= budget:
            yield _plan(parts.width, drafts, (), _chunks(tokens, 0, longest, slots))
    # Rows with more context than is expanded at once: the more rows, the less of each. One entry more, for rows may not
    # have room for a page.
    rows = min(slots, budget)
    context = entries_of_a_row(rows) + 1
    if context < longest:
        yield _plan(1, drafts, (), _single(rows, context))


def decode_batch_plans(parts: StepParts, budget: int) -> Iterator[StepPlan]:
    """Plans of a short chunk beside every power of two of decode rows, beside the most whose products are streamed, and
    the fewest whose pieces are merged by themselves, at every width: how attention deals them out and merges them is
    compiled in. In invariant mode, to whose attention they are decode rows, too, of as many chunks, alone and beside
    one that fills the step, and of short chunks that are cut into more rows than there are slots."""
    slots, drafts = parts.state.slots, parts.width - 1
    heads = parts.model.segments.heads
    for width in parts.widths:
        merged = MOST_MERGED // (heads * width) + 1
        for rows in sorted({*_doubled(1, slots), MOST_STREAMED // width, merged}):
            if 0 < rows < slots and rows * width < budget:
                yield _plan(width, drafts, (NOBODY,) * rows, _single(1, 0))
    if not parts.model.paths.invariant:
        return
    for rows in _doubled(1, min(slots, budget)):
        yield _plan(1, drafts, (), _single(rows, 0))
        if rows < slots:
            filling = _chunks(budget - rows, 0, _longest(parts), slots - rows)
            yield _plan(1, drafts, (), (*_single(rows, 0), *filling))
    for tokens in _doubled(1, min(_SHORT, budget)):
        if tokens > slots:
            yield _plan(1, drafts, (), _chunks(tokens, 0, _longest(parts), slots))


def scoring_plans(parts: StepParts, budget: int) -> Iterator[StepPlan]:
    """Plans of chunks all of whose tokens are scored: first beside the most decode rows, whose lengths and page tables
    take memory meanwhile; then alone, for every size of a piece."""
    buckets, longest, slots, drafts = TokenBuckets(budget), _longest(parts), parts.state.slots, parts.width - 1
    width = min(parts.widths)
    beside = (NOBODY,) * min(slots - 1, (budget - 1) // width)
    yield _plan(width, drafts, beside, _scored(budget - width * len(beside), longest, slots - len(beside)))
    most = buckets.key(BatchLayout(1, min(at_once(slots), budget))).tokens
    for key in buckets:
        if key.tokens <= most:
            yield _plan(1, drafts, (), _scored(key.tokens, longest, slots))


def _scored(tokens: int, longest: int, rows: int) -> Iterator[PrefillRow]:
    """`_chunks` whose tokens are all scored, if something of the prompt follows them."""
    for row in _chunks(tokens, 0, longest, rows):
        yield replace(row, score_to=len(row.tokens) - row.final)


def _longest(parts: StepParts) -> int:
    """Tokens a row may have behind which there is room for a step's own."""
    return min(parts.model.max_positions, parts.state.pages_per_row * PAGE_TOKENS) - parts.width


def _doubled(first: int, last: int) -> list[int]:
    """`first` times every power of two, below `last`, and `last`."""
    counts = []
    while first < last:
        counts.append(first)
        first *= 2
    return [*counts, last]


def _single(rows: int, context: int) -> Iterator[PrefillRow]:
    """Yield this number of chunks of one token, each the end of a prompt."""
    return (PrefillRow(NOBODY, context, (0,), 0, True) for _ in range(rows))


def _chunks(tokens: int, context: int, longest: int, rows: int) -> Iterator[PrefillRow]:
    """Rows that feed so many tokens, or what so many rows can; the first ends its prompt. Behind `context` cached ones,
    or what so many tokens leave room for, one at least."""
    context = min(context, max(longest - tokens, 1), longest - 1)
    begun = 0
    while begun < tokens and rows:
        rows -= 1
        count = min(tokens - begun, longest - context)
        final = not begun
        yield PrefillRow(NOBODY, context, (0,) * count, 0, final, -1 if final else 0)
        begun += count


def _plan(width: int, drafts: int, decode: tuple[int, ...], prefill: Iterable[PrefillRow]) -> StepPlan:
    return StepPlan(1, width, drafts, decode, tuple(prefill))


def warm_up_segments(stage: Stage) -> None:
    """Run the segments and tails of every bucket, in memory of their own but for what they need on their way. What it
    would take of the stage's counts there."""
    parts, buckets = stage.parts, TokenBuckets(stage.tokens)
    # More than any step wants: the self-test's prefill path has no padding either, and feeds all tokens of its rows.
    slots = parts.state.slots
    tails = set(buckets.tails(max(slots * parts.width, at_once(slots))))
    for key in buckets:
        # Fewer tokens may need more: their products are cut up another way, and sums of their residual streams have
        # more parts.
        bucket = stage.smaller(key.tokens)
        bucket.clear()
        for which in range(len(bucket.segments)):
            for index in bucket.indices(which):
                bucket.run_segment(which, index)
        if key in tails:
            bucket.end(bucket.token_T)


def warm_up_mixed_steps(stage: Stage, masks: TokenMasks | None = None) -> None:
    """Run every kind of mixed step in `stage`, and take the memory that the largest context needs, and that segments
    and tails of any smaller bucket do. No slot's state changes, and of the cache only the null page. `masks`: where
    those of rows with a grammar will be, on ranks that sample."""
    parts, buckets = stage.parts, TokenBuckets(stage.tokens)
    warm_up_segments(stage)
    step = MixedStep(parts)
    masked: dict[tuple[int, bool], StepPlan] = {}
    for plan in warm_up_plans(parts, stage.tokens):
        step.run(plan, stage)
        masked.setdefault((plan.width, bool(plan.decode_slots)), plan)
    for plan in masked.values():  # on ranks that do not sample, too: a step is one of all ranks
        step.run(plan, stage, lambda: masks)
    for index, plan in enumerate(scoring_plans(parts, stage.tokens)):
        if index == 0:
            step.run(plan, stage)
        step.run(plan, stage.smaller(buckets.key(plan.layout).tokens))
    for plan in decode_batch_plans(parts, stage.tokens):
        step.run(plan, stage.smaller(buckets.key(plan.layout).tokens))
    reserve_attention(stage, launch=True)
    forget_nobody(parts)


def forget_nobody(parts: StepParts) -> None:
    """Undo what mixed steps have sampled for nobody. Waits for the device."""
    for tensor_S in (parts.state.tensors.length_S, parts.state.tensors.last_S):
        tensor_S[NOBODY] = 0
    if parts.sampling is not None:
        parts.sampling.fault_1.zero_()
    parts.cache.out_of_bounds_count_1.zero_()
    if parts.device.type == "cuda":
        torch.cuda.synchronize(parts.device)


def reserve_attention(stage: Stage, *, launch: bool = False) -> None:
    """Take the memory that attention of the largest context needs. Nothing is computed, but with `launch` what depends
    on the context's size alone."""
    parts = stage.parts
    if isinstance(parts.model, CompressedModel):
        return  # what its attention needs does not grow with the context of its rows
    buffers, attention = stage.tensors[0].buffers, parts.model.layers[0].attention
    pages, device = parts.state.pages_per_row, parts.device
    rows = min(parts.state.slots - 1, (stage.tokens - 1) // parts.width)
    length_R = torch.zeros(rows, dtype=torch.int32, device=device)
    decode = DecodeBatch(length_R, length_R.new_zeros(rows, pages)) if rows else None
    chunk = stage.tokens - rows * parts.width
    layout = BatchLayout(parts.width, rows, (chunk,), (True,))
    prefill = None
    if parts.group.sharing is not None:
        # Each rank lists its pages of all rows: of as many as there may be of both kinds together.
        start = max(0, pages * PAGE_TOKENS - chunk)
        others = max(1, min(parts.state.slots, stage.tokens) - rows)
        prefill = PrefillBatch((start,), (chunk,), torch.zeros(others, pages, dtype=torch.int32, device=device))
    batch = Batch(layout, stage.position_T, stage.cache_slot_T, decode, prefill, group=parts.group.sharing)
    for geometry in attention.largest_geometries(stage.tokens, parts.state.slots, pages, device):
        with stage.scratch.scope(), stage.inner.scope():
            planned, rotation_PO = attention.plan(batch, stage.scratch), parts.model.rotation_PO
            outputs = buffers.projected, buffers.attended_THV
            backends = attention.backends(*outputs, planned, geometry, rotation_PO, stage.inner)
            for backend in backends if launch else ():
                backend.reserve(attention.heads)


def reserve_decode(parts: StepParts, rows: int, scratch: Scratch) -> None:
    """Take the memory that attention of a step of so many decode rows needs, beside what its segments hand on; nothing
    is computed."""
    segments, width, device = parts.model.segments, parts.width, parts.device
    attention, layout = parts.model.layers[0].attention, BatchLayout(width, rows)
    with scratch.scope():
        buffers = segments.buffers(layout.tokens, scratch)
        length_R = torch.zeros(rows, dtype=torch.int32, device=device)
        slot_T = torch.zeros(layout.tokens, dtype=torch.int64, device=device)
        decode = DecodeBatch(length_R, length_R.new_zeros(rows, parts.state.pages_per_row))
        batch = Batch(layout, slot_T, slot_T, decode, None, group=parts.group.sharing)
        planned, geometry = attention.plan(batch, scratch), attention.geometry(batch)
        outputs = buffers.projected, buffers.attended_THV
        attention.backends(*outputs, planned, geometry, parts.model.rotation_PO, scratch)
