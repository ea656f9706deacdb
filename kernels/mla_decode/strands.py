"""The merge of invariant mode in portable Triton: a row's pieces as `kernels.strands` has them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.strands import pair_sum, pair_weights

_CTA = tl.constexpr(CTA_FIELDS)
_ROW = tl.constexpr(ROW_FIELDS)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tree_level(sums, log, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Merge each of 2 HALF parts with the one HALF further on."""
    a, b = tl.split(tl.permute(tl.reshape(sums, (2, HALF, COLUMNS)), (1, 2, 0)))
    a_log, b_log = tl.split(tl.permute(tl.reshape(log, (2, HALF)), (1, 0)))
    first, weight, total, log = pair_weights(a_log, b_log)
    return pair_sum(a, b, first[:, None], weight[:, None], total[:, None]), log


@triton.jit(do_not_specialize=["queries", "ctas"])
def merge_strands(
    partial,
    partial_lse,
    metadata,
    out,
    lse,
    queries,
    ctas,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRANDS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Merge the pieces of every row, or where `LAST` is false the part of them that this rank has, whose log-sum-exp
    stays to the base 2. Grid: rows, queries, columns."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    record = metadata + ctas * _CTA + row * _ROW
    slot = tl.load(record)
    pieces = tl.load(record + 2)
    strand = tl.arange(0, STRANDS)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((STRANDS, COLUMNS), tl.float32)
    log = tl.full((STRANDS,), float("-inf"), tl.float32)
    for start in range(0, pieces, STRANDS):
        piece = start + strand
        there = piece < pieces
        at = (slot + piece).to(tl.int64) * queries + query
        more_log = tl.load(partial_lse + at, mask=there, other=float("-inf"))
        more = tl.load(partial + at[:, None] * LATENT + c[None, :], mask=there[:, None], other=0.0).to(tl.float32)
        first, weight, total, log = pair_weights(log, more_log)
        sums = pair_sum(sums, more, first[:, None], weight[:, None], total[:, None])
    if STRANDS > 4:
        sums, log = _tree_level(sums, log, 4, COLUMNS)
    if STRANDS > 2:
        sums, log = _tree_level(sums, log, 2, COLUMNS)
    if STRANDS > 1:
        sums, log = _tree_level(sums, log, 1, COLUMNS)
    vector = row.to(tl.int64) * queries + query
    at_out = out + vector * LATENT + c
    tl.store(at_out, tl.reshape(sums, (COLUMNS,)).to(out.dtype.element_ty))
    if tl.program_id(2) == 0:
        only = tl.sum(log, 0)  # of one number
        tl.store(lse + vector, only * _LN2 if LAST else only)
