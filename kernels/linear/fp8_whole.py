"""Products of a few tokens with FP8 weights on Hopper, by the means of `fp8`, of programs that all stand at once.

A program's weights all lie in its shared memory: it has asked for them before it waits for the kernel before, so that
what is left then is the latency of the tokens and of one product. The tokens are bf16 in memory; behind a norm they are
still to be divided by their root mean squares. Every 128 features of a token, which one warp multiplies at a time, get
a power of two of their own, for which no other feature need be looked at, and become fp16. Their sums are multiplied by
it, together with the scale of the block of weights. One token goes through shared memory, where its features are made
fp16 once; of several every warp loads its own features as it multiplies them.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.fp16_scaled import unit_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    NORMED,
    RESIDUAL,
    ROWS,
    add_to_residual,
    copy_squares,
    products_layout,
    residual_before,
    scaled_by_token,
    share,
    store_squares,
    sums_layout,
)
from kernels.linear.fp8 import (
    COLUMNS,
    WIDTH,
    all_scales,
    columns_layout,
    features_of,
    fetch,
    fp16_scaled_columns,
    load_columns,
    mean_root,
    no_sums,
    places_of,
    scales_at,
    token_memory,
    token_tile,
    weight_ring,
    weight_tile,
)

GROUP, GROUP_OF_FEW = 4, 2
"""Chunks whose products are under way at once, of one token and of several."""

_GROUP, _GROUP_OF_FEW = gl.constexpr(GROUP), gl.constexpr(GROUP_OF_FEW)
_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_NORMED = gl.constexpr(NORMED)
_RESIDUAL = gl.constexpr(RESIDUAL)


@gluon.jit
def load_token(x, K: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """Load all features of the token, as tiles [WARPS, 1, 128]; zeros past its features."""
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        feature = features_of(chunk, WARPS)
        # .cg: a dependent launch may find lines of an earlier kernel in L1.
        tiles = tiles + (gl.load(x + feature, mask=feature < K, other=0.0, cache_modifier=".cg"),)
    return tiles


@gluon.jit
def fp16_scaled_tiles(tiles, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """The token in fp16 and the units of its blocks, [WARPS, 1] a tile, in shared memory, with a barrier behind."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    half_s = token_memory(1, WARPS, CHUNKS)
    unit_s = gl.allocate_shared_memory(gl.float32, [CHUNKS, WARPS, 1], plain)
    for chunk in gl.static_range(CHUNKS):
        value = tiles[chunk].to(gl.float32)
        unit, inverse = unit_of(gl.max(gl.abs(value), 2))
        half_s.index(chunk).store((value * inverse[:, :, None]).to(gl.float16))
        unit_s.index(chunk).store(unit)
    gl.thread_barrier()
    return half_s, unit_s


