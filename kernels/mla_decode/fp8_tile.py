"""Work of the groups of `fp8` on one tile of FP8 entries: scores, weights, sums, results; and the layouts they share.

Shape legend of comments: N entries of a tile, M query vectors, P = 64 pairs of features of a group of 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.mla_decode.split_kv import TILE

LATENT = gl.constexpr(512)
ROPE = gl.constexpr(64)
GROUPS = gl.constexpr(4)
GROUP = gl.constexpr(128)
"""Features that share a scale."""
PAIRS = gl.constexpr(64)
"""Pairs of features of a group."""
LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: below every real score."""
LIFT = gl.constexpr(14.0)
"""Weights are 2^14 times as large, so that those down to 2^-28 keep all bits in fp16. With their ratios they stay below
2^15."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""Shared-memory layout of matrices whose rows are 64 numbers of 16 bits, or pairs of bytes."""
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
"""Shared-memory layout of matrices whose rows are 128 bytes."""
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))


class Fetched(NamedTuple):
    """Rings of tiles in shared memory, which the fetching warp fills."""

    latent: Any
    """Pairs of e4m3, int16 [stages x 4, N, P]: the groups of features one after the other."""
    rope: Any
    """bfloat16 [stages, N, 64]."""
    scales: Any
    """fp32 [stages, N, 4]."""


class Queries(NamedTuple):
    """A block of query vectors in shared memory, divided by a power of two each."""

    latent: Any
    """e4m3 [4, 2 M, 128]: of each group of features what four bits of significand keep of them, then the rest."""
    rope: Any
    """bfloat16 [M, 64]."""
    unit: Any
    """fp32 [M]: the powers of two, times the scale of scores."""
    back: Any
    """int32 [M]: how many of the row's tokens come after a vector's."""


class Exchanged(NamedTuple):
    """Shared memory through which the scoring group tells the others its results, the first two in S places each, see
    `slots_of`."""

    weights: Any
    """fp16 [S x 4, N, M]: those of each group of features, with the ratios of its scales to the entries' units."""
    shrink: Any
    """fp32 [S, M]: the factor for what was summed before."""
    factor: Any
    """fp32 [M]: with which a row's sums become its result."""


class Messages(NamedTuple):
    """The mbarriers between the warps."""

    full: Any
    """[stages, 1]: a tile is there."""
    empty: Any
    """[stages, 1]: all groups are done with it."""
    weights_full: Any
    """[S, 1]."""
    weights_empty: Any
    """[S, 1]."""
    factor_full: Any
    factor_empty: Any


@gluon.constexpr_function
def sums_layout(BLOCK):
    """Layout of sums of wgmma: 64 entries, or 64 pairs of features, by the query vectors of a block."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])


@gluon.constexpr_function
def code_sums_layout(BLOCK):
    """Layout of products of 8-bit numbers, 64 entries by the two parts of a block's query vectors."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BLOCK, 32])


@gluon.constexpr_function
def slots_of(BLOCK):
    """Places for the weights of a tile. With one the scoring group waits for the others before it writes them, but of
    32 query vectors two would leave room for a tile less, which costs more: tiles under way hide memory's latency."""
    return 2 if BLOCK == 16 else 1


@gluon.constexpr_function
def weights_layout(BLOCK):
    """Shared-memory layout of weights, [N, M] in fp16."""
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK, element_bitwidth=16, rank=2)


@gluon.jit
def column_halves(x):
    """The first half of columns, and the second, which a thread has both."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@gluon.jit
def load_scales(scales_s, BLOCK: gl.constexpr):
    """The scales of the entries of a tile, [N, 1] of each group of features."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    scales = ()
    for g in gl.static_range(GROUPS):
        scales = scales + (scales_s.slice(g, 1, dim=1).load(SUMS),)  # noqa: RUF005 - Gluon knows no stars
    return scales


@gluon.jit
def units_of(scales, low, first, tokens, BLOCK: gl.constexpr):
    """Return for every entry [N, 1] whether it is one of the row's, and its unit: the power of two at or below the
    largest of its scales, or rather that number's exponent in fp32. Outside of the row's entries the unit is 1."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    largest = gl.maximum(gl.maximum(scales[0], scales[1]), gl.maximum(scales[2], scales[3]))
    entry = low + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
    there = ((entry >= first) & (entry < tokens))[:, None]
    return there, gl.where(there, (largest.to(gl.int32, bitcast=True) >> 23) & 255, 127)


@gluon.jit
def inverse_of(exponent):
    """1 over the power of two that has this exponent in fp32."""
    return ((254 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def put_weights(weight, scales, there, exponent, weights, slot):
    """Write the weights for each group of features: times its scales over the entries' units."""
    inverse = inverse_of(exponent)
    for g in gl.static_range(GROUPS):
        ratio = gl.where(there, scales[g] * inverse, 0.0)
        weights.index(slot * GROUPS + g).store((weight * ratio).to(gl.float16))


@gluon.jit
def weigh(score, exponent, top, unit, back_s, low, first, tokens, share, BLOCK: gl.constexpr):
    """Online softmax of one tile, of weights that are times the entries' units: (weights, new maximum, factor for what
    was summed before)."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    score = score * unit[None, :] + (exponent - 127).to(gl.float32)
    if (low + TILE > tokens - share.drafts) | (low < first):
        bound = tokens - back_s.load(gl.SliceLayout(0, SUMS))
        entry = low + gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
        seen = (entry[:, None] < bound[None, :]) & (entry >= first)[:, None]
        score = gl.where(seen, score, float("-inf"))
    highest = gl.max(score, 0)
    new_top = gl.maximum(top, highest)
    return gl.exp2(score - (new_top - LIFT)[None, :]), new_top, gl.exp2(top - new_top)


@gluon.jit
def sums_in_threads(x, BLOCK: gl.constexpr):
    """[N, M] summed over entries as far as a thread holds them: [4, 8, M]."""
    return gl.sum(gl.reshape(x, [4, 2, 8, BLOCK]), 1)
