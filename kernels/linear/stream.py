"""Products of a few tokens with a weight matrix, bound by the time in which the weights stream through the chip.

A program owns 16 rows of the weights and cuts their features among its warps, so every warp multiplies (mma.sync, 16
weight rows x 8 tokens) what it alone loaded: weights go from memory to the registers of the tensor core's left operand
in 16-byte pieces, with no shared memory on the way. All of a program's first tiles are under way before it waits for
the kernel before (programmatic dependent launch): weights never change. Only the sums meet, at the end, in a fixed
order: a token's result depends on neither the number of tokens nor its place among them.

Gluon, for compute capability 8.0 and above (dependent launch and weights in FP8: 9.0 and above).
"""

# ruff: noqa: E741
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    NORMED,
    RESIDUAL,
    ROWS,
    add_to_residual,
    copy_squares,
    gate_up_rows,
    gate_up_values,
    inverse_rms,
    products,
    residual_before,
    scale_rows_layout,
    scaled_by_token,
    scales_memory,
    store_squares,
    sums_layout,
    tokens_layout,
    weight_rows_layout,
    weight_scales,
    weight_tiles,
)

_ROWS = gl.constexpr(ROWS)
_AHEAD_BYTES = gl.constexpr(8192)
"""Most bytes of a row that are asked into L2 behind those that registers hold."""

_RESIDUAL = gl.constexpr(RESIDUAL)
_NORMED = gl.constexpr(NORMED)


@gluon.jit
def rest_into_l2(rows, FIRST: gl.constexpr, BYTES: gl.constexpr, WARPS: gl.constexpr):
    """Ask for BYTES of 16 rows from byte FIRST on to be brought into the L2 cache: what no register has room for while
    the kernel before is still at work. `rows`: where they begin, a thread's each."""
    instruction: gl.constexpr = """{
        .reg .pred mine;
        setp.lt.s32 mine, $2, 16;
        @mine cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.b32 $0, 0;
    }"""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    size = gl.zeros_like(thread) + BYTES
    gl.inline_asm_elementwise(
        instruction, "=r,l,r,r", [rows.to(gl.int64) + FIRST, thread, size], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["tokens", "eps"])