@gluon.jit
def products_of_one(
    x, w_s, full, scales, K: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Products of the only token, each warp's share of them."""
    half_s, unit_s = fp16_scaled_tiles(load_token(x, K, CHUNKS, WARPS), CHUNKS, WARPS)
    total = no_sums(WARPS)
    for begin in gl.static_range(0, CHUNKS, _GROUP):
        # Products that do not wait for each other; their sums are added in order.
        parts = ()
        for chunk in gl.static_range(begin, min(begin + _GROUP, CHUNKS)):
            mbarrier.wait(full.index(chunk), 0)
            tile = token_tile(half_s.index(chunk), WARPS, 1)
            parts = parts + (mma_v2(weight_tile(w_s.index(chunk), WARPS), tile, no_sums(WARPS)),)
        for chunk in gl.static_range(begin, min(begin + _GROUP, CHUNKS)):
            unit = unit_s.index(chunk).load(gl.SliceLayout(1, products_layout(WARPS)))
            total = total + parts[chunk - begin] * scales[chunk][:, :, None] * unit[:, None, :]
    return total


@gluon.jit
def products_of_few(
    x, tokens, w_s, full, scales,
    X_STRIDE: gl.constexpr, K: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Products of up to eight tokens, each warp's share of them."""
    token = gl.arange(0, _COLUMNS, columns_layout(WARPS))
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        tiles = tiles + (load_columns(x, token * X_STRIDE, token < tokens, chunk, K, WARPS),)
    total = no_sums(WARPS)
    for begin in gl.static_range(0, CHUNKS, _GROUP_OF_FEW):
        parts = ()
        units = ()
        for chunk in gl.static_range(begin, min(begin + _GROUP_OF_FEW, CHUNKS)):
            half, unit = fp16_scaled_columns(tiles[chunk], WARPS)
            mbarrier.wait(full.index(chunk), 0)
            parts = parts + (mma_v2(weight_tile(w_s.index(chunk), WARPS), half, no_sums(WARPS)),)
            units = units + (unit,)
        for chunk in gl.static_range(begin, min(begin + _GROUP_OF_FEW, CHUNKS)):
            total = total + parts[chunk - begin] * scales[chunk][:, :, None] * units[chunk - begin][:, None, :]
    return total


@gluon.jit(do_not_specialize=["tokens", "eps"])
def fp8_whole(
    x, square, box, scale, out, residual, norm, out_square, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, EPILOGUE: gl.constexpr,
    STREAMS: gl.constexpr, UNDER_WAY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T, divided by the root mean square of x if NORM.scaled. Grid: rows / 16.

    EPILOGUE.kind: STORE, RESIDUAL or NORMED of `kernels.gluon.tiles`. `residual`: with EPILOGUE.token_scaled the
    factors of the tokens.
    """
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    CHUNKS: gl.constexpr = STREAMS.ahead
    NORM_FEATURES: gl.constexpr = EPILOGUE.norm_features
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s, full = weight_ring(box, program, CHUNKS, CHUNKS, WARPS, UNDER_WAY)
    scales = all_scales(scale, scales_at(program, F, WARPS, STORED), True, CHUNKS, WARPS, STORED)
    f, t, inside = places_of(program, F, tokens, WARPS)
    if EPILOGUE.kind == _NORMED:
        factor = gl.load(norm + f, mask=f < NORM_FEATURES, other=1.0).to(gl.float32)
    if EPILOGUE.kind == _RESIDUAL:
        factor = gl.load(norm + f, mask=f < F, other=0.0).to(gl.float32)
    for chunk in gl.static_range(UNDER_WAY, CHUNKS):
        mbarrier.wait(full.index(chunk - UNDER_WAY), 0)
        fetch(box, [chunk * WARPS, program * _ROWS, 0], w_s.index(chunk), full.index(chunk), True)
    if DEPENDENT:
        wait_for_kernel_before()
    if EPILOGUE.kind == _RESIDUAL:
        before = residual_before(residual, f, t, inside, STRIDES.residual)
    if NORM.scaled:
        square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
        async_copy.commit_group()
    if TOKENS == 1:
        total = products_of_one(x, w_s, full, scales, K, CHUNKS, WARPS)
    else:
        total = products_of_few(x, tokens, w_s, full, scales, STRIDES.x, K, CHUNKS, WARPS)
    if NORM.scaled:
        async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, _COLUMNS).load(sums.parent), 0)
    if NORM.scaled:
        y = y * mean_root(square_s, eps, K, _ROWS, TOKENS, WARPS)[None, :]
    if EPILOGUE.kind == _RESIDUAL:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, STRIDES.residual, STRIDES.out,
            EPILOGUE.pieces,
        )  # fmt: skip
    else:
        if EPILOGUE.kind == _NORMED:
            if program * _ROWS < NORM_FEATURES:
                store_squares(y, f, t, inside, tokens, program, out_square, NORM_FEATURES, EPILOGUE.pieces)
            y = y * factor[:, None]
            if EPILOGUE.token_scaled:
                y = scaled_by_token(y, residual, f, t, tokens, NORM_FEATURES)
        to = out + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
