"""Work of the summing groups of `fp8`: products of weights and values, results.

Shape legend of comments: N entries of a tile, M query vectors, P = 64 pairs of features of a group of 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from kernels.mla_decode.fp8_tile import GROUPS, LATENT, PAIRS, column_halves, sums_layout
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import TILE

# A pair of one entry, then of the next: the even features of both, and the odd ones.
_VALUES = gl.constexpr(
    """
    {
    .reg .b16 low, high;
    .reg .b32 sorted;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)


@gluon.jit
def values_in_fp16(pair):
    """Pairs of e4m3, of neighbouring entries, in fp16: the even features, and the odd ones."""
    return gl.inline_asm_elementwise(_VALUES, "=r,=r,r", [pair], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def without_outside(latent_s, low, first, tokens):
    """Zero the entries of a group of features that lie outside the row's: 0 x NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    entry = low + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    keep = (entry >= first) & (entry < tokens)
    pairs = latent_s.load(layout)
    latent_s.store(gl.where(keep[:, None], pairs, gl.zeros_like(pairs)))


@gluon.jit
def add_values(sums, fetched, exchanged, stage, slot, WHICH_HALF: gl.constexpr, BLOCK: gl.constexpr):
    """`sums`, [P, M] of the even features of two groups and of the odd ones, and the products of their values with
    weights. While products run, the next entries become fp16."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PARTS: gl.constexpr = 2
    ENTRIES: gl.constexpr = TILE // PARTS
    even_sums, odd_sums = sums[0], sums[1]
    finished = ()
    before = ()
    for part in gl.static_range(2 * PARTS):
        g = 2 * WHICH_HALF + part // PARTS
        latent_s = fetched.latent.index(stage * GROUPS + g).slice(part % PARTS * ENTRIES, ENTRIES, dim=0)
        even, odd = values_in_fp16(latent_s.permute((1, 0)).load(LEFT))
        right = exchanged.weights.index(slot * GROUPS + g).slice(part % PARTS * ENTRIES, ENTRIES, dim=0)
        if part == PARTS:
            finished = even_sums, odd_sums
            even_sums, odd_sums = sums[2], sums[3]
        even_sums = warpgroup_mma(even, right, even_sums, is_async=True)
        odd_sums = warpgroup_mma(odd, right, odd_sums, is_async=True)
        if part == PARTS:
            even0, odd0, _, _ = warpgroup_mma_wait(2, deps=(finished[0], finished[1], before[0], before[1]))
            finished = even0, odd0
        elif part > 0:
            _, _ = warpgroup_mma_wait(2, deps=before)
        before = even, odd
    even_sums, odd_sums, _, _ = warpgroup_mma_wait(0, deps=(even_sums, odd_sums, before[0], before[1]))
    return finished[0], finished[1], even_sums, odd_sums


@gluon.jit
def store_pairs(to, even, odd, factor_s, share, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Write sums [P, M] of the even features of a group and of the odd ones, times the factor of each query vector,
    behind `to`, in bfloat16. OFFSET: the group's first feature. Of 16 query vectors at a time:
    addresses of more would spill registers."""
    if BLOCK == 32:
        _store_32(to, even, odd, factor_s, share, 0, OFFSET, BLOCK)
    else:
        _store_16(to, even, odd, factor_s, share, 0, OFFSET, BLOCK)


@gluon.jit
def _store_32(to, even, odd, factor_s, share, FIRST: gl.constexpr, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Store the results of 32 query vectors, from number FIRST of the block on."""
    evens, odds = column_halves(even), column_halves(odd)
    for i in gl.static_range(2):
        _store_16(to, evens[i], odds[i], factor_s, share, FIRST + 16 * i, OFFSET, BLOCK)


@gluon.jit
def _store_16(to, even, odd, factor_s, share, FIRST: gl.constexpr, OFFSET: gl.constexpr, BLOCK: gl.constexpr):
    """Store the results of 16 query vectors, from number FIRST of the block on."""
    own: gl.constexpr = sums_layout(16)
    per_query: gl.constexpr = gl.SliceLayout(0, own)
    factor = factor_s.slice(FIRST, 16, dim=0).load(per_query)[None, :]
    even = gl.convert_layout(even, own, assert_trivial=True) * factor
    odd = gl.convert_layout(odd, own, assert_trivial=True) * factor
    m = gl.arange(0, 16, per_query) + (share.block * BLOCK + FIRST + unknown_zero())
    c = OFFSET + 2 * gl.arange(0, PAIRS, gl.SliceLayout(1, own))
    inside = (m < share.queries)[None, :]
    at = to + ((m * LATENT)[None, :] + c[:, None])
    both = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )
    gl.store(at.to(gl.pointer_type(gl.int32)), both, mask=inside, eviction_policy="evict_last")
