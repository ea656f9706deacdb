"""Work of `narrow` on one tile of FP8 entries, with eight warps: see `narrow_tile`, of which these are the parts.

Entries stay 8 bits on their way to shared memory, and in it. Two neighbouring features are taken as one number of 16
bits, so that tiles are read as those of bf16 are, the transposed ones included. In registers such a number becomes two
of bf16, which is exact: of the even features, and of the odd ones. Each half has products of its own.

The scales are not multiplied into the entries, which would have to be rounded again. Two warps have a group of features
for themselves, and its queries in their registers: they sum an entry's score over its features, and the sum is
multiplied by the group's scale in fp32. The weights, which are rounded to bf16 anyway, are multiplied before by the
scale of the group whose values they weigh, and the same two warps sum those. What warps hand to each other are scores
and weights.

Shape legend of comments: G = 4 groups, M query vectors, N entries, P = 64 pairs of features of a group.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

_LATENT = gl.constexpr(512)
_ROPE = gl.constexpr(64)
_GROUPS = gl.constexpr(4)
_PAIRS = gl.constexpr(64)
"""Pairs of features of a group."""
_SHARE = gl.constexpr(16)
"""Roped features of which the warps of a group sum the products."""
_UP = gl.constexpr(2.0**60)
_DOWN = gl.constexpr(2.0**-60)

# Exponent and mantissa of a byte move to where bf16 has them, which leaves a number 2^120 times too small, zero and
# subnormal numbers included. The even bytes of a word, then the odd ones.
#
# What they are multiplied with is made 2^60 times larger before, and the sums as much afterwards, which are fewer. In
# between numbers are as far from the limits of bf16 and fp32 as they were.
_WIDEN_PAIRS = gl.constexpr(
    """
    {
    .reg .b32 even, odd, sign;
    shl.b32 sign, $2, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 even, $2, 4;
    and.b32 even, even, 0x07F007F0;
    or.b32 $0, even, sign;
    and.b32 sign, $2, 0x80008000;
    shr.u32 odd, $2, 4;
    and.b32 odd, odd, 0x07F007F0;
    or.b32 $1, odd, sign;
    }
    """
)


class Shared(NamedTuple):
    """Shared memory beside that of tiles and queries."""

    scores: Any
    """fp32 [G, M, N]: of every group's features, scales included."""
    weights: Any
    """bf16 [G, M, N]: times every group's scale."""


class Held(NamedTuple):
    """A block of query vectors in registers, [G, M, features], 2^60 times as large but for the roped ones."""

    even: Any
    odd: Any
    rope: Any


@gluon.constexpr_function
def grouped_layout():
    """Layout of sums of mma.sync over eight warps: two have a group, side by side."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 2], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def side_by_side_layout():
    """Layout of the same sums of all groups, as `narrow` has scores: eight warps side by side."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1, 8], instr_shape=[1, 16, 8])


@gluon.jit
def widened_pairs(pair):
    """Pairs of e4m3 in bf16, exactly, times 2^-120: those of the even features, and of the odd ones. (NaN, with which a
    scale that is NaN, too, always goes, becomes 480.)"""
    return gl.inline_asm_elementwise(
        _WIDEN_PAIRS, "=r,=r,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def fp8_tiles(STAGES: gl.constexpr, TOKENS: gl.constexpr):
    """Rings of tiles: latents [stages, G, N, P], roped features [stages, G, N, 16], scales [stages, N, 1, G]."""
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    short: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    latent_s = gl.allocate_shared_memory(gl.int16, [STAGES, _GROUPS, TOKENS, _PAIRS], wide)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _GROUPS, TOKENS, _SHARE], short)
    scales_s = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, 1, _GROUPS], plain)
    return latent_s, rope_s, scales_s


