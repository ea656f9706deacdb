"""Verification in Triton: a block of rows per program."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(
    do_not_specialize=["rows", "target_stride", "draft_stride", "vocab"],
    do_not_specialize_on_alignment=["accepted", "faults_out"],  # they lie behind a number of tokens
)
def accept(
    target,
    draft,
    accepted,
    fault,
    faults_out,
    rows,
    target_stride,
    draft_stride,
    vocab,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    CHECKED: tl.constexpr,
    TOLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Leading drafts that equal the target's token before them and are tokens. CHECKED: ids that are none count as
    faults (sums of integers, in whatever order). TOLD: the only program says how many faults there are now."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    live = (row < rows)[:, None]
    place = row.to(tl.int64)[:, None]
    at_target, at_draft = target + place * target_stride + lane, draft + place * draft_stride + lane
    chosen = tl.load(at_target, mask=live & (lane <= DRAFTS), other=0, cache_modifier=".cg")
    drafted = tl.load(at_draft, mask=live & (lane < DRAFTS), other=0, cache_modifier=".cg")
    matches = (drafted == chosen) & (drafted >= 0) & (drafted < vocab)
    number = tl.min(tl.where(matches & (lane < DRAFTS), DRAFTS, tl.minimum(lane, DRAFTS)), 1)
    tl.store(accepted + row, number.to(tl.int64), mask=row < rows)
    if CHECKED:
        if TOLD:
            before = tl.load(fault, cache_modifier=".cg")
        wrong = ((chosen < 0) | (chosen >= vocab)).to(tl.int64) + ((drafted < 0) | (drafted >= vocab)).to(tl.int64)
        wrong = tl.sum(tl.sum(wrong, 1), 0)
        if wrong > 0:
            tl.atomic_add(fault, wrong)
        if TOLD:
            tl.store(faults_out, before + wrong)
