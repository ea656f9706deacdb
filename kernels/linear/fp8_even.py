"""Products of one token with FP8 weights on Hopper, whose rows are dealt out evenly to programs that stay.

A program has some neighbouring blocks of 8 rows. Their weights stream through one ring of stages in shared memory, by
the means of `fp8`: the same features of every block, then the next features, and so on. So features of the token are
made fp16 in registers, straight from memory, once for all of a program's rows, and the ring never runs dry between
blocks. As rings are small, the kernel behind has room beside them for its first weights.

A tile of the tensor cores has 16 rows and 8 columns: its first 8 rows are a block's 128 features that the first four
columns have of the token, its last 8 rows the same rows' next 128 features, which the last four columns have. What else
it multiplies is thrown away.

`LISTED`: a sum over the units of a token, its experts, as `kernels.few_experts` lists them; otherwise there is one.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.fp16_scaled import unit_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import RESIDUAL, filled_up, products_layout
from kernels.linear.fp8 import BOXES, COLUMNS, WIDTH, barriers, fetch, next_stage, no_sums, scales_layout, weight_tile

BLOCK = 8
"""Rows of a block."""

_BLOCK = gl.constexpr(BLOCK)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_RESIDUAL = gl.constexpr(RESIDUAL)
_BOX = gl.constexpr(BOXES[4])


@gluon.jit
def unit_expert(slot, unit, slots, EXPERTS: gl.constexpr, SHARED: gl.constexpr, LISTED: gl.constexpr):
    """The matrix of a unit, -1 behind the last: the SHARED last ones, then those of the list; or the only one."""
    if LISTED:
        at = unit - SHARED
        listed = gl.load(slot + at, mask=(at >= 0) & (at < slots), other=-1, cache_modifier=".cg")
        expert = gl.where(at < 0, EXPERTS + unit, listed)
    else:
        expert = gl.where(unit == 0, 0, -1)
    return expert


@gluon.jit
def unit_rank(place, expert, EXPERTS: gl.constexpr, CHOSEN: gl.constexpr, LISTED: gl.constexpr):
    """Return the index of the token's row that a matrix multiplies, -1 if there is none."""
    if LISTED:
        routed = (expert >= 0) & (expert < EXPERTS)
        rank = gl.load(place + expert, mask=routed, other=-1, cache_modifier=".cg")
        rank = gl.where(expert >= EXPERTS, CHOSEN + expert - EXPERTS, rank)
    else:
        rank = expert
    return rank


@gluon.jit
def token_features(x, rank, chunk, K: gl.constexpr, WARPS: gl.constexpr):
    """A chunk of one of the token's rows, bf16 as the right operand: [WARPS, 128, 8], 256 features a warp."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 16)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k = gl.arange(0, _WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, right)))
    width = (chunk * WARPS + warp)[:, None, None] * 2 + column[None, None, :] // 4
    feature = width * _WIDTH + k[None, :, None]
    inside = (feature < K) & (rank >= 0)
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    return gl.load(x + rank.to(gl.int64) * K + feature, mask=inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def fp16_scaled_features(tile, WARPS: gl.constexpr):
    """Convert these features to fp16, with the unit of each warp's."""
    value = tile.to(gl.float32)
    unit, inverse = unit_of(gl.max(gl.max(gl.abs(value), 2), 1))
    half = (value * inverse[:, None, None]).to(gl.float16)
    return half, gl.convert_layout(unit, gl.SliceLayout(1, gl.SliceLayout(2, products_layout(WARPS))))


