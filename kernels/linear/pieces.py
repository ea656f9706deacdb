"""What adds up the pieces that `stream_k.multiply` leaves of its sums, in their order: alone, or as a norm reads them.

A block is 128 weight rows, of K / 128 steps. Program p of P takes the steps from p * S // P to (p + 1) * S // P of all
S, block by block. Where several have steps of a block, each leaves a piece of its sums, [COLUMNS, 128] in fp32; that of
a program p and a block b lies at p + b. Where one has them all, the product is in `out` already. `mxfp8` may share out
blocks of twice as many rows; their pieces are two of these, side by side.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from functools import cache
from itertools import pairwise

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.quantize import store_rounded

_BLOCK = tl.constexpr(128)


@cache
def most_pieces(rows: int, features: int, programs: int, block: int = 128) -> int:
    """The most pieces that a block of a product of these sizes has."""
    steps = features // 128
    total = steps * -(-rows // block)
    bounds = [program * total // programs for program in range(programs + 1)]
    return max(
        sum(begin < at + steps and end > at for begin, end in pairwise(bounds) if end > begin)
        for at in range(0, total, steps)
    )


@triton.jit
def programs_of(block, STEPS: tl.constexpr, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr):
    """The first program that has steps of `block`, and how many have."""
    # The program that has step s is the last one that begins at s or before.
    first = ((block * STEPS + 1) * PROGRAMS - 1) // TOTAL
    return first, ((block + 1) * STEPS * PROGRAMS - 1) // TOTAL - first + 1


@triton.jit
def sum_of_pieces(at, count, inside, STRIDE: tl.constexpr, MOST: tl.constexpr, BATCH: tl.constexpr):
    """The sum of the first `count` of MOST pieces that lie STRIDE apart, in their order.

    BATCH of them are on their way at once: the barrier keeps ptxas, which would rather save registers, from adding one
    before it has asked for the next (`kernels.parts`). All threads of a program must get here.
    """
    sum = tl.zeros(at.shape, tl.float32)
    for begin in range(0, MOST, BATCH):
        some = ()
        for i in tl.static_range(BATCH):
            there = inside & (begin + i < count)
            # .cg: a dependent launch may find lines of an earlier kernel in L1.
            some += (tl.load(at + (begin + i) * STRIDE, mask=there, other=0.0, cache_modifier=".cg"),)
        tl.debug_barrier()
        for i in tl.static_range(BATCH):
            sum += some[i]
    return sum


@triton.jit(do_not_specialize=["tokens"])
def add_pieces(
    pieces, out, tokens,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, WIDE: tl.constexpr,
    MOST: tl.constexpr, BATCH: tl.constexpr, DEPENDENT: tl.constexpr, TIMES: tl.constexpr = 1,
):  # fmt: skip
    """out[t] = the sum of its pieces, where there are any. Grid: blocks of 128 rows, WIDE tokens at a time. TIMES: such
    blocks of one that is shared out."""
    steps: tl.constexpr = K // _BLOCK
    total: tl.constexpr = steps * ((ROWS + TIMES * _BLOCK - 1) // (TIMES * _BLOCK))
    block = tl.program_id(0)
    if DEPENDENT:
        gdc_launch_dependents()
    first, count = programs_of(block // TIMES, steps, total, PROGRAMS)
    r = tl.arange(0, _BLOCK)
    t = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    f = block * _BLOCK + r
    inside = (t < tokens)[:, None] & (f < ROWS)[None, :]
    if DEPENDENT:
        gdc_wait()
    if count == 1:
        return
    piece = (first + block // TIMES) * TIMES + block % TIMES
    at = pieces + (piece * COLUMNS + t[:, None]) * _BLOCK + r[None, :]
    sum = sum_of_pieces(at, count, inside, TIMES * COLUMNS * _BLOCK, MOST, BATCH)
    tl.store(out + t.to(tl.int64)[:, None] * ROWS + f[None, :], sum.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_column"])
def pieces_norm(
    pieces, out, residual, weight, row_scale, normed, number, scale, by_token, eps, scale_column,
    ROWS: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr, MOST: tl.constexpr, BATCH: tl.constexpr, BEHIND: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`add_pieces` of one token; and of the first FEATURES of its ROWS the norm of that `weight`, times the token's
    `row_scale` if BEHIND.scaled, in `normed`, and that rounded to FP8 as `kernels.quantize.quantize` does it.

    With BEHIND.add the sum, rounded, is added to the residual, and the norm is of what that is then; FEATURES is ROWS,
    and the sum itself is stored nowhere: `normed` may be `out`.

    BLOCKS: blocks of 128 rows, to a power of two. FEATURES is a multiple of 128. The scale of a token and 128 features
    lies at token + group * `scale_column`; with BEHIND.twice also at token * groups + group of `by_token`.
    """
    steps: tl.constexpr = K // _BLOCK
    total: tl.constexpr = steps * ((ROWS + _BLOCK - 1) // _BLOCK)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    f = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    first, count = programs_of(block, steps, total, PROGRAMS)
    in_pieces = (count > 1)[:, None] & (f < ROWS)
    of_norm = f < FEATURES
    w = tl.load(weight + f, mask=of_norm, other=0.0).to(tl.float32)
    at = pieces + (((first + block) * COLUMNS)[:, None] + row) * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sum = sum_of_pieces(at, count[:, None], in_pieces, COLUMNS * _BLOCK, MOST, BATCH).to(out.dtype.element_ty)
    to = out + row * ROWS + f
    if not BEHIND.add:
        tl.store(to, sum, mask=in_pieces)
    whole = tl.load(to, mask=of_norm & (count == 1)[:, None], other=0.0, cache_modifier=".cg")
    value = tl.where(of_norm, tl.where((count > 1)[:, None], sum, whole).to(tl.float32), 0.0)
    if BEHIND.add:
        to = residual + row * BEHIND.stride + f
        value += tl.load(to, mask=of_norm, other=0.0, cache_modifier=".cg").to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(to, kept, mask=of_norm, eviction_policy="evict_last" if DEPENDENT else "")
        value = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / FEATURES + eps)
    if BEHIND.scaled:
        factor *= tl.load(row_scale + row, cache_modifier=".cg")
    y = (value * factor * w).to(normed.dtype.element_ty)
    tl.store(normed + row * FEATURES + f, y, mask=of_norm)
    to = scale + row + block.to(tl.int64) * scale_column
    there = block * _BLOCK < FEATURES
    size = store_rounded(y.to(tl.float32), number + row * FEATURES + f, to, of_norm, there)
    if BEHIND.twice:
        tl.store(by_token + row * (FEATURES // _BLOCK) + block, size, mask=there)