def stream_linear(
    x, square, weight, scale, out, residual, norm, out_square, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, EPILOGUE: gl.constexpr,
    STREAMS: gl.constexpr, EARLY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T for some tokens, if NORM.scaled times each token's inverse root mean square. Grid: rows / 16,
    heads; with FP8 weights the rows of a head, of several, are whole blocks. EARLY: the kernel after may start at once,
    else only after this one has waited for the kernel before. `residual`: with EPILOGUE.token_scaled the factors of the
    tokens."""
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    DEPTH: gl.constexpr = STREAMS.ahead
    RESIDUAL: gl.constexpr = EPILOGUE.kind == _RESIDUAL
    NORMED: gl.constexpr = EPILOGUE.kind == _NORMED
    NORM_FEATURES: gl.constexpr = EPILOGUE.norm_features
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    program = gl.program_id(0)
    head = gl.program_id(1).to(gl.int64)
    if DEPENDENT and EARLY:
        let_kernel_after_start()
    row = program * _ROWS + gl.arange(0, _ROWS, weight_rows_layout(WARPS, STORED.piece))
    at = head * STRIDES.weight_head + gl.minimum(row, F - 1).to(gl.int64) * STRIDES.weight
    tiles = weight_tiles(weight, at, 0, K, WIDTH, WARPS, DEPTH, STORED)
    CHUNKS: gl.constexpr = (K + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    if DEPENDENT and CHUNKS > DEPTH and not STORED.fp8:
        thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        own = gl.minimum(program * _ROWS + thread % _ROWS, F - 1).to(gl.int64)
        rows = weight + head * STRIDES.weight_head + own * STRIDES.weight
        FIRST: gl.constexpr = DEPTH * WARPS * WIDTH * 2
        rest_into_l2(rows, FIRST, min(K * 2 - FIRST, _AHEAD_BYTES), WARPS)
    scales_s = scales_memory(weight, CHUNKS, WARPS, STORED)
    if STORED.fp8:
        scaled_row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, scale_rows_layout(WARPS)), F - 1)
        scaled_at = (scaled_row // STORED.rows + gl.program_id(1) * (F // STORED.rows)) * STORED.scales
        scales_s.store(weight_scales(scale, scaled_at, CHUNKS, WIDTH, WARPS, STORED))
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    inside = (f < F)[:, None] & (t < tokens)[None, :]
    if RESIDUAL:
        factor = gl.load(norm + f, mask=f < F, other=0.0).to(gl.float32)
    if NORMED:
        factor = gl.load(norm + f, mask=f < NORM_FEATURES, other=1.0).to(gl.float32)
    if DEPENDENT:
        wait_for_kernel_before()
        if not EARLY:
            let_kernel_after_start()

    if NORM.scaled:
        square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
    if RESIDUAL:
        before = residual_before(residual, f, t, inside, STRIDES.residual)
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_at = token.to(gl.int64) * STRIDES.x + head * STRIDES.x_head
    parts_s = products(weight, at, x, x_at, token < tokens, tiles, scales_s, K, WIDTH, WARPS, TOKENS, DEPTH, STORED)
    y = gl.sum(parts_s.load(sums.parent), 0)
    if NORM.scaled:
        y = y * inverse_rms(square_s, eps, K, _ROWS, WARPS)[None, :]

    if RESIDUAL:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, STRIDES.residual, STRIDES.out,
            EPILOGUE.pieces,
        )  # fmt: skip
    else:
        if NORMED:
            if program * _ROWS < NORM_FEATURES:
                store_squares(y, f, t, inside, tokens, program, out_square, NORM_FEATURES, EPILOGUE.pieces)
            y = y * factor[:, None]
            if EPILOGUE.token_scaled:
                y = scaled_by_token(y, residual, f, t, tokens, NORM_FEATURES)
        to = out + head * STRIDES.out_head + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")


@gluon.jit(do_not_specialize=["tokens", "eps"])
def stream_gate_up(
    x, square, weight, scale, out, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, STREAMS: gl.constexpr,
    EARLY: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out = silu(gate · x) * (up · x), the gate rows of the weight before its up rows. Grid: rows of each / 8. EARLY:
    as of `stream_linear`."""
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    if DEPENDENT and EARLY:
        let_kernel_after_start()
    row = gate_up_rows(gl.program_id(0), I, weight_rows_layout(WARPS, STORED.piece))
    at = row.to(gl.int64) * STRIDES.weight
    tiles = weight_tiles(weight, at, 0, K, WIDTH, WARPS, STREAMS.ahead, STORED)
    CHUNKS: gl.constexpr = (K + WARPS * WIDTH - 1) // (WARPS * WIDTH)
    scales_s = scales_memory(weight, CHUNKS, WARPS, STORED)
    if STORED.fp8:
        scaled_at = gate_up_rows(gl.program_id(0), I, scale_rows_layout(WARPS)) // STORED.rows * STORED.scales
        scales_s.store(weight_scales(scale, scaled_at, CHUNKS, WIDTH, WARPS, STORED))
    if DEPENDENT:
        wait_for_kernel_before()
        if not EARLY:
            let_kernel_after_start()
    gate_up_program(
        x, square, weight, at, tiles, scales_s, out, gl.program_id(0), tokens, eps, STORED, SIZE, STRIDES, NORM, STREAMS
    )  # fmt: skip


@gluon.jit
def gate_up_program(
    x, square, weight, at, tiles, scales_s, out, program, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, STREAMS: gl.constexpr,
):  # fmt: skip
    """8 columns of the gated activations of every token, after the wait."""
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WIDTH: gl.constexpr = STREAMS.width
    WARPS: gl.constexpr = STREAMS.warps
    DEPTH: gl.constexpr = STREAMS.ahead
    half: gl.constexpr = _ROWS // 2
    sums: gl.constexpr = sums_layout(half, WARPS)
    if NORM.scaled:
        square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
    token = gl.arange(0, TOKENS, tokens_layout(WIDTH, WARPS))
    x_at = token.to(gl.int64) * STRIDES.x
    parts_s = products(weight, at, x, x_at, token < tokens, tiles, scales_s, K, WIDTH, WARPS, TOKENS, DEPTH, STORED)
    gate, up = gate_up_values(parts_s, WARPS)
    if NORM.scaled:
        scale = inverse_rms(square_s, eps, K, half, WARPS)
        gate = gate * scale[None, :]
        up = up * scale[None, :]
    value = gate / (1 + gl.exp(-gate)) * up
    f = program * half + gl.arange(0, half, gl.SliceLayout(1, sums))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    to = out + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
    inside = (f < I)[:, None] & (t < tokens)[None, :]
    gl.store(to, value.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
