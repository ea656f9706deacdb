"""Products of a few tokens with a matrix of many rows: programs that stay, and weights that stream past them.

The tokens lie in a program's shared memory for all of its rows, and weights go through a ring of stages that is filled
STAGES ahead, across blocks of rows: neither starts nor ends of programs interrupt the stream, and the tokens, which
are as many bytes as 16 rows of weights when they are 16, are read once. Sums are those of `stream`, in its order.

Gluon, for compute capability 8.0 and above (dependent launch: 9.0 and above).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.ring import weights_ring
from kernels.gluon.stored import PLAIN
from kernels.gluon.tiles import ROWS, copy_token_tile, products_layout, share, shared_tiles, sums_layout, tokens_layout

_ROWS = gl.constexpr(ROWS)
_PLAIN = gl.constexpr(PLAIN)


@gluon.jit
def copy_rows(
    tile_s, weight, block, chunk,
    F: gl.constexpr, K: gl.constexpr, W_STRIDE: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a chunk of a block of 16 rows; zeros past the last."""
    row = block * _ROWS + gl.arange(0, _ROWS, tokens_layout(WIDTH, WARPS))
    copy_token_tile(tile_s, weight, row.to(gl.int64) * W_STRIDE, row < F, chunk, 0, K, WIDTH, WARPS)


@gluon.jit(do_not_specialize=["tokens"])
def ring_linear(
    x, weight, out, tokens,
    SIZE: gl.constexpr, STRIDES: gl.constexpr, STREAMS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T for some tokens. A program takes every grid-th block."""
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (K + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    BLOCKS: gl.constexpr = (F + _ROWS - 1) // _ROWS
    HELD: gl.constexpr = CHUNKS * TOKENS <= 64
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 8)
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 8)
    programs = gl.num_programs(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s = weights_ring(weight, WIDTH, WARPS, STAGES, _PLAIN)
    for stage in gl.static_range(STAGES):
        block = gl.program_id(0) + stage // CHUNKS * programs
        copy_rows(w_s.index(stage), weight, block, stage % CHUNKS, F, K, STRIDES.weight, WIDTH, WARPS)
    if DEPENDENT:
        wait_for_kernel_before()
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_s = shared_tiles(x, WIDTH, WARPS, TOKENS, CHUNKS)
    for chunk in gl.static_range(CHUNKS):
        copy_token_tile(x_s[chunk], x, token.to(gl.int64) * STRIDES.x, token < tokens, chunk, 0, K, WIDTH, WARPS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    if HELD:
        held = ()
        for chunk in gl.static_range(CHUNKS):
            held = held + (x_s[chunk].permute((0, 2, 1)).load(right),)  # noqa: RUF005
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    stage = 0
    for block in range(gl.program_id(0), BLOCKS, programs):
        total = gl.zeros([WARPS, _ROWS, TOKENS], gl.float32, products_layout(WARPS))
        for chunk in gl.static_range(CHUNKS):
            async_copy.wait_group(STAGES - 1)
            gl.thread_barrier()
            if HELD:  # noqa: SIM108 (compile-time: only one of them exists)
                tile = held[chunk]
            else:
                tile = x_s[chunk].permute((0, 2, 1)).load(right)
            total = mma_v2(w_s.index(stage).load(left), tile, total)
            gl.thread_barrier()
            ahead = block + (chunk + STAGES) // CHUNKS * programs
            copy_rows(w_s.index(stage), weight, ahead, (chunk + STAGES) % CHUNKS, F, K, STRIDES.weight, WIDTH, WARPS)
            async_copy.commit_group()
            stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        y = gl.sum(share(total, WARPS, TOKENS).load(sums.parent), 0)
        f = block * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
        inside = (f < F)[:, None] & (t < tokens)[None, :]
        gl.store(out + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None], y.to(out.dtype.element_ty), mask=inside)
    async_copy.wait_group(0)
