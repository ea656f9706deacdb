"""Products of a few tokens with FP8 weights on Hopper, bound by the time in which the weights stream through the chip.

The copy engine fetches weights into a ring of stages in shared memory: 16 rows of 128 features for every warp, which
it alone multiplies (mma.sync). One instruction makes fp16 of two FP8 numbers, which is exact; tokens come in fp16 as
well, with a power of two each (`kernels.fp16_scaled`), so nothing is rounded but what the checkpoint has rounded. 128
features are also a block of the weights' scales, by which a warp's sums are multiplied in fp32. Only sums of whole rows
meet, at the end, in a fixed order: a token's result depends on neither the number of tokens nor its place among them.

Tokens are one column or eight: of one, all columns of a tensor core's tile are the same.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: E741, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from kernels.fp16_scaled import unit_of
from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.gluon.tiles import (
    RESIDUAL,
    ROWS,
    add_to_residual,
    copy_squares,
    gate_up_rows,
    gate_up_values,
    products_layout,
    residual_before,
    share,
    sums_layout,
    token_pieces,
    tokens_layout,
)

WIDTH = 128
"""Features of a warp at a time, and of a block of scales."""
COLUMNS = 8
"""Columns of a tile of the tensor cores."""

_ROWS = gl.constexpr(ROWS)
_WIDTH = gl.constexpr(WIDTH)
_COLUMNS = gl.constexpr(COLUMNS)
_RESIDUAL = gl.constexpr(RESIDUAL)

BOXES = {rank: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=rank) for rank in (3, 4, 5)}
"""Layouts of a stage, by the dimensions in which the copy engine sees the weights."""
_TILES = gl.constexpr(BOXES[3])
_GATE_UP = gl.constexpr(BOXES[4])

_TO_FP16 = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)


@gluon.jit
def to_fp16(tile):
    """A tile of FP8 weights in fp16, without their scales."""
    return gl.inline_asm_elementwise(_TO_FP16, "=r,=r,r", [tile], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Make a barrier for every stage, signalled when its bytes are there."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(COUNT):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return full


@gluon.jit
def fetch(box, at, stage_s, full, exists):
    """Start fetching a stage of weights, where it exists."""
    mbarrier.expect(full, box.block_type.nbytes, pred=exists)
    tma.async_copy_global_to_shared(box, at, full, stage_s, pred=exists)


@gluon.jit
def weight_ring(
    box, program, CHUNKS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, UNDER_WAY: gl.constexpr
):  # fmt: skip
    """Shared memory for so many stages of a program's 16 rows, and their barriers; the first chunks are under way."""
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS, _ROWS, _WIDTH], _TILES)
    full = barriers(STAGES)
    for stage in gl.static_range(UNDER_WAY):
        fetch(box, [stage * WARPS, program * _ROWS, 0], w_s.index(stage), full.index(stage), stage < CHUNKS)
    return w_s, full


@gluon.jit
def weight_tile(stage_s, WARPS: gl.constexpr):
    """A stage that has arrived as the left operand, in fp16: [WARPS, 16, 128]."""
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 16)
    return to_fp16(stage_s.reshape([WARPS, _ROWS, _WIDTH]).load(left))


@gluon.jit
def token_tile(tile_s, WARPS: gl.constexpr, TOKENS: gl.constexpr):
    """A tile of the tokens as the right operand, in eight columns."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 16)
    tile = tile_s.permute((0, 2, 1)).load(right)
    if TOKENS == 1:
        _, tile = gl.broadcast(gl.zeros([WARPS, _WIDTH, _COLUMNS], gl.float16, right), tile)
    return tile


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after, and the phase of its barrier."""
    stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
    return stage, gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def no_sums(WARPS: gl.constexpr):
    """Zeros to add products to."""
    return gl.zeros([WARPS, _ROWS, _COLUMNS], gl.float32, products_layout(WARPS))


