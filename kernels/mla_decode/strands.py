"""The merge of invariant mode in portable Triton: a row's pieces as `kernels.strands` has them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.strands import FINE_ROUNDS, pair_sum, pair_weights

_CTA = tl.constexpr(CTA_FIELDS)
_ROW = tl.constexpr(ROW_FIELDS)
_ROUNDS = tl.constexpr(FINE_ROUNDS)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tree_level(sums, log, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Merge each of 2 HALF parts with the one HALF further on."""
    a, b = tl.split(tl.permute(tl.reshape(sums, (2, HALF, COLUMNS)), (1, 2, 0)))
    a_log, b_log = tl.split(tl.permute(tl.reshape(log, (2, HALF)), (1, 0)))
    first, weight, total, log = pair_weights(a_log, b_log)
    return pair_sum(a, b, first[:, None], weight[:, None], total[:, None]), log


@triton.jit
def _with_piece(sums, log, piece, pieces, where, LATENT: tl.constexpr):
    """Merge one piece into each strand, where there is one: what is not changes nothing."""
    partial, partial_lse, slot, queries, query, c = where
    there = piece < pieces
    at = (slot + piece).to(tl.int64) * queries + query
    more_log = tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    more_at = partial + at[:, None] * LATENT + c[None, :]
    more = tl.load(more_at, mask=there[:, None], other=0.0, cache_modifier=".cg").to(tl.float32)
    first, weight, total, log = pair_weights(log, more_log)
    return pair_sum(sums, more, first[:, None], weight[:, None], total[:, None]), log


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
    FINEST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the pieces of every row, or where `LAST` is false the part of them that this rank has, whose log-sum-exp
    stays to the base 2. FINEST: pieces of each stretch of the first round; half as many in those behind it, as
    `kernels.strands` says. With 1 a stretch is a piece. Grid: rows, queries, columns."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    # The plan is older than the attention, which lets this kernel start only after its own wait.
    record = metadata + ctas * _CTA + row * _ROW
    slot = tl.load(record)
    pieces = tl.load(record + 2)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    strand = tl.arange(0, STRANDS)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((STRANDS, COLUMNS), tl.float32)
    log = tl.full((STRANDS,), float("-inf"), tl.float32)
    at = (partial, partial_lse, slot, queries, query, c)
    # The first round of stretches has FINEST pieces each, which are asked for at once.
    for index in tl.static_range(FINEST):
        piece = strand * FINEST + index
        sums, log = _with_piece(sums, log, piece, pieces, at, LATENT)
    # The next ones have half as many.
    end = STRANDS * FINEST
    if FINEST > 1:
        begin = end
        end += STRANDS * (FINEST // 2) * (_ROUNDS - 1)
        for start in range(begin, tl.minimum(pieces, end), STRANDS * (FINEST // 2)):
            for index in tl.static_range(FINEST // 2):
                piece = start + strand * (FINEST // 2) + index
                sums, log = _with_piece(sums, log, piece, pieces, at, LATENT)
    for start in range(end, pieces, STRANDS):
        sums, log = _with_piece(sums, log, start + strand, pieces, at, LATENT)
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
