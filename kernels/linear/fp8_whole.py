"""Products of one token, behind a norm, with FP8 weights on Hopper, by the means of `fp8`.

A program's weights all lie in its shared memory: it has asked for them before it waits for the kernel before, so that
what is left then is the latency of the token and of one product. The token is bf16 in memory, still to be divided by
its root mean square. Every 128 features of it, which one warp multiplies at a time, get a power of two of their own,
for which no other feature need be looked at, and become fp16. Their sums are multiplied by it, together with the scale
of the block of weights.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.halve.kernel import unit_of
from kernels.linear.fp8 import (
    COLUMNS,
    WIDTH,
    all_scales,
    features_of,
    mean_root,
    no_sums,
    places_of,
    scales_at,
    token_memory,
    token_tile,
    weight_ring,
    weight_tile,
)
from kernels.linear.stream import (
    NORMED,
    ROWS,
    copy_squares,
    let_kernel_after_start,
    products_layout,
    share,
    store_squares,
    sums_layout,
    wait_for_kernel_before,
)

_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_NORMED = gl.constexpr(NORMED)


@gluon.jit
def load_token(x, K: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
    """All of the token, as tiles [WARPS, 1, 128]; zeros past its features."""
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        feature = features_of(chunk, WARPS)
        # .cg: a dependent launch may find lines of an earlier kernel in L1.
        tiles = tiles + (gl.load(x + feature, mask=feature < K, other=0.0, cache_modifier=".cg"),)
    return tiles


@gluon.jit
def halve_tiles(tiles, CHUNKS: gl.constexpr, WARPS: gl.constexpr):
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


@gluon.jit(do_not_specialize=["eps"])
def fp8_whole(
    x, square, box, scale, out, norm, out_square, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, NORM: gl.constexpr, EPILOGUE: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T, divided by the root mean square of x. Grid: rows / 16.

    EPILOGUE.kind: STORE or NORMED of `stream`.
    """
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    WARPS: gl.constexpr = STREAMS.warps
    CHUNKS: gl.constexpr = STREAMS.ahead
    NORM_FEATURES: gl.constexpr = EPILOGUE.norm_features
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s, full = weight_ring(box, program, CHUNKS, CHUNKS, WARPS)
    scales = all_scales(scale, scales_at(program, F, WARPS, STORED), True, CHUNKS, WARPS, STORED)
    f, t, inside = places_of(program, F, 1, WARPS)
    if EPILOGUE.kind == _NORMED:
        factor = gl.load(norm + f, mask=f < NORM_FEATURES, other=1.0).to(gl.float32)
    if DEPENDENT:
        wait_for_kernel_before()
    tiles = load_token(x, K, CHUNKS, WARPS)
    square_s = copy_squares(square, 1, NORM.sums, NORM.block, 1, WARPS)
    async_copy.commit_group()
    half_s, unit_s = halve_tiles(tiles, CHUNKS, WARPS)
    total = no_sums(WARPS)
    for chunk in gl.static_range(CHUNKS):
        mbarrier.wait(full.index(chunk), 0)
        unit = unit_s.index(chunk).load(gl.SliceLayout(1, products_layout(WARPS)))
        tile = token_tile(half_s.index(chunk), WARPS, 1)
        part = mma_v2(weight_tile(w_s.index(chunk), WARPS), tile, no_sums(WARPS))
        total = total + part * scales[chunk][:, :, None] * unit[:, None, :]
    async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, _COLUMNS).load(sums.parent), 0)
    y = y * mean_root(square_s, eps, K, _ROWS, 1, WARPS)[None, :]
    if EPILOGUE.kind == _NORMED:
        if program * _ROWS < NORM_FEATURES:
            store_squares(y, f, t, inside, 1, program, out_square, NORM_FEATURES, EPILOGUE.pieces)
        y = y * factor[:, None]
    to = out + 0 * t[None, :] + f[:, None]
    gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