@gluon.jit
def add_products(
    total, stage_s, full, phase, tile_s, scales, WARPS: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """total += weights x tokens x scales of a stage, once it has arrived; nobody may have overwritten it before a
    barrier behind."""
    mbarrier.wait(full, phase)
    tile = token_tile(tile_s, WARPS, TOKENS)
    return total + mma_v2(weight_tile(stage_s, WARPS), tile, no_sums(WARPS)) * scales


@gluon.constexpr_function
def scales_layout(warps):
    """Layout of the scales [WARPS, 16] of a stage."""
    return gl.SliceLayout(2, products_layout(warps))


@gluon.constexpr_function
def scale_rows(warps):
    """Layout of the rows [16] whose scales are loaded."""
    return gl.SliceLayout(0, scales_layout(warps))


@gluon.jit
def scales_at(program, F: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr):
    """Return the offsets at which the scales of a program's 16 rows begin, [16]."""
    row = gl.minimum(program * _ROWS + gl.arange(0, _ROWS, scale_rows(WARPS)), F - 1)
    return row // STORED.rows * STORED.scales


@gluon.jit
def chunk_scales(scale, at, chunk, exists, WARPS: gl.constexpr, STORED: gl.constexpr):
    """The scales of a chunk of the rows whose first ones are at the offsets `at` ([16]): [WARPS, 16]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, scales_layout(WARPS)))
    column = gl.minimum(chunk * WARPS + warp, STORED.scales - 1)
    return gl.load(scale + at[None, :] + column[:, None], mask=exists, other=0.0)


@gluon.jit
def all_scales(scale, at, exists, CHUNKS: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr):
    """Load the scales of all chunks."""
    scales = ()
    for chunk in gl.static_range(CHUNKS):
        scales = scales + (chunk_scales(scale, at, chunk, exists, WARPS, STORED),)
    return scales


@gluon.jit
def features_of(chunk, WARPS: gl.constexpr):
    """The features of a chunk, as a tile of the tokens has them: [WARPS, 1, 128]."""
    pieces: gl.constexpr = token_pieces(_WIDTH, WARPS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, pieces)))
    k = gl.arange(0, _WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, pieces)))
    return chunk * (WARPS * _WIDTH) + warp[:, None, None] * _WIDTH + k[None, None, :]


@gluon.jit
def token_memory(TOKENS: gl.constexpr, WARPS: gl.constexpr, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of the tokens."""
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    return gl.allocate_shared_memory(gl.float16, [COUNT, WARPS, TOKENS, _WIDTH], swizzled)


@gluon.jit
def load_tokens(
    x, tokens, X_STRIDE: gl.constexpr, K: gl.constexpr, CHUNKS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Load all features of the tokens, bf16, as tiles [WARPS, TOKENS, 128]; zeros past their features."""
    token = gl.arange(0, TOKENS, tokens_layout(_WIDTH, WARPS))
    tiles = ()
    for chunk in gl.static_range(CHUNKS):
        feature = features_of(chunk, WARPS)
        where = x + (token.to(gl.int64) * X_STRIDE)[None, :, None] + feature
        inside = (token < tokens)[None, :, None] & (feature < K)
        # .cg: a dependent launch may find lines of an earlier kernel in L1.
        tiles = tiles + (gl.load(where, mask=inside, other=0.0, cache_modifier=".cg"),)
    return tiles


@gluon.jit
def keep_tokens(x_s, tiles, CHUNKS: gl.constexpr):
    """Tokens, as `load_tokens` gives them, into shared memory in scaled fp16; their units [TOKENS]. No barrier
    behind."""
    most = gl.abs(tiles[0].to(gl.float32))
    for chunk in gl.static_range(1, CHUNKS):
        most = gl.maximum(most, gl.abs(tiles[chunk].to(gl.float32)))
    unit, inverse = unit_of(gl.max(gl.max(most, 2), 0))
    for chunk in gl.static_range(CHUNKS):
        x_s.index(chunk).store((tiles[chunk].to(gl.float32) * inverse[None, :, None]).to(gl.float16))
    return unit


@gluon.constexpr_function
def columns_layout(warps):
    """Layout of the tokens [8] of a tile that is loaded as the right operand."""
    return gl.SliceLayout(0, gl.SliceLayout(1, gl.DotOperandLayout(1, products_layout(warps), 16)))


@gluon.jit
def load_columns(x, at, live, chunk, K: gl.constexpr, WARPS: gl.constexpr):
    """A chunk of the tokens at the offsets `at` ([8]), bf16 as the right operand: [WARPS, 128, 8]; zeros where not
    `live` and past the features."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 16)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, right)))
    k = gl.arange(0, _WIDTH, gl.SliceLayout(0, gl.SliceLayout(2, right)))
    feature = (chunk * WARPS + warp)[:, None, None] * _WIDTH + k[None, :, None]
    inside = live[None, None, :]
    if K % (WARPS * _WIDTH) != 0:
        inside = inside & (feature < K)
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    return gl.load(x + at[None, None, :] + feature, mask=inside, other=0.0, cache_modifier=".cg")


@gluon.jit
def fp16_scaled_columns(tile, WARPS: gl.constexpr):
    """Convert the result of `load_columns` to fp16, with the unit of every warp's 128 features of every token, [WARPS,
    8]."""
    value = tile.to(gl.float32)
    unit, inverse = unit_of(gl.max(gl.abs(value), 1))
    half = (value * inverse[:, None, :]).to(gl.float16)
    return half, gl.convert_layout(unit, gl.SliceLayout(1, products_layout(WARPS)))


@gluon.jit
def copy_tokens(tile_s, x, at, live, chunk, K: gl.constexpr, WARPS: gl.constexpr):
    """Start copying a chunk of the tokens in scaled fp16 at the offsets `at`; zeros where not `live` and past the
    features."""
    feature = features_of(chunk, WARPS)
    inside = live[None, :, None] & (feature < K)
    # Copies of 16 bytes go past L1, where a dependent launch may find lines older than the kernel before.
    async_copy.async_copy_global_to_shared(tile_s, x + at[None, :, None] + feature, mask=inside, cache_modifier=".cg")


@gluon.jit
def per_column(value, ROWS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """A number of every token, [TOKENS], beside sums of ROWS rows: [8]."""
    columns: gl.constexpr = gl.SliceLayout(0, sums_layout(ROWS, WARPS))
    if TOKENS == 1:
        spread = gl.full([_COLUMNS], gl.sum(value, 0), gl.float32, columns)
    else:
        spread = gl.convert_layout(value, columns)
    return spread


@gluon.jit
def mean_root(square_s, eps, K: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """1 / sqrt(mean square + eps) of every token beside sums of ROWS rows, once its squares have arrived: [8]."""
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    return per_column(gl.rsqrt(gl.sum(square_s.load(rows), 1) / K + eps), ROWS, TOKENS, WARPS)


@gluon.jit
def places_of(program, F: gl.constexpr, tokens, WARPS: gl.constexpr):
    """The rows [16] and the tokens [8] of a program's sums, and which sums [16, 8] are of both."""
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    f = program * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, sums))
    t = gl.arange(0, _COLUMNS, gl.SliceLayout(0, sums))
    return f, t, (f < F)[:, None] & (t < tokens)[None, :]


@gluon.jit(do_not_specialize=["tokens"])
def fp8_linear(
    x, unit, box, scale, out, residual, norm, out_square, tokens,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, EPILOGUE: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """y = x · weight^T for some tokens in scaled fp16, whose units are `unit`; they stream beside the weights. Grid:
    rows / 16.

    EPILOGUE.kind: STORE or RESIDUAL of `kernels.gluon.tiles`.
    """
    F: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    CHUNKS: gl.constexpr = (K + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    RESIDUAL: gl.constexpr = EPILOGUE.kind == _RESIDUAL
    sums: gl.constexpr = sums_layout(_ROWS, WARPS)
    program = gl.program_id(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s, full = weight_ring(box, program, CHUNKS, STAGES, WARPS, STAGES)
    scaled_at = scales_at(program, F, WARPS, STORED)
    scales = chunk_scales(scale, scaled_at, 0, True, WARPS, STORED)
    f, t, inside = places_of(program, F, tokens, WARPS)
    if RESIDUAL:
        factor = gl.load(norm + f, mask=f < F, other=0.0).to(gl.float32)
    if DEPENDENT:
        wait_for_kernel_before()
    if RESIDUAL:
        before = residual_before(residual, f, t, inside, STRIDES.residual)
    units = gl.load(unit + t, mask=t < tokens, other=0.0, cache_modifier=".cg")
    x_s = token_memory(TOKENS, WARPS, STAGES)
    token = gl.arange(0, TOKENS, tokens_layout(_WIDTH, WARPS))
    x_at = token.to(gl.int64) * STRIDES.x
    for stage in gl.static_range(STAGES):
        copy_tokens(x_s.index(stage), x, x_at, token < tokens, stage, K, WARPS)
        async_copy.commit_group()
    total = no_sums(WARPS)
    stage = 0
    phase = 0
    for chunk in range(CHUNKS):
        later_scales = chunk_scales(scale, scaled_at, chunk + 1, True, WARPS, STORED)
        async_copy.wait_group(STAGES - 1)
        total = add_products(
            total, w_s.index(stage), full.index(stage), phase, x_s.index(stage), scales[:, :, None], WARPS, TOKENS
        )  # fmt: skip
        gl.thread_barrier()
        ahead = chunk + STAGES
        fetch(box, [ahead * WARPS, program * _ROWS, 0], w_s.index(stage), full.index(stage), ahead < CHUNKS)
        copy_tokens(x_s.index(stage), x, x_at, (token < tokens) & (ahead < CHUNKS), ahead, K, WARPS)
        async_copy.commit_group()
        scales = later_scales
        stage, phase = next_stage(stage, phase, STAGES)
    async_copy.wait_group(0)
    y = gl.sum(share(total, WARPS, _COLUMNS).load(sums.parent), 0) * units[None, :]
    if RESIDUAL:
        add_to_residual(
            y, before, f, t, inside, tokens, program, residual, factor, out, out_square, STRIDES.residual, STRIDES.out,
            EPILOGUE.pieces,
        )  # fmt: skip
    else:
        to = out + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
        gl.store(to, y.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")


@gluon.jit
def gate_up_scales(
    scale, expert, block, exists,
    I: gl.constexpr, CHUNKS: gl.constexpr, WARPS: gl.constexpr, STORED: gl.constexpr,
):  # fmt: skip
    """The scales of an expert's 8 gate rows and of their 8 up rows, of all chunks."""
    EXPERT_ROWS: gl.constexpr = (2 * I + STORED.rows - 1) // STORED.rows
    row = gate_up_rows(block, I, scale_rows(WARPS)) // STORED.rows
    at = (gl.maximum(expert, 0) * EXPERT_ROWS + row) * STORED.scales
    return all_scales(scale, at, exists, CHUNKS, WARPS, STORED)


@gluon.jit(do_not_specialize=["tokens", "eps"])
def fp8_gate_up(
    x, square, box, scale, out, tokens, eps,
    STORED: gl.constexpr, SIZE: gl.constexpr, STRIDES: gl.constexpr, NORM: gl.constexpr, STREAMS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out = silu(gate · x) * (up · x) of tokens that are still to be divided by their root mean square; they stay in
    shared memory, in scaled fp16. A block is 8 of the I columns; a program takes every grid-th."""
    I: gl.constexpr = SIZE.rows
    K: gl.constexpr = SIZE.features
    TOKENS: gl.constexpr = STREAMS.tokens
    WARPS: gl.constexpr = STREAMS.warps
    STAGES: gl.constexpr = STREAMS.ahead
    half: gl.constexpr = _ROWS // 2
    CHUNKS: gl.constexpr = (K + WARPS * _WIDTH - 1) // (WARPS * _WIDTH)
    BLOCKS: gl.constexpr = (I + half - 1) // half
    sums: gl.constexpr = sums_layout(half, WARPS)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if DEPENDENT:
        let_kernel_after_start()
    w_s = gl.allocate_shared_memory(gl.uint8, [STAGES, WARPS, 2, half, _WIDTH], _GATE_UP)
    full = barriers(STAGES)
    for stage in gl.static_range(STAGES):
        block = program + stage // CHUNKS * programs
        at = [stage % CHUNKS * WARPS, 0, block * half, 0]
        fetch(box, at, w_s.index(stage), full.index(stage), block < BLOCKS)
    scales = gate_up_scales(scale, 0, program, program < BLOCKS, I, CHUNKS, WARPS, STORED)
    if DEPENDENT:
        wait_for_kernel_before()
    square_s = copy_squares(square, tokens, NORM.sums, NORM.block, TOKENS, WARPS)
    async_copy.commit_group()
    x_s = token_memory(TOKENS, WARPS, CHUNKS)
    unit = keep_tokens(x_s, load_tokens(x, tokens, STRIDES.x, K, CHUNKS, TOKENS, WARPS), CHUNKS)
    async_copy.wait_group(0)
    gl.thread_barrier()
    factor = mean_root(square_s, eps, K, half, TOKENS, WARPS) * per_column(unit, half, TOKENS, WARPS)
    t = gl.arange(0, _COLUMNS, gl.SliceLayout(0, sums))
    stage = 0
    phase = 0
    for block in range(program, BLOCKS, programs):
        after = block + programs
        later_scales = gate_up_scales(scale, 0, after, after < BLOCKS, I, CHUNKS, WARPS, STORED)
        total = no_sums(WARPS)
        for chunk in gl.static_range(CHUNKS):
            total = add_products(
                total, w_s.index(stage), full.index(stage), phase, x_s.index(chunk), scales[chunk][:, :, None], WARPS,
                TOKENS,
            )  # fmt: skip
            gl.thread_barrier()
            ahead = block + (chunk + STAGES) // CHUNKS * programs
            at = [(chunk + STAGES) % CHUNKS * WARPS, 0, ahead * half, 0]
            fetch(box, at, w_s.index(stage), full.index(stage), ahead < BLOCKS)
            stage, phase = next_stage(stage, phase, STAGES)
        gate, up = gate_up_values(share(total, WARPS, _COLUMNS), WARPS)
        gate = gate * factor[None, :]
        value = gate / (1 + gl.exp(-gate)) * up * factor[None, :]
        f = block * half + gl.arange(0, half, gl.SliceLayout(1, sums))
        to = out + t.to(gl.int64)[None, :] * STRIDES.out + f[:, None]
        inside = (f < I)[:, None] & (t < tokens)[None, :]
        gl.store(to, value.to(out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
        scales = later_scales
