"""The experts of one token with INT4 weights in groups of 32, on Hopper: bound by the time in which the weights are
read.

Nothing but inputs goes through shared memory: a lane asks for the weights of two rows, a group of 32 at a time (16
bytes), some steps ahead of what it multiplies, and every warp has its own 16 rows. So no warp waits for another but
where the inputs change, and those change rarely: a program takes the pieces of work (an expert of the token, block of
features) in a row.

One logical operation takes two numbers of a word that are 16 bits apart, a number and the one four later, into the
mantissas of two fp16 numbers; less an offset, and times the group's scale in fp16, they are exact: a scale has 8 bits,
a number less 8 has 3. Inputs are in fp16 as well, divided by a power of two (`kernels.halve`) that every program finds
while its first weights are on their way. So nothing is rounded but what the checkpoint has rounded; scales of 32 and
more, which are infinite in fp16, no checkpoint has.

Gluon, for compute capability 9.0.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.halve.kernel import unit_of
from kernels.linear.stream import let_kernel_after_start, wait_for_kernel_before
from kernels.matrix import GROUP

STEP = 256
"""Features that a warp multiplies at a time: 128 bytes of every row."""
COLUMNS = 8
"""Of a tile of the tensor cores."""
WARPS = 4
BLOCK = 16 * WARPS
"""Rows of weights that a program multiplies at a time."""
SCALE = 256.0
"""By which scales are multiplied before they are rounded to fp16: so those from 2^-22 to 31 are exact."""

_STEP = gl.constexpr(STEP)
_COLUMNS = gl.constexpr(COLUMNS)
_WARPS = gl.constexpr(WARPS)
_BLOCK = gl.constexpr(BLOCK)
_GROUP = gl.constexpr(GROUP)
_SCALE = gl.constexpr(SCALE)

_TO_HALVES = gl.constexpr(
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
"""Of eight numbers the four pairs that are 16 bits apart, times a scale: behind the exponent of 1024 a number is its
lowest bits, or 16 times itself; 1024 + 8 are taken off, or 64 + 8 of a sixteenth. (0x6408 is 1032, 0x2C00 1 / 16,
0xD480 -72.)"""


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
def inputs_layout():
    """Layout of the inputs of a step [8, 8, 32], the second dimension the same ones in every column of a tile."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0]] * 2, [], [8, COLUMNS, 32])


@gluon.jit
def weights_at(K: gl.constexpr, FEATURES: gl.constexpr, GATE: gl.constexpr, WARPS: gl.constexpr):
    """Where a thread's weights of a step are, in 16-bit units from the block's first row on; and their scales."""
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
def left_operand(words, scale, WARPS: gl.constexpr):
    """Weights times scales in fp16: [16 * WARPS, 256], in the order [two, eight of a group, pair, group of four,
    number]."""
    left: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 2)
    kinds: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    half = (scale.to(gl.float32) * _SCALE).to(gl.float16)
    half, words = gl.broadcast(half[:, :, :, None], words)
    a, b, c, d = gl.inline_asm_elementwise(
        _TO_HALVES, "=r,=r,=r,=r,r,r", [words, half], dtype=kinds, is_pure=True, pack=2
    )  # fmt: skip
    both = gl.join(gl.join(a, c), gl.join(b, d)).reshape(16 * WARPS, 2, 4, 4, 2, 4)
    both = both.permute((0, 1, 3, 5, 2, 4)).reshape(16 * WARPS, _STEP)
    return gl.convert_layout(both, left, assert_trivial=True)


@gluon.jit
def right_operand(step_s):
    """The inputs of a step, [256, 8], in every column the same."""
    right: gl.constexpr = gl.DotOperandLayout(1, products_layout(_WARPS), 2)
    layout: gl.constexpr = inputs_layout()
    tile = gl.expand_dims(step_s.load(gl.SliceLayout(1, layout)), 1)
    _, tile = gl.broadcast(gl.zeros([8, _COLUMNS, 32], gl.float16, layout), tile)
    tile = tile.reshape(8, _COLUMNS, 4, 4, 2).permute((0, 3, 2, 4, 1)).reshape(_STEP, _COLUMNS)
    return gl.convert_layout(tile, right, assert_trivial=True)


