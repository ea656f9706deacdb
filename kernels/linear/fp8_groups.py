"""Products of groups of input features with FP8 weights of their own on Hopper, of a few tokens: bound by the time in
which the weights stream through the chip, by the means of `fp8`.

A program has several times 16 weight rows of a group, so that there are about as many programs as multiprocessors: none
waits for another to end, and all features of its tokens are read once. The copy engine fetches the weights into a ring
of stages, of which some are under way before the program waits for the kernel before. Tokens are asked for next, into
registers or shared memory, and behind them the rest of the ring: in a queue behind all of it they would come late.
Every 128 features of a token, which one warp multiplies at a time, get a power of two of their own and become fp16.
Their sums are multiplied by it, together with the scale of the block of weights. Only sums of whole rows meet, at the
end, in a fixed order: a token's result depends on neither the number of tokens nor its place among them.
Tokens may still have to be divided by their root mean squares (`kernels.pending_norm`).

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    ROWS,
    copy_squares,
    inverse_rms,
    products_layout,
    share,
    sums_layout,
    tokens_layout,
)
from kernels.linear.fp8 import (
    BOXES,
    WIDTH,
    barriers,
    columns_layout,
    copy_tokens,
    fp16_scaled_columns,
    load_columns,
    weight_tile,
)

_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_TILES = gl.constexpr(BOXES[3])
_SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))


@gluon.jit
def fetch_rows(box, chunk, row, w_s, stage, full, TILES: gl.constexpr, WARPS: gl.constexpr):
    """Start fetching a chunk of TILES times 16 weight rows into a stage."""
    mbarrier.expect(full.index(stage), TILES * box.block_type.nbytes)
    for tile in gl.static_range(TILES):
        tma.async_copy_global_to_shared(
            box, [chunk * WARPS, row + tile * _ROWS, 0], full.index(stage), w_s.index(stage * TILES + tile)
        )


@gluon.constexpr_function
def features_layout(warps):
    """Layout of the scales [warps] of a chunk of weights."""
    return gl.SliceLayout(1, gl.SliceLayout(2, products_layout(warps)))


@gluon.jit(do_not_specialize=["tokens", "eps"])
def fp8_groups(
    x, square, box, scale, out, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, STREAMS: gl.constexpr,
    TILES: gl.constexpr, UNDER_WAY: gl.constexpr, AHEAD: gl.constexpr, KEPT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[t, g] = weight[g] · x[t, g], if NORM.scaled divided by the root mean square of x[t]. Grid: rows of a group /
    (16 TILES), groups. The rows of a program share their scales.

    STREAMS.ahead: stages of the ring, of which UNDER_WAY are asked for before the wait. AHEAD: chunks of the tokens
    that are asked for ahead, into registers, or into shared memory if KEPT.
    """
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    COLUMNS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (K + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    products: gl.constexpr = products_layout(WARPS)
    first = gl.program_id(0) * (TILES * _ROWS)
    group = gl.program_id(1)
    row = group * F + first
    if DEPENDENT:
        let_kernel_after_start()
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES * TILES, WARPS, _ROWS, _WIDTH], _TILES)
    full = barriers(STAGES)
    for stage in gl.static_range(UNDER_WAY):
        fetch_rows(box, stage, row, w_s, stage, full, TILES, WARPS)
    warp = gl.arange(0, WARPS, features_layout(WARPS))
    scales = ()
    for chunk in gl.static_range(CHUNKS):
        column = gl.minimum(chunk * WARPS + warp, STORED.scales - 1)
        scales = scales + (gl.load(scale + row // STORED.rows * STORED.scales + column),)
    if DEPENDENT:
        wait_for_kernel_before()
    if NORM.scaled:
        square_s = copy_squares(square, tokens, NORM.sums, NORM.block, COLUMNS, WARPS)
        async_copy.commit_group()
    token = gl.arange(0, COLUMNS, tokens_layout(_WIDTH, WARPS) if KEPT else columns_layout(WARPS))
    x_at = token.to(gl.int64) * STRIDES.x + group.to(gl.int64) * STRIDES.x_head
    live = token < tokens
    given = ()
    if KEPT:
        x_s = gl.allocate_shared_memory(x.dtype.element_ty, [AHEAD, WARPS, COLUMNS, _WIDTH], _SWIZZLED)
    for chunk in gl.static_range(AHEAD):
        if KEPT:
            copy_tokens(x_s.index(chunk), x, x_at, live, chunk, K, WARPS)
            async_copy.commit_group()
        else:
            given = given + (load_columns(x, x_at, live, chunk, K, WARPS),)
    for stage in gl.static_range(UNDER_WAY, STAGES):
        fetch_rows(box, stage, row, w_s, stage, full, TILES, WARPS)
    nothing = gl.zeros([WARPS, _ROWS, COLUMNS], gl.float32, products)
    totals = ()
    for _ in gl.static_range(TILES):
        totals = totals + (nothing,)
    for chunk in gl.static_range(CHUNKS):
        if KEPT:
            async_copy.wait_group(AHEAD - 1)
            gl.thread_barrier()
            tile = x_s.index(chunk % AHEAD).permute((0, 2, 1)).load(gl.DotOperandLayout(1, products, 16))
            if chunk + AHEAD < CHUNKS:
                gl.thread_barrier()
                copy_tokens(x_s.index(chunk % AHEAD), x, x_at, live, chunk + AHEAD, K, WARPS)
            async_copy.commit_group()
        else:
            tile = given[chunk]
            if chunk + AHEAD < CHUNKS:
                given = given + (load_columns(x, x_at, live, chunk + AHEAD, K, WARPS),)
        half, unit = fp16_scaled_columns(tile, WARPS)
        factor = unit[:, None, :] * scales[chunk][:, None, None]
        mbarrier.wait(full.index(chunk % STAGES), chunk // STAGES & 1)
        added = ()
        for tile in gl.static_range(TILES):
            part = mma_v2(weight_tile(w_s.index(chunk % STAGES * TILES + tile), WARPS), half, nothing)
            added = added + (totals[tile] + part * factor,)
        totals = added
        if chunk + STAGES < CHUNKS:
            gl.thread_barrier()
            fetch_rows(box, chunk + STAGES, row, w_s, chunk % STAGES, full, TILES, WARPS)
    t = gl.arange(0, COLUMNS, gl.SliceLayout(0, sums))
    f = first + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    to = out + group.to(gl.int64) * STRIDES.out_head + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
    if NORM.scaled:
        async_copy.wait_group(0)
    for tile in gl.static_range(TILES):
        y = gl.sum(share(totals[tile], WARPS, COLUMNS).load(sums.parent), 0)
        if NORM.scaled:
            if tile == 0:  # all threads have waited for their copies
                factor = inverse_rms(square_s, eps, K, _ROWS, WARPS)
            y = y * factor[None, :]
        mask = (f + tile * _ROWS < F)[:, None] & (t < tokens)[None, :]
        gl.store(to + tile * _ROWS, y.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_last")
