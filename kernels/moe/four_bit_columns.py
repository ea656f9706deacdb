"""Common parts of Hopper's kernels for few tokens with weights of four bits (`four_bit_single`, `four_bit_tiles`):
weights, in groups of 32, go from memory to registers and are multiplied there with inputs from shared memory.

A lane asks for the weights of two rows, a group of 32 at a time (16 bytes), some steps ahead of what it multiplies, and
every warp has its own 16 rows. So no warp waits for another but where the inputs change.

INT4: one logical operation takes two numbers of a word that are 16 bits apart, a number and the one four later, into
the mantissas of two fp16 numbers; less an offset, and times the group's scale in fp16, they are exact: a scale has 8
bits, a number less 8 has 3. Inputs are in fp16 as well, divided by a power of two (`kernels.fp16_scaled`). So nothing
is rounded but what the checkpoint has rounded. Scales of 32 and more would be infinite in fp16; the loader refuses
them.

MXFP4: the same two numbers become bf16, exactly (`e2m1`). So inputs stay as they are.

The columns of a tile of the tensor cores are pairs of a token and an expert, PAIRS of them; where these are fewer than
eight, the columns repeat them.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.matrix import GROUP
from kernels.moe import e2m1

STEP = 256
"""Features that a warp multiplies at a time: 128 bytes of every row."""
COLUMNS = 8
"""Columns of a tile of the tensor cores."""
SCALE = 256.0
"""Factor of scales before they are rounded to fp16: with it those from 2^-22 to 31 are exact."""

_STEP = gl.constexpr(STEP)
_COLUMNS = gl.constexpr(COLUMNS)
_GROUP = gl.constexpr(GROUP)
_SCALE = gl.constexpr(SCALE)

_TO_FP16_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 word, bits, place, sixteenth, offset;
    mov.b32 sixteenth, 0x2C002C00;
    mov.b32 offset, 0xD480D480;
    mov.b32 place, 0x64086408;
    lop3.b32 bits, $4, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 bits, bits, place;
    mul.rn.f16x2 $0, bits, $5;
    lop3.b32 bits, $4, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 bits, bits, sixteenth, offset;
    mul.rn.f16x2 $1, bits, $5;
    shr.u32 word, $4, 8;
    lop3.b32 bits, word, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 bits, bits, place;
    mul.rn.f16x2 $2, bits, $5;
    lop3.b32 bits, word, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 bits, bits, sixteenth, offset;
    mul.rn.f16x2 $3, bits, $5;
    }
    """
)
"""Conversion of eight numbers to the four pairs that are 16 bits apart, times a scale: behind the exponent of 1024 a
number is its lowest bits, or 16 times itself; 1024 + 8 are taken off, or 64 + 8 of a sixteenth. (0x6408 is 1032, 0x2C00
1 / 16, 0xD480 -72.)"""


@gluon.constexpr_function
def power_of_two(number):
    """The least that is no less."""
    return 1 << (number - 1).bit_length()


@gluon.constexpr_function
def products_layout(WARPS):
    """Layout of the products [16 * WARPS, 8]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def bytes_layout(WARPS):
    """Layout of the weights of a step [16 * WARPS, 2, 4, 8], each 16 bits: a lane has the groups of two rows whose
    number in the four is its own."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [8, 0, 0, 0]]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16 << bit, 0, 0, 0] for bit in range(WARPS.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16 * WARPS, 2, 4, 8])


