"""The experts of one token with weights of four bits in groups of 32, on Hopper: bound by the time in which the weights
are read.

Inputs are brought into shared memory, for INT4 in scaled fp16, by every program while its first weights are on their
way, and change rarely: a program takes the pieces of work (an expert of the token, block of features) in a row. The
token is in every column of the tensor cores' tile. All else is in `four_bit_columns`.

The token of gate and up may be a pending norm's; the sum of its squares is read and the division done with the unit of
its halves.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, attr-defined, misc, var-annotated"

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

WARPS = 4
BLOCK = 16 * WARPS
"""Rows of weights that a program multiplies at a time."""

_STEP = gl.constexpr(STEP)
_COLUMNS = gl.constexpr(COLUMNS)
_WARPS = gl.constexpr(WARPS)
_BLOCK = gl.constexpr(BLOCK)


@gluon.jit
def stage(x, x_s, STEPS: gl.constexpr):
    """Bring the row at `x` into `x_s` [STEPS, 8, 1, 32], in the order in which lanes read it: of 128 features the first
    8 of each of the four groups, then the next 8 of each and so on; of 8 a feature is beside the one four later, as
    numbers come out of a word. What is in fp16 is divided by a unit before, which is returned."""
    layout: gl.constexpr = gl.BlockedLayout([_STEP // (32 * _WARPS)], [32], [_WARPS], [0])
    feature = gl.arange(0, _STEP, layout)
    held = ()
    for step in gl.static_range(STEPS):
        # .cg: a dependent launch may find lines of an earlier kernel in L1.
        held = held + (gl.load(x + step * _STEP + feature, cache_modifier=".cg"),)
    unit = 1.0
    inverse = 1.0
    if x_s.dtype == gl.float16:
        most = gl.abs(held[0].to(gl.float32))
        for step in gl.static_range(1, STEPS):
            most = gl.maximum(most, gl.abs(held[step].to(gl.float32)))
        unit, inverse = unit_of(gl.max(most, 0))
    for step in gl.static_range(STEPS):
        value = (held[step].to(gl.float32) * inverse).to(x_s.dtype)
        x_s.index(step).store(value.reshape(2, 4, 4, 2, 4).permute((0, 2, 1, 4, 3)).reshape(8, 1, 32))
    return unit


@gluon.jit
def expert_of(ids, pair, EXPERTS: gl.constexpr):
    """The expert of a pair, and whether it is one; 0 where it is none."""
    expert = gl.load(ids + pair, cache_modifier=".cg")
    valid = (expert >= 0) & (expert < EXPERTS)
    return gl.where(valid, expert, 0).to(gl.int64), valid


@gluon.jit(do_not_specialize=["eps"])
def product(
    x, square, data, scales, ids, out, eps,
    FORMAT: gl.constexpr, GATE: gl.constexpr, CHOSEN: gl.constexpr, EXPERTS: gl.constexpr, K: gl.constexpr,
    FEATURES: gl.constexpr, PIECES: gl.constexpr, AHEAD: gl.constexpr, INPUTS: gl.constexpr, LIMIT: gl.constexpr,
    SETTLED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GATE: out[i] = silu(gate[expert] . x) * (up[expert] . x) for every expert i of the token; otherwise
    out[i] = weight[expert] . x[i]. Rows of `x` have K features, those of `out` FEATURES.

    FORMAT: of the weights, "int4" or "mxfp4". INPUTS: for so many there is shared memory. PIECES: if not 0, the token
    is a pending norm's with so many sums of squares and `eps`. LIMIT: see `activation`. SETTLED: `ids` were there when
    the kernel before let this one start."""
    STEPS: gl.constexpr = K // _STEP
    ROWS: gl.constexpr = 2 * FEATURES if GATE else FEATURES
    WIDTH: gl.constexpr = _BLOCK // 2 if GATE else _BLOCK
    BLOCKS: gl.constexpr = FEATURES // WIDTH
    layout: gl.constexpr = products_layout(_WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    at, scale_at = weights_at(K, FEATURES, GATE, _WARPS)
    x_s = gl.allocate_shared_memory(inputs_dtype(FORMAT), [INPUTS // _STEP, 8, 1, 32], plain)
    r = gl.arange(0, _BLOCK, gl.SliceLayout(1, layout))
    n = gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout))
    begin = gl.program_id(0) * (CHOSEN * BLOCKS) // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * (CHOSEN * BLOCKS) // gl.num_programs(0)
    if DEPENDENT and not SETTLED:
        wait_for_kernel_before()
        let_kernel_after_start()
    expert, valid = expert_of(ids, begin // BLOCKS, EXPERTS)
    row = expert * ROWS + begin % BLOCKS * WIDTH
    held = ()
    for j in gl.static_range(AHEAD):
        held = held + (asked(data, scales, row, j, at, scale_at, K),)
    if DEPENDENT and SETTLED:
        wait_for_kernel_before()
        let_kernel_after_start()
    staged = -1
    unit = 1.0
    for piece in range(begin, end):
        pair = piece // BLOCKS
        # All pairs of `gate_up` have the one token.
        source = 0 if GATE else pair
        if source != staged:
            gl.thread_barrier()
            unit = stage(x + source * K, x_s, STEPS)
            if PIECES:
                one: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, _WARPS], [1, 0])
                token = gl.zeros([1], gl.int32, gl.SliceLayout(1, one))
                unit *= gl.sum(left_to_divide(square, token, token == 0, eps, K, PIECES, one), 0)
            staged = source
            gl.thread_barrier()
        after = gl.minimum(piece + 1, end - 1)
        later_expert, later_valid = expert_of(ids, after // BLOCKS, EXPERTS)
        later = later_expert * ROWS + after % BLOCKS * WIDTH
        total, held = multiplied(
            x_s, held, data, scales, row, later, piece + 1 < end, at, scale_at, FORMAT, K, 1, AHEAD, _WARPS
        )  # fmt: skip
        total = total * (unit / factor_of(FORMAT))
        to = out + pair * FEATURES + piece % BLOCKS * WIDTH
        if GATE:
            gate, up = row_halves(total, _WARPS)
            where, _ = row_halves((r // 16 * 8 + r % 8)[:, None] + 0 * n[None, :], _WARPS)
            kept, _ = row_halves(((r >= 0)[:, None] & (n == 0)[None, :] & valid).to(gl.int32), _WARPS)
            if LIMIT > 0:
                gate, up = clamped(gate, up, LIMIT)
            value = gate / (1 + gl.exp(-gate)) * up
            gl.store(to + where, value.to(out.dtype.element_ty), mask=kept > 0, eviction_policy="evict_last")
        else:
            kept = (r >= 0)[:, None] & (n == 0)[None, :] & valid
            where = r[:, None] + 0 * n[None, :]
            gl.store(to + where, total.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        row, valid = later, later_valid
