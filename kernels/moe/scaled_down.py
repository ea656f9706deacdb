"""Down of one token's experts with FP8 weights on Hopper, with the weighted sum: as `scaled_single.down`, whose weights
are on their way before they are needed.

A program has a few features of the token and goes through its pairs. A thread asks for 16 bytes of weights of every
row, which lie side by side among the threads of a warp, and for their scales, AHEAD steps before it multiplies them;
for the first ones before the wait for `gate_up`, on which weights do not depend. It keeps sums of its own until all
pairs are added, so that no thread waits for another one before the end.

Gluon, for compute capability 9.0, which makes fp16 of two weights in FP8 with one instruction, exactly.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before

_BYTES = gl.constexpr(16)
_WORDS = gl.constexpr(4)

_NUMBERS = gl.constexpr(
    """
    {
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
    }
    """
)
"""Conversion of the four numbers of a word."""


@gluon.constexpr_function
def weights_layout(PIECES, WARPS):
    """Layout of words of weights [rows, pieces, 4]: the pieces of a row go to the lanes of a warp, then to warps."""
    lanes = min(32, PIECES)
    warps = min(WARPS, PIECES // lanes)
    return gl.BlockedLayout([1, 1, 4], [32 // lanes, lanes, 1], [WARPS // warps, warps, 1], [2, 1, 0])


@gluon.jit
def expert_of(ids, pair, there, EXPERTS: gl.constexpr):
    """The expert of a pair, -1 where it has none."""
    expert = gl.load(ids + pair, mask=there, other=-1, cache_modifier=".cg")
    return gl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@gluon.jit
def weights_of(
    data, scales, expert, feature, k, K: gl.constexpr, FEATURES: gl.constexpr, STORED: gl.constexpr,
    PIECES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Ask for words [rows, pieces, 4] of an expert's weights from feature `k` on, and their scales [rows, pieces]; 0
    past the end, and where there is no expert. Of bytes, a loop would keep each in a register of its own."""
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    piece = k // _BYTES + gl.arange(0, PIECES, gl.SliceLayout(0, flat))
    word = gl.arange(0, _WORDS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    inside = gl.expand_dims((piece < K // _BYTES) & (expert >= 0), 0)
    at = gl.expand_dims(feature, 1) * (K // 4) + gl.expand_dims(piece, 0) * _WORDS
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
    words = gl.load(
        data + expert * (FEATURES * (K // 4)) + at, mask=gl.expand_dims(inside, 2), other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    line = scales + expert * (STORED.scale_rows * STORED.scales)
    scale_at = gl.expand_dims(feature // STORED.rows, 1) * STORED.scales
    scale_at += gl.expand_dims(piece * _BYTES // STORED.features, 0)
    return words, gl.load(line + scale_at, mask=inside, other=0)


@gluon.jit
def inputs_of(act, factor, pair, expert, k, K: gl.constexpr, PIECES: gl.constexpr, layout: gl.constexpr):
    """Ask for a pair's inputs from feature `k` on, four in bf16 to an element [pieces, 4], and for the pair's weight; 0
    where there is no expert."""
    inputs: gl.constexpr = gl.SliceLayout(0, layout)
    piece = k // _BYTES + gl.arange(0, PIECES, gl.SliceLayout(1, inputs))
    at = gl.expand_dims(piece, 1) * _WORDS + gl.expand_dims(gl.arange(0, _WORDS, gl.SliceLayout(0, inputs)), 0)
    inside = gl.expand_dims((piece < K // _BYTES) & (expert >= 0), 1)
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    four = gl.load(act + pair * (K // 4) + at, mask=inside, other=0, cache_modifier=".cg")
    return four, gl.load(factor + pair, mask=expert >= 0, other=0.0, cache_modifier=".cg")


@gluon.jit
def inputs_in_fp32(four):
    """The four inputs in bf16 of each element, with a dimension of weights' rows before the others."""
    low = four.to(gl.int32)
    high = (four >> 32).to(gl.int32)
    a = gl.expand_dims((low << 16).to(gl.float32, bitcast=True), 0)
    b = gl.expand_dims((low & -65536).to(gl.float32, bitcast=True), 0)
    c = gl.expand_dims((high << 16).to(gl.float32, bitcast=True), 0)
    d = gl.expand_dims((high & -65536).to(gl.float32, bitcast=True), 0)
    return a, b, c, d


@gluon.jit
def down(
    act, data, scales, ids, factor, before, out,
    BEFORE_STRIDE: gl.constexpr, OUT_STRIDE: gl.constexpr, COLUMNS: gl.constexpr, EXPERTS: gl.constexpr,
    K: gl.constexpr, FEATURES: gl.constexpr, ADD: gl.constexpr, STORED: gl.constexpr, BLOCK: gl.constexpr,
    PIECES: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """out[token] = the sum over its pairs of factor[pair] * down[expert] · act[pair], with ADD and before[token],
    rounded once. A step is a pair and PIECES times 16 of its K features.

    Ids are read before the wait: `gate_up` lets this kernel start only when they are there."""
    layout: gl.constexpr = weights_layout(PIECES, WARPS)
    flat: gl.constexpr = gl.SliceLayout(2, layout)
    BLOCKS: gl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    WIDTH: gl.constexpr = PIECES * _BYTES
    PARTS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    STEPS: gl.constexpr = COLUMNS * PARTS
    token = (gl.program_id(0) // BLOCKS).to(gl.int64)
    first = token * COLUMNS
    # The last block is moved back into the matrix: it computes some features that its neighbour computes as well.
    feature = gl.minimum(gl.program_id(0) % BLOCKS * BLOCK, FEATURES - BLOCK)
    feature += gl.arange(0, BLOCK, gl.SliceLayout(1, flat))
    experts = ()
    for j in gl.static_range(AHEAD + 1):
        experts = experts + (expert_of(ids, first + j // PARTS, j < STEPS, EXPERTS),)
    weights = ()
    for j in gl.static_range(AHEAD):
        weights = weights + (
            weights_of(data, scales, experts[j], feature, j % PARTS * WIDTH, K, FEATURES, STORED, PIECES, layout),
        )
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()
    inputs = ()
    for j in gl.static_range(AHEAD):
        inputs = inputs + (
            inputs_of(act, factor, first + j // PARTS, experts[j], j % PARTS * WIDTH, K, PIECES, layout),
        )
    expert = experts[AHEAD]
    sum = gl.zeros([BLOCK, PIECES], gl.float32, flat)
    for step in range(STEPS):
        pair = first + (step + AHEAD) // PARTS
        k = (step + AHEAD) % PARTS * WIDTH
        weights = weights + (weights_of(data, scales, expert, feature, k, K, FEATURES, STORED, PIECES, layout),)
        inputs = inputs + (inputs_of(act, factor, pair, expert, k, K, PIECES, layout),)
        after = step + AHEAD + 1
        expert = expert_of(ids, first + after // PARTS, after < STEPS, EXPERTS)
        words, scale = weights[0]
        four, weight = inputs[0]
        weights = weights[1:]
        inputs = inputs[1:]
        if scale.dtype == gl.uint8:
            scale = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        dtypes: gl.constexpr = (gl.float32, gl.float32, gl.float32, gl.float32)
        e, f, g, h = gl.inline_asm_elementwise(_NUMBERS, "=f,=f,=f,=f,r", [words], dtype=dtypes, is_pure=True, pack=1)
        a, b, c, d = inputs_in_fp32(four)
        sum += gl.sum(e * a + f * b + g * c + h * d, 2) * (scale * weight)
    total = gl.sum(sum, 1)
    if ADD:
        total += gl.load(before + token * BEFORE_STRIDE + feature, cache_modifier=".cg").to(gl.float32)
    gl.store(out + token * OUT_STRIDE + feature, total.to(out.dtype.element_ty))
