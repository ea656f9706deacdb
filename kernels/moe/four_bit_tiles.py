"""The experts of a few tokens with weights of four bits in groups of 32, on Hopper: bound by the time in which the
weights are read.

The columns of the tensor cores' tile are a tile's pairs, of which it has two or eight at most (`four_bit_columns`).
Their inputs lie in shared memory for as long as a program works on the tile: of eight, fewer programs find room on a
multiprocessor, and have the more warps.

A program takes the pieces of work (a tile, block of features) in a row, and asks for a piece's first weights while it
multiplies the last ones of the piece before.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.fp16_scaled import unit_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.moe.four_bit_columns import (
    COLUMNS,
    STEP,
    asked,
    factor_of,
    inputs_dtype,
    left_to_divide,
    multiplied,
    products_layout,
    row_halves,
    weights_at,
)
from kernels.moe.hopper import clamped

_STEP = gl.constexpr(STEP)
_COLUMNS = gl.constexpr(COLUMNS)


@gluon.constexpr_function
def rows_layout(PAIRS, WARPS):
    """Layout in which inputs of a step [PAIRS, 256] come from memory: a warp has a row, or a part of one."""
    side = min(PAIRS, WARPS)
    return gl.BlockedLayout([1, STEP * side // (32 * WARPS)], [1, 32], [side, WARPS // side], [1, 0])


@gluon.constexpr_function
def at_once(PAIRS):
    """Steps of inputs that a thread holds while it stages them: as many as it has registers for."""
    return 7 if PAIRS == 2 else 3


@gluon.jit
def stage(
    x, row, pairs, x_s, square, eps,
    STRIDE: gl.constexpr, STEPS: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Bring the rows `row` of `x` into `x_s` [STEPS, 8, PAIRS, 32], each in the order of `four_bit_single.stage`, 0 for
    those past the pairs. What is in fp16 is divided by a unit of its row before. The units are returned, one for each
    column; if PIECES is not 0, the rows are a pending norm's, and a unit is divided as they are to be. For fp16 rows
    are read twice, for what a thread would hold of them meanwhile is more than it has room for."""
    layout: gl.constexpr = rows_layout(PAIRS, WARPS)
    products: gl.constexpr = products_layout(WARPS)
    m = gl.arange(0, PAIRS, gl.SliceLayout(1, layout))
    feature = gl.arange(0, _STEP, gl.SliceLayout(0, layout))
    inside = (m < pairs)[:, None] & (feature >= 0)[None, :]
    at = x + row.to(gl.int64)[:, None] * STRIDE + feature[None, :]
    HALVED: gl.constexpr = x_s.dtype == gl.float16
    unit = gl.full([PAIRS], 1.0, gl.float32, gl.SliceLayout(1, layout))
    inverse = unit
    if HALVED:
        most = gl.zeros([PAIRS, _STEP], gl.float32, layout)
        for step in gl.static_range(STEPS):
            # .cg: a dependent launch may find lines of an earlier kernel in L1.
            value = gl.load(at + step * _STEP, mask=inside, other=0.0, cache_modifier=".cg")
            most = gl.maximum(most, gl.abs(value.to(gl.float32)))
        unit, inverse = unit_of(gl.max(most, 1))
    if PIECES:
        unit *= left_to_divide(square, row, m < pairs, eps, STEPS * _STEP, PIECES, layout)
    # What is loaded behind a store waits for it. So several loads come before the first of their stores.
    AT_ONCE: gl.constexpr = at_once(PAIRS)
    for first in gl.static_range(0, STEPS, AT_ONCE):
        held = ()
        for step in gl.static_range(first, min(first + AT_ONCE, STEPS)):
            held = held + (gl.load(at + step * _STEP, mask=inside, other=0.0, cache_modifier=".cg"),)
        for step in gl.static_range(first, min(first + AT_ONCE, STEPS)):
            value = held[step - first]
            if HALVED:
                value = (value.to(gl.float32) * inverse[:, None]).to(gl.float16)
            value = value.reshape(PAIRS, 2, 4, 4, 2, 4).permute((1, 3, 0, 2, 5, 4))
            x_s.index(step).store(value.reshape(8, PAIRS, 32))
    repeated = gl.zeros([_COLUMNS // PAIRS, PAIRS], gl.float32, gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0]))
    _, repeated = gl.broadcast(repeated, gl.convert_layout(unit, gl.SliceLayout(0, repeated.type.layout))[None, :])
    return gl.convert_layout(repeated.reshape(_COLUMNS), gl.SliceLayout(0, products))


@gluon.jit
def record(table, tile, exists):
    """(expert, first sorted pair, pairs) of a tile; 0 where none exists."""
    at = table + 4 * (tile + 1)
    expert = gl.load(at, mask=exists, other=0, cache_modifier=".cg")
    first = gl.load(at + 1, mask=exists, other=0, cache_modifier=".cg")
    pairs = gl.load(at + 2, mask=exists, other=0, cache_modifier=".cg")
    return expert.to(gl.int64), first, pairs


@gluon.jit(do_not_specialize=["eps"])
def product(
    x, square, data, scales, sorted_pair, table, out, eps,
    X_STRIDE: gl.constexpr, FORMAT: gl.constexpr, GATE: gl.constexpr, CHOSEN: gl.constexpr, K: gl.constexpr,
    FEATURES: gl.constexpr, PIECES: gl.constexpr, PAIRS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
    LIMIT: gl.constexpr, SETTLED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GATE: out[i] = silu(gate[expert] . x) * (up[expert] . x) for every sorted pair i, of its token's x; otherwise
    out[pair] = weight[expert] . x[i]. Rows of `x` have K features, those of `out` FEATURES.

    FORMAT: of the weights, "int4" or "mxfp4". PIECES: if not 0, the tokens are a pending norm's with so many sums of
    squares each, and `eps`. LIMIT: see `activation`. SETTLED: the tiles were there when the kernel before let this one
    start."""
    STEPS: gl.constexpr = K // _STEP
    BLOCK: gl.constexpr = 16 * WARPS
    ROWS: gl.constexpr = 2 * FEATURES if GATE else FEATURES
    WIDTH: gl.constexpr = BLOCK // 2 if GATE else BLOCK
    BLOCKS: gl.constexpr = FEATURES // WIDTH
    layout: gl.constexpr = products_layout(WARPS)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    at, scale_at = weights_at(K, FEATURES, GATE, WARPS)
    x_s = gl.allocate_shared_memory(inputs_dtype(FORMAT), [STEPS, 8, PAIRS, 32], plain)
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    n = gl.arange(0, _COLUMNS, columns)
    m = gl.arange(0, PAIRS, gl.SliceLayout(1, rows_layout(PAIRS, WARPS)))
    if DEPENDENT and not SETTLED:
        wait_for_kernel_before()
        let_kernel_after_start()
    pieces = gl.load(table, cache_modifier=".cg") * BLOCKS
    begin = (gl.program_id(0).to(gl.int64) * pieces // gl.num_programs(0)).to(gl.int32)
    end = ((gl.program_id(0) + 1).to(gl.int64) * pieces // gl.num_programs(0)).to(gl.int32)
    expert, first, pairs = record(table, begin // BLOCKS, begin < end)
    row = expert * ROWS + begin % BLOCKS * WIDTH
    held = ()
    for j in gl.static_range(AHEAD):
        held = held + (asked(data, scales, row, j, at, scale_at, K),)
    if DEPENDENT and SETTLED:
        wait_for_kernel_before()
        let_kernel_after_start()
    staged = -1
    unit = gl.full([_COLUMNS], 1.0, gl.float32, columns)
    for piece in range(begin, end):
        tile = piece // BLOCKS
        if tile != staged:
            gl.thread_barrier()
            source = first + m
            if GATE:
                source = gl.load(sorted_pair + source, mask=m < pairs, other=0, cache_modifier=".cg") // CHOSEN
            unit = stage(x, source, pairs, x_s, square, eps, X_STRIDE, STEPS, PAIRS, WARPS, PIECES)
            staged = tile
            gl.thread_barrier()
        after = gl.minimum(piece + 1, end - 1)
        later_expert, later_first, later_pairs = record(table, after // BLOCKS, True)
        later = later_expert * ROWS + after % BLOCKS * WIDTH
        total, held = multiplied(
            x_s, held, data, scales, row, later, piece + 1 < end, at, scale_at, FORMAT, K, PAIRS, AHEAD, WARPS
        )  # fmt: skip
        total = total * (unit / factor_of(FORMAT))[None, :]
        here = n < gl.minimum(pairs, PAIRS)
        feature = piece % BLOCKS * WIDTH
        if GATE:
            gate, up = row_halves(total, WARPS)
            to = (first + n)[None, :] * FEATURES + feature + (r // 16 * 8 + r % 8)[:, None]
            where, _ = row_halves(to, WARPS)
            kept, _ = row_halves(((r >= 0)[:, None] & here[None, :]).to(gl.int32), WARPS)
            if LIMIT > 0:
                gate, up = clamped(gate, up, LIMIT)
            value = gate / (1 + gl.exp(-gate)) * up
            gl.store(out + where, value.to(out.dtype.element_ty), mask=kept > 0, eviction_policy="evict_last")
        else:
            pair = gl.load(sorted_pair + first + n, mask=here, other=0, cache_modifier=".cg")
            to = pair[None, :] * FEATURES + feature + r[:, None]
            kept = (r >= 0)[:, None] & here[None, :]
            gl.store(out + to, total.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        row = later
        first = later_first
        pairs = later_pairs
