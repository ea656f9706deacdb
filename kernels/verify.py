"""Verification of drafts: how many of a decode row's drafts are accepted.

A decode row feeds its last token and X drafts, and the target model's token is sampled at each of the W = X + 1
positions. Draft i is accepted if all drafts before it are and it equals the target token at its position, the token
that would have been sampled there without drafts. The row emits its target tokens 0 ... accepted.

Noise is a function of the position alone, so the emitted tokens follow the target's distribution p whatever was
drafted. A draft that is sampled with the same noise from q agrees with probability (1 - d) / (1 + d) or more, where d
is the total variation distance of p and q: a Gumbel coupling (Daliri, Musco, Suresh, arXiv:2408.07978), not rejection
sampling.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_NO_LIMIT = 2**62


def accept_drafts(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None = None,
    fault_1: Tensor | None = None,
    faults_1: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Write the number of leading drafts that are accepted, 0 ... X, to `accepted_D` (int64 [D]).

    `target_DW`, `draft_DX`: int64 token ids. An id that is no token (below 0, or not below `vocab`) is never accepted,
    even if both sides agree on it, and with `vocab` given adds 1 to `fault_1` (int64 [1]) wherever it occurs.
    `faults_1` (int64 [1], goes with `fault_1`): what `fault_1` is then. `dependent`: programmatic dependent launch
    (compute capability 9.0 and above), which is always safe.
    """
    rows, width = target_DW.shape
    assert draft_DX.shape == (rows, width - 1)
    assert accepted_D.shape == (rows,)
    if target_DW.is_cuda:
        launch_accept_drafts(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1, dependent=dependent)
        return
    accept_drafts_reference(target_DW, draft_DX, accepted_D, vocab, fault_1, faults_1)


def accept_drafts_reference(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None,
    fault_1: Tensor | None,
    faults_1: Tensor | None = None,
) -> None:
    """`accept_drafts` in plain torch."""
    before_DX = target_DW[:, :-1]
    accepted_DX = (draft_DX == before_DX) & (draft_DX >= 0)
    if vocab is not None:
        accepted_DX &= draft_DX < vocab
        if fault_1 is not None:
            tokens = torch.cat((target_DW, draft_DX), dim=1)
            fault_1.add_(((tokens < 0) | (tokens >= vocab)).sum())
            if faults_1 is not None:
                faults_1.copy_(fault_1)
    accepted_D.copy_(accepted_DX.to(torch.int64).cumprod(dim=1).sum(dim=1))


def launch_accept_drafts(
    target_DW: Tensor,
    draft_DX: Tensor,
    accepted_D: Tensor,
    vocab: int | None,
    fault_1: Tensor | None,
    faults_1: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """`accept_drafts` as a Triton kernel."""
    rows, width = target_DW.shape
    if not rows:
        return
    lanes = triton.next_power_of_2(width)
    block = 128 // min(lanes, 128)
    if faults_1 is not None:  # one program, which knows all faults
        block = max(block, triton.next_power_of_2(rows))
    accept_drafts_kernel[(triton.cdiv(rows, block),)](
        target_DW,
        draft_DX if width > 1 else target_DW,
        accepted_D,
        accepted_D if fault_1 is None else fault_1,
        accepted_D if faults_1 is None else faults_1,
        rows,
        target_DW.stride(0),
        draft_DX.stride(0),
        _NO_LIMIT if vocab is None else vocab,
        DRAFTS=width - 1,
        LANES=lanes,
        ROWS=block,
        CHECKED=vocab is not None and fault_1 is not None,
        TOLD=faults_1 is not None,
        DEPENDENT=dependent,
        num_warps=min(max(block * lanes // 256, 4), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit(
    do_not_specialize=["rows", "target_stride", "draft_stride", "vocab"],
    do_not_specialize_on_alignment=["accepted", "faults_out"],  # they lie behind a number of tokens
)
def accept_drafts_kernel(
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
    """A block of rows: the leading drafts that equal the target's token before them and are tokens. CHECKED: ids that
    are none count as faults (sums of integers, in whatever order). TOLD: the only program says how many faults there
    are now."""
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
