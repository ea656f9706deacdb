"""The merge of invariant mode in portable Triton: a row's pieces as `kernels.strands` has them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.strands import FINE_ROUNDS, pair_sum, pair_weights

_CTA = tl.constexpr(CTA_FIELDS)
_ROW = tl.constexpr(ROW_FIELDS)
_ROUNDS = tl.constexpr(FINE_ROUNDS)
SHORT_ROUNDS = tl.constexpr(1)
"""Rounds of stretches, 0 or 1, of a row that is merged strand by strand. With 0 only rows without pieces are; others
are merged as long ones, with the same bits."""
_SOME = tl.constexpr(128)
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


@triton.jit
def _pieces(where, first, pieces, COUNT: tl.constexpr, LATENT: tl.constexpr):
    """Ask for COUNT pieces from `first` on, which is 0 in the row, and their log-sum-exps; those that are not there
    have seen nothing."""
    partial, partial_lse, slot, queries, query, c = where
    found = ()
    logs = ()
    for index in tl.static_range(COUNT):
        there = first + index < pieces
        at = (slot + first + index).to(tl.int64) * queries + query
        logs += (tl.load(partial_lse + at, mask=there, other=float("-inf"), cache_modifier=".cg"),)
        found += (tl.load(partial + at * LATENT + c, mask=there, other=0.0, cache_modifier=".cg"),)
    return found, logs


@triton.jit
def _merged(a, a_log, b, b_log):
    """Merge two parts."""
    first, weight, total, log = pair_weights(a_log, b_log)
    return pair_sum(a, b, first, weight, total), log


@triton.jit
def _alone(part, log):
    """Merge a part with one that has seen nothing, which changes a part without entries alone: that becomes 0, or NaN
    if it is not finite, as `pair_sum` has it."""
    nothing = part - part + tl.where(log == float("-inf"), 0.0, log)
    # As `pair_weights` makes 0 of -0.
    return tl.where(log > float("-inf"), part, nothing), log + 0.0


@triton.jit
def _short_level(sums, logs, present, HALF: tl.constexpr):
    """Merge each of HALF parts with the one HALF further on, unless that has no piece and would change nothing: it has
    later strands, of which the first `present` have pieces."""
    found = ()
    found_logs = ()
    for index in tl.static_range(HALF):
        a = sums[index]
        a_log = logs[index]
        if index + HALF < present:
            a, a_log = _merged(a, a_log, sums[index + HALF], logs[index + HALF])
        found += (a,)
        found_logs += (a_log,)
    return found, found_logs


@triton.jit
def _short_row(where, pieces, LATENT: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr, FINEST: tl.constexpr):
    """Merge a row with no more pieces than the first round has, strand by strand. Strands without pieces, which most
    short rows have, cost nothing. The next strand's pieces are on their way while one's are merged."""
    present = (pieces + FINEST - 1) // FINEST
    sums = ()
    logs = ()
    for _ in tl.static_range(STRANDS):
        sums += (tl.zeros((COLUMNS,), tl.float32),)
        logs += (tl.full((), float("-inf"), tl.float32),)
    values, value_logs = _pieces(where, 0, pieces, FINEST, LATENT)
    for strand in range(present):
        next_values, next_logs = _pieces(where, (strand + 1) * FINEST, pieces, FINEST, LATENT)
        sum, log = _alone(values[0].to(tl.float32), value_logs[0])
        for index in tl.static_range(1, FINEST):
            sum, log = _merged(sum, log, values[index].to(tl.float32), value_logs[index])
        found = ()
        found_logs = ()
        for index in tl.static_range(STRANDS):
            found += (tl.where(strand == index, sum, sums[index]),)
            found_logs += (tl.where(strand == index, log, logs[index]),)
        sums = found
        logs = found_logs
        values = next_values
        value_logs = next_logs
    if STRANDS > 4:
        sums, logs = _short_level(sums, logs, present, 4)
    if STRANDS > 2:
        sums, logs = _short_level(sums, logs, present, 2)
    if STRANDS > 1:
        sums, logs = _short_level(sums, logs, present, 1)
    return sums[0], logs[0]


@triton.jit
def _long_row(where, pieces, LATENT: tl.constexpr, COLUMNS: tl.constexpr, STRANDS: tl.constexpr, FINEST: tl.constexpr):
    """Merge a row of any number of pieces, all strands at once."""
    strand = tl.arange(0, STRANDS)
    sums = tl.zeros((STRANDS, COLUMNS), tl.float32)
    log = tl.full((STRANDS,), float("-inf"), tl.float32)
    # The first round of stretches has FINEST pieces each, which are asked for at once.
    for index in tl.static_range(FINEST):
        piece = strand * FINEST + index
        sums, log = _with_piece(sums, log, piece, pieces, where, LATENT)
    # The next ones have half as many.
    end = STRANDS * FINEST
    if FINEST > 1:
        begin = end
        end += STRANDS * (FINEST // 2) * (_ROUNDS - 1)
        for start in range(begin, tl.minimum(pieces, end), STRANDS * (FINEST // 2)):
            for index in tl.static_range(FINEST // 2):
                piece = start + strand * (FINEST // 2) + index
                sums, log = _with_piece(sums, log, piece, pieces, where, LATENT)
    for start in range(end, pieces, STRANDS):
        sums, log = _with_piece(sums, log, start + strand, pieces, where, LATENT)
    if STRANDS > 4:
        sums, log = _tree_level(sums, log, 4, COLUMNS)
    if STRANDS > 2:
        sums, log = _tree_level(sums, log, 2, COLUMNS)
    if STRANDS > 1:
        sums, log = _tree_level(sums, log, 1, COLUMNS)
    return tl.reshape(sums, (COLUMNS,)), tl.sum(log, 0)  # of one number


@triton.jit
def _put(to, where, sums, log, LAST: tl.constexpr):
    """Write the result of some columns. All programs of a vector have the same log-sum-exp."""
    tl.store(to[0] + where[5], sums.to(to[0].dtype.element_ty))
    if tl.program_id(2) == 0:
        tl.store(to[1], log * _LN2 if LAST else log)


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
    first = tl.program_id(2) * COLUMNS
    vector = row.to(tl.int64) * queries + query
    to = (out + vector * LATENT, lse + vector)
    if pieces <= SHORT_ROUNDS * STRANDS * FINEST:
        where = (partial, partial_lse, slot, queries, query, first + tl.arange(0, COLUMNS))
        sums, log = _short_row(where, pieces, LATENT, COLUMNS, STRANDS, FINEST)
        _put(to, where, sums, log, LAST)
    else:
        # All strands at once take the registers of so many columns.
        SOME: tl.constexpr = _SOME if COLUMNS > _SOME else COLUMNS
        for c in range(first, first + COLUMNS, SOME):
            where = (partial, partial_lse, slot, queries, query, c + tl.arange(0, SOME))
            sums, log = _long_row(where, pieces, LATENT, SOME, STRANDS, FINEST)
            _put(to, where, sums, log, LAST)