@gluon.jit
def row_scales(scale, expert, row, chunk, E: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr):
    """The scales of a chunk of a row of a matrix: [WARPS, 16], those of a warp's second 128 features behind."""
    EXPERT_ROWS: gl.constexpr = (E + STORED.rows - 1) // STORED.rows
    layout: gl.constexpr = scales_layout(WARPS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))
    r = gl.arange(0, 2 * _BLOCK, gl.SliceLayout(0, layout))
    column = gl.minimum((chunk * WARPS + warp)[:, None] * 2 + r[None, :] // _BLOCK, STORED.scales - 1)
    at = (gl.maximum(expert, 0) * EXPERT_ROWS + gl.minimum(row, E - 1) // STORED.rows) * STORED.scales
    return gl.load(scale + at + column, mask=(column >= 0) & (expert >= 0), other=0.0)


@gluon.jit
def share_rows(totals, PER: gl.constexpr, WARPS: gl.constexpr):
    """The sums of every block, of all warps: [blocks filled up, 8]."""
    products: gl.constexpr = products_layout(WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BLOCKS: gl.constexpr = filled_up(PER)
    parts_s = gl.allocate_shared_memory(gl.float32, [BLOCKS, WARPS, 2 * _BLOCK], plain)
    r = gl.arange(0, 2 * _BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, products)))
    column = gl.arange(0, _COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, products)))
    own = (r // _BLOCK * 4)[None, :, None] == column[None, None, :]
    for block in gl.static_range(PER):
        part = gl.sum(gl.where(own, totals[block], 0.0), 2)
        parts_s.slice(block, 1).store(part.reshape(1, WARPS, 2 * _BLOCK))
    for block in gl.static_range(PER, BLOCKS):
        nothing = gl.full([1, WARPS, 2 * _BLOCK], 0.0, gl.float32, parts_layout(WARPS))
        parts_s.slice(block, 1).store(nothing)
    gl.thread_barrier()
    both = gl.sum(parts_s.load(parts_layout(WARPS)), 1).reshape(BLOCKS, 2, _BLOCK)
    return gl.convert_layout(gl.sum(both, 1), rows_layout(WARPS))


@gluon.constexpr_function
def parts_layout(warps):
    """Layout in which parts [blocks, warps, 16] are summed."""
    return gl.BlockedLayout([1, warps, 1], [2, 1, 16], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def rows_layout(warps):
    """Layout of a program's rows [blocks, 8]."""
    return gl.BlockedLayout([1, 1], [4, 8], [warps, 1], [1, 0])


@gluon.jit(do_not_specialize=["slots"])
def fp8_even(
    x, box, scale, slot, place, out, residual, norm, out_square, slots,
    STORED: gl.constexpr, SIZE: gl.constexpr, UNITS: gl.constexpr, EPILOGUE: gl.constexpr, STREAMS: gl.constexpr,
    PER: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T of one token, or the sum over its units; added to the residual, or stored. Grid: blocks / PER.

    LISTED: the list, and the first stages' weights, are read before the wait.
    """
    E: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    LISTED: gl.constexpr = UNITS.listed
    EXPERTS: gl.constexpr = UNITS.experts
    SHARED: gl.constexpr = UNITS.shared
    CHOSEN: gl.constexpr = UNITS.chosen
    RESIDUAL: gl.constexpr = EPILOGUE.kind == _RESIDUAL
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (K + WARPS * 2 * _WIDTH - 1) // (WARPS * 2 * _WIDTH)
    LOOK: gl.constexpr = (PER - 1 + STAGES) // PER
    rows: gl.constexpr = rows_layout(WARPS)
    first = gl.program_id(0) * (PER * _BLOCK)
    if DEPENDENT:
        let_kernel_after_start()
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, 1, 2 * WARPS, _BLOCK, _WIDTH], _BOX)
    full = barriers(STAGES)
    if LISTED:  # noqa: SIM108 (compile-time: only one of them exists)
        steps = (SHARED + gl.load(slot + slots, cache_modifier=".cg")) * CHUNKS
    else:
        steps = CHUNKS
    experts = ()
    for j in gl.static_range(LOOK + 2):
        experts = experts + (unit_expert(slot, j // CHUNKS, slots, EXPERTS, SHARED, LISTED),)
    for stage in gl.static_range(STAGES):
        expert = experts[stage // PER]
        at = [expert, stage // PER % CHUNKS * (2 * WARPS), first + stage % PER * _BLOCK, 0]
        fetch(box, at, w_s.index(stage), full.index(stage), expert >= 0)
    rank = unit_rank(place, experts[0], EXPERTS, CHOSEN, LISTED)
    next_rank = unit_rank(place, experts[1], EXPERTS, CHOSEN, LISTED)
    low = row_scales(scale, experts[0], first, 0, E, WARPS, STORED)
    high = row_scales(scale, experts[0], first + PER * _BLOCK - 1, 0, E, WARPS, STORED)
    b = gl.arange(0, filled_up(PER), gl.SliceLayout(1, rows))
    f = first + b[:, None] * _BLOCK + gl.arange(0, _BLOCK, gl.SliceLayout(0, rows))[None, :]
    inside = (b < PER)[:, None] & (f < E)
    if RESIDUAL:
        factor = gl.load(norm + f, mask=inside, other=0.0).to(gl.float32)
    totals = ()
    for _ in gl.static_range(PER):
        totals = totals + (no_sums(WARPS),)
    if DEPENDENT:
        wait_for_kernel_before()
    tile = token_features(x, rank, 0, K, WARPS)
    if RESIDUAL:
        before = gl.load(residual + f, mask=inside, other=0.0, cache_modifier=".cg")
    stage = 0
    phase = 0
    for step in range(steps):
        later = unit_expert(slot, (step + LOOK + 2) // CHUNKS, slots, EXPERTS, SHARED, LISTED)
        later_rank = unit_rank(place, experts[2], EXPERTS, CHOSEN, LISTED)
        after = (step + 1) % CHUNKS
        later_tile = token_features(x, next_rank, after, K, WARPS)
        later_low = row_scales(scale, experts[1], first, after, E, WARPS, STORED)
        later_high = row_scales(scale, experts[1], first + PER * _BLOCK - 1, after, E, WARPS, STORED)
        half, unit = fp16_scaled_features(tile, WARPS)
        low = low * unit[:, None]
        high = high * unit[:, None]
        for block in gl.static_range(PER):
            row = gl.minimum(first + block * _BLOCK, E - 1)
            scales = gl.where(row // STORED.rows == first // STORED.rows, low, high)
            mbarrier.wait(full.index(stage), phase)
            part = mma_v2(weight_tile(w_s.index(stage), WARPS), half, no_sums(WARPS))
            total = totals[block] + part * scales[:, :, None]
            totals = totals[:block] + (total,) + totals[block + 1 :]
            gl.thread_barrier()
            expert = experts[(block + STAGES) // PER]
            ahead = (step + (block + STAGES) // PER) % CHUNKS * (2 * WARPS)
            at = [expert, ahead, first + (block + STAGES) % PER * _BLOCK, 0]
            fetch(box, at, w_s.index(stage), full.index(stage), expert >= 0)
            stage, phase = next_stage(stage, phase, STAGES)
        experts = experts[1:] + (later,)
        rank = next_rank
        next_rank = later_rank
        tile = later_tile
        low = later_low
        high = later_high
    y = share_rows(totals, PER, WARPS)
    if RESIDUAL:
        y += before
        gl.store(residual + f, y, mask=inside, eviction_policy="evict_last")
        squares = gl.sum(gl.sum(gl.where(inside, y * y, 0.0), 1), 0)
        # A program has no whole number of pieces of 16 columns: what it has is in the first one that begins in it.
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
        piece = gl.program_id(0) * PER // 2 + lane
        end = gl.minimum((gl.program_id(0) + 1) * PER // 2, EPILOGUE.pieces)
        gl.store(out_square + piece, gl.where(lane == 0, squares, 0.0), mask=piece < end)
        y = y * factor
    gl.store(out + f, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