@gluon.jit
def stage(x, x_s, STEPS: gl.constexpr):
    """Halve the row at `x` into `x_s` [STEPS, 8, 32], in the order in which lanes read it: of 128 features the first 8
    of each of the four groups, then the next 8 of each and so on; of 8 a feature is beside the one four later, as
    numbers of INT4 come out of a word. The row's unit."""
    layout: gl.constexpr = gl.BlockedLayout([_STEP // (32 * _WARPS)], [32], [_WARPS], [0])
    feature = gl.arange(0, _STEP, layout)
    held = ()
    for step in gl.static_range(STEPS):
        # .cg: a dependent launch may find lines of an earlier kernel in L1.
        held = held + (gl.load(x + step * _STEP + feature, cache_modifier=".cg"),)
    most = gl.abs(held[0].to(gl.float32))
    for step in gl.static_range(1, STEPS):
        most = gl.maximum(most, gl.abs(held[step].to(gl.float32)))
    unit, inverse = unit_of(gl.max(most, 0))
    for step in gl.static_range(STEPS):
        half = (held[step].to(gl.float32) * inverse).to(gl.float16).reshape(2, 4, 4, 2, 4)
        x_s.index(step).store(half.permute((0, 2, 1, 4, 3)).reshape(8, 32))
    return unit


@gluon.jit
def expert_of(ids, pair, EXPERTS: gl.constexpr):
    """The expert of a pair, and whether it is one; 0 where it is none."""
    expert = gl.load(ids + pair, cache_modifier=".cg")
    valid = (expert >= 0) & (expert < EXPERTS)
    return gl.where(valid, expert, 0).to(gl.int64), valid


@gluon.jit
def product(
    x, data, scales, ids, out,
    GATE: gl.constexpr, CHOSEN: gl.constexpr, EXPERTS: gl.constexpr, K: gl.constexpr, FEATURES: gl.constexpr,
    AHEAD: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """GATE: out[i] = silu(gate[expert] . x) * (up[expert] . x) for every expert i of the token; otherwise
    out[i] = weight[expert] . x[i]. Rows of `x` have K features, those of `out` FEATURES."""
    STEPS: gl.constexpr = K // _STEP
    ROWS: gl.constexpr = 2 * FEATURES if GATE else FEATURES
    WIDTH: gl.constexpr = _BLOCK // 2 if GATE else _BLOCK
    BLOCKS: gl.constexpr = FEATURES // WIDTH
    layout: gl.constexpr = products_layout(_WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    at, scale_at = weights_at(K, FEATURES, GATE, _WARPS)
    x_s = gl.allocate_shared_memory(gl.float16, [STEPS, 8, 32], plain)
    r = gl.arange(0, _BLOCK, gl.SliceLayout(1, layout))
    n = gl.arange(0, _COLUMNS, gl.SliceLayout(0, layout))
    begin = gl.program_id(0) * (CHOSEN * BLOCKS) // gl.num_programs(0)
    end = (gl.program_id(0) + 1) * (CHOSEN * BLOCKS) // gl.num_programs(0)
    # The kernel before `down` is `gate_up`, which let it start only when the choice of experts was there.
    if DEPENDENT and GATE:
        wait_for_kernel_before()
        let_kernel_after_start()
    expert, valid = expert_of(ids, begin // BLOCKS, EXPERTS)
    row = expert * ROWS + begin % BLOCKS * WIDTH
    held = ()
    for j in gl.static_range(AHEAD):
        held = held + (asked(data, scales, row, j, at, scale_at, K),)
    if DEPENDENT and not GATE:
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
            staged = source
            gl.thread_barrier()
        after = gl.minimum(piece + 1, end - 1)
        later_expert, later_valid = expert_of(ids, after // BLOCKS, EXPERTS)
        later = later_expert * ROWS + after % BLOCKS * WIDTH
        total = gl.zeros([_BLOCK, _COLUMNS], gl.float32, layout)
        for step in range(0, STEPS, AHEAD):
            last = step + AHEAD >= STEPS
            next_row = gl.where(last, later, row)
            next_step = gl.where(last, 0, step + AHEAD)
            for j in gl.static_range(AHEAD):
                words, scale = held[0]
                weight = left_operand(words, scale, _WARPS)
                held = held[1:] + (asked(data, scales, next_row, next_step + j, at, scale_at, K),)
                total = mma_v2(weight, right_operand(x_s.index(step + j)), total)
        total = total * (unit / _SCALE)
        to = out + pair * FEATURES + piece % BLOCKS * WIDTH
        if GATE:
            gate, up = halves(total, _WARPS)
            where, _ = halves((r // 16 * 8 + r % 8)[:, None] + 0 * n[None, :], _WARPS)
            kept, _ = halves(((r >= 0)[:, None] & (n == 0)[None, :] & valid).to(gl.int32), _WARPS)
            value = gate / (1 + gl.exp(-gate)) * up
            gl.store(to + where, value.to(out.dtype.element_ty), mask=kept > 0, eviction_policy="evict_last")
        else:
            kept = (r >= 0)[:, None] & (n == 0)[None, :] & valid
            where = r[:, None] + 0 * n[None, :]
            gl.store(to + where, total.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")
        row, valid = later, later_valid


@gluon.jit
def halves(total, WARPS: gl.constexpr):
    """Of every warp's 16 rows the first eight, and the others."""
    return gl.split(total.reshape(WARPS, 2, 8, _COLUMNS).permute((0, 2, 3, 1)))