@gluon.jit
def fp8_queries(BLOCK: gl.constexpr):
    """Allocate two places for query vectors: latents [2, 2 G, M, P], roped features [2, G, M, 16]."""
    wide: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    short: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    latent_s = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * _GROUPS, BLOCK, _PAIRS], wide)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [2, _GROUPS, BLOCK, _SHARE], short)
    return latent_s, rope_s


@gluon.jit
def fp8_shared(TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """Shared memory as `Shared` says."""
    by_4: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    by_8: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    return Shared(
        scores=gl.allocate_shared_memory(gl.float32, [_GROUPS, BLOCK, TOKENS], by_4),
        weights=gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, BLOCK, TOKENS], by_8),
    )


@gluon.jit
def _copy_rows(
    base, to, begin, low, high,
    COUNT: gl.constexpr, APART: gl.constexpr, PARTS: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """Start copying rows that lie APART from each other at `base`, in PARTS of so many FEATURES, to [PARTS, COUNT,
    FEATURES]. Rows of which the number, counted from `begin` on, is not in [low, high) become zero."""
    LANES: gl.constexpr = FEATURES // 8
    ROWS: gl.constexpr = max(1, 8 // LANES)
    by_part: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, ROWS, LANES], [1, gl.num_warps(), 1], [2, 0, 1])
    p = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, by_part)))
    n = gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, by_part)))
    c = gl.arange(0, FEATURES, gl.SliceLayout(0, gl.SliceLayout(1, by_part)))
    there = ((begin + n < high) & (begin + n >= low))[None, :, None]
    at = n[None, :, None] * APART + p[:, None, None] * FEATURES + c[None, None, :]
    async_copy.async_copy_global_to_shared(to, base + at, mask=there)