@gluon.constexpr_function
def inputs_layout(PAIRS, WARPS):
    """Layout of the inputs of a step [8, 8 / PAIRS, PAIRS, 32], in every warp; those of a pair are the same in all its
    columns."""
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    lanes = [[0, 0, 0, 8], [0, 0, 0, 16]]
    lanes += [[0, 0, bit, 0] if bit < PAIRS else [0, bit // PAIRS, 0, 0] for bit in (1, 2, 4)]
    none = [[0, 0, 0, 0]] * (WARPS.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, none, [], [8, COLUMNS // PAIRS, PAIRS, 32])


@gluon.constexpr_function
def inputs_dtype(FORMAT):
    """Dtype in which inputs are multiplied with weights of a format."""
    return gl.float16 if FORMAT == "int4" else gl.bfloat16


@gluon.constexpr_function
def four_times(dtype):
    """The dtypes of four results."""
    return (dtype,) * 4


@gluon.constexpr_function
def factor_of(FORMAT):
    """Factor of the products with weights of a format."""
    return SCALE if FORMAT == "int4" else 1.0


@gluon.jit
def left_to_divide(square, row, inside, eps, FEATURES: gl.constexpr, PIECES: gl.constexpr, layout: gl.constexpr):
    """Compute the factor of a pending norm, 1 / sqrt(mean + eps), for each of `row` that is `inside`, from its PIECES
    sums of squares (`kernels.pending_norm`). `layout`: in which [rows, pieces] are read."""
    BLOCK: gl.constexpr = power_of_two(PIECES)
    piece = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    at = square + row[:, None] * PIECES + piece[None, :]
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    squares = gl.load(at, mask=inside[:, None] & (piece < PIECES)[None, :], other=0.0, cache_modifier=".cg")
    return gl.rsqrt(gl.sum(squares, 1) / FEATURES + eps)


@gluon.jit
def weights_at(K: gl.constexpr, FEATURES: gl.constexpr, GATE: gl.constexpr, WARPS: gl.constexpr):
    """Return the offsets of a thread's weights of a step, in 16-bit units from the block's first row on; and those of
    their scales."""
    tile: gl.constexpr = bytes_layout(WARPS)
    groups: gl.constexpr = gl.SliceLayout(3, tile)
    r = gl.arange(0, 16 * WARPS, gl.SliceLayout(1, gl.SliceLayout(2, groups)))
    # A thread has a gate row and its up row.
    row = r // 16 * 8 + r % 8 + r % 16 // 8 * FEATURES if GATE else r
    two = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, groups)))
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, groups)))
    part = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, tile))))
    group = two[None, :, None] * 4 + four[None, None, :]
    at = row[:, None, None] * (K // 4) + group * (_GROUP // 4)
    scale_at = row[:, None, None] * (K // _GROUP) + group
    return at[:, :, :, None] + part[None, None, None, :], scale_at


@gluon.jit
def asked(data, scales, row, step, at, scale_at, K: gl.constexpr):
    """Weights of a step of the block whose first row is `row`, and their scales."""
    words = gl.load(data + (row * (K // 4) + step * (_STEP // 4)) + at, eviction_policy="evict_first")
    scale = gl.load(scales + (row * (K // _GROUP) + step * (_STEP // _GROUP)) + scale_at)
    return words, scale


@gluon.jit
def left_operand(words, scale, FORMAT: gl.constexpr, WARPS: gl.constexpr):
    """Weights times scales in the inputs' dtype: [16 * WARPS, 256], in the order [two, eight of a group, pair, group of
    four, number]."""
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 2)
    kinds: gl.constexpr = four_times(inputs_dtype(FORMAT))
    convert: gl.constexpr = _TO_FP16_PAIRS if FORMAT == "int4" else e2m1.TO_BF16
    factor = (scale.to(gl.float32) * _SCALE).to(gl.float16) if FORMAT == "int4" else e2m1.factor(scale)
    factor, words = gl.broadcast(factor[:, :, :, None], words)
    a, b, c, d = gl.inline_asm_elementwise(
        convert, "=r,=r,=r,=r,r,r", [words, factor], dtype=kinds, is_pure=True, pack=2
    )  # fmt: skip
    both = gl.join(gl.join(a, c), gl.join(b, d)).reshape(16 * WARPS, 2, 4, 4, 2, 4)
    both = both.permute((0, 1, 3, 5, 2, 4)).reshape(16 * WARPS, _STEP)
    return gl.convert_layout(both, left, assert_trivial=True)


@gluon.jit
def right_operand(step_s, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """The inputs of a step, [256, 8], of `step_s` [8, PAIRS, 32]."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 2)
    layout: gl.constexpr = inputs_layout(PAIRS, WARPS)
    tile = gl.expand_dims(step_s.load(gl.SliceLayout(1, layout)), 1)
    _, tile = gl.broadcast(gl.zeros([8, _COLUMNS // PAIRS, PAIRS, 32], step_s.dtype, layout), tile)
    tile = tile.reshape(8, _COLUMNS, 4, 4, 2).permute((0, 3, 2, 4, 1)).reshape(_STEP, _COLUMNS)
    return gl.convert_layout(tile, right, assert_trivial=True)


@gluon.jit
def multiplied(
    x_s, held, data, scales, row, later, exists, at, scale_at,
    FORMAT: gl.constexpr, K: gl.constexpr, PAIRS: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The products [16 * WARPS, 8] of the block whose first row is `row` and whose first AHEAD steps are `held`, times
    `factor_of`; and the first steps of the block at `later`, where it exists."""
    STEPS: gl.constexpr = K // _STEP
    total = gl.zeros([16 * WARPS, _COLUMNS], gl.float32, products_layout(WARPS))
    for step in range(0, STEPS, AHEAD):
        # Behind the last block the last steps are asked for once more, which a cache has, for want of others.
        last = step + AHEAD >= STEPS
        next_row = gl.where(last & exists, later, row)
        next_step = gl.where(last, gl.where(exists, 0, step), step + AHEAD)
        for j in gl.static_range(AHEAD):
            words, scale = held[0]
            weight = left_operand(words, scale, FORMAT, WARPS)
            held = held[1:] + (asked(data, scales, next_row, next_step + j, at, scale_at, K),)
            total = mma_v2(weight, right_operand(x_s.index(step + j), PAIRS, WARPS), total)
    return total, held


@gluon.jit
def row_halves(total, WARPS: gl.constexpr):
    """Split every warp's 16 rows into the first eight and the others."""
    return gl.split(total.reshape(WARPS, 2, 8, _COLUMNS).permute((0, 2, 3, 1)))