@gluon.jit
def copy_fp8_tile(at, latent_s, rope_s, scales_s, begin, low, high, TILE: gl.constexpr, ENTRY: gl.constexpr):
    """Start copying the tile of entries at `at`, the first of which has the number `begin`."""
    SIZE: gl.constexpr = ENTRY.size
    pairs = at.to(gl.pointer_type(gl.int16))
    keys = (at + ENTRY.rope).to(gl.pointer_type(gl.bfloat16))
    scales = (at + ENTRY.scales).to(gl.pointer_type(gl.float32))
    _copy_rows(pairs, latent_s, begin, low, high, TILE, SIZE // 2, _GROUPS, _PAIRS)
    _copy_rows(keys, rope_s, begin, low, high, TILE, SIZE // 2, _GROUPS, _SHARE)
    by_entry: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32, 1, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    n = gl.arange(0, TILE, gl.SliceLayout(1, gl.SliceLayout(2, by_entry)))
    g = gl.arange(0, _GROUPS, gl.SliceLayout(0, gl.SliceLayout(1, by_entry)))
    there = ((begin + n < high) & (begin + n >= low))[:, None, None]
    where = scales + n[:, None, None] * (SIZE // 4) + g[None, None, :]
    async_copy.async_copy_global_to_shared(scales_s, where, mask=there)


@gluon.jit
def copy_fp8_query(vectors, latent_s, rope_s, begin, count, BLOCK: gl.constexpr):
    """Start copying those of a row's `count` query vectors from number `begin` on; the first lies at `vectors`."""
    APART: gl.constexpr = _LATENT + _ROPE
    base = vectors + begin * APART
    _copy_rows(base, latent_s, begin, 0, count, BLOCK, APART, 2 * _GROUPS, _PAIRS)
    _copy_rows(base + _LATENT, rope_s, begin, 0, count, BLOCK, APART, _GROUPS, _SHARE)


@gluon.jit
def take_apart(latent_s, BLOCK: gl.constexpr):
    """Let the even features of every group of query vectors come before all odd ones, 2^60 times larger. They must be
    there for all warps, and are again behind another barrier."""
    HALF_PAIRS: gl.constexpr = _PAIRS // 2
    by_part: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    query = latent_s.load(by_part)
    even, odd = gl.split(gl.reshape(query, [2 * _GROUPS, BLOCK, HALF_PAIRS, 2]))
    gl.thread_barrier()
    latent_s.slice(0, _GROUPS, dim=0).store(_joined(even, BLOCK))
    latent_s.slice(_GROUPS, _GROUPS, dim=0).store(_joined(odd, BLOCK))


@gluon.jit
def _joined(half, BLOCK: gl.constexpr):
    """Join two parts with every second feature of 64 to those of 128, [G, M, P]."""
    parts = gl.permute(gl.reshape(half, [_GROUPS, 2, BLOCK, _PAIRS // 2]), (0, 2, 1, 3))
    return (gl.reshape(parts, [_GROUPS, BLOCK, _PAIRS]).to(gl.float32) * _UP).to(gl.bfloat16)


@gluon.jit
def hold(latent_s, rope_s):
    """Query vectors that were taken apart, see `Held`."""
    left_of: gl.constexpr = gl.DotOperandLayout(0, grouped_layout(), 2)
    return Held(
        even=latent_s.slice(0, _GROUPS, dim=0).load(left_of),
        odd=latent_s.slice(_GROUPS, _GROUPS, dim=0).load(left_of),
        rope=rope_s.load(left_of),
    )


@gluon.jit
def fp8_scores(held, latent_s, rope_s, scales_s, shared, BLOCK: gl.constexpr, TOKENS: gl.constexpr):
    """Products [M, N] of the query vectors with a tile's entries."""
    mma: gl.constexpr = grouped_layout()
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    together: gl.constexpr = side_by_side_layout()
    nothing = gl.zeros([_GROUPS, BLOCK, TOKENS], gl.float32, mma)
    rope = mma_v2(held.rope, rope_s.permute((0, 2, 1)).load(right_of), nothing)
    even, odd = widened_pairs(latent_s.permute((0, 2, 1)).load(right_of))
    latent = mma_v2(held.odd, odd, mma_v2(held.even, even, nothing))
    scale = scales_s.permute((2, 1, 0)).load(mma) * _UP
    shared.scores.store(latent * scale + rope)
    gl.thread_barrier()
    return gl.sum(shared.scores.load(together), 0)


@gluon.jit
def no_fp8_sums(BLOCK: gl.constexpr):
    """Sums of no values, [G, M, P]: of the even features, and of the odd ones."""
    mma: gl.constexpr = grouped_layout()
    nothing = gl.zeros([_GROUPS, BLOCK, _PAIRS], gl.float32, mma)
    return (nothing, nothing)


@gluon.jit
def added_fp8_values(sums, shrink, weight, latent_s, scales_s, shared):
    """`sums` times `shrink` [M], and weights [M, N] times a tile's values, 2^60 times too small."""
    mma: gl.constexpr = grouped_layout()
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    together: gl.constexpr = side_by_side_layout()
    of_all = gl.convert_layout(weight * _UP, gl.SliceLayout(0, together))[None, :, :]
    shared.weights.store((of_all * scales_s.permute((2, 1, 0)).load(together)).to(gl.bfloat16))
    shrink = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    even, odd = widened_pairs(latent_s.load(right_of))
    gl.thread_barrier()
    factor = shared.weights.load(left_of)
    return (mma_v2(factor, even, sums[0] * shrink), mma_v2(factor, odd, sums[1] * shrink))


@gluon.jit
def fp8_rows(sums, divisor, BLOCK: gl.constexpr):
    """Sums over `divisor` [M], in bf16: [M, 512]."""
    mma: gl.constexpr = grouped_layout()
    small = gl.convert_layout(divisor * _DOWN, gl.SliceLayout(0, gl.SliceLayout(2, mma)))[None, :, None]
    both = gl.join((sums[0] / small).to(gl.bfloat16), (sums[1] / small).to(gl.bfloat16))
    rows = gl.permute(gl.reshape(both, [_GROUPS, BLOCK, 2 * _PAIRS]), (1, 0, 2))
    return gl.reshape(rows, [BLOCK, _LATENT])
