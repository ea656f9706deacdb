"""What the scoring group of `fp8` does before it weighs: query vectors to shared memory, products with them.

Shape legend of comments: N entries of a tile, M query vectors, P = 64 pairs of features of a group of 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kernels.mla_decode.fp8_tile import GROUP, GROUPS, LATENT, PAIRS, ROPE, TILE, sums_layout
from kernels.mla_decode.narrow_tile import unknown_zero

# Two pairs of e4m3 become two numbers of fp16 each: exact.
_KEYS = gl.constexpr(
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
def keys_in_half(pair):
    """Pairs of e4m3 in fp16: of features 4 t and 4 t + 1 at t, then of features 4 t + 2 and 4 t + 3."""
    return gl.inline_asm_elementwise(_KEYS, "=r,=r,r", [pair], dtype=(gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def put_queries(q, row, share, queries, BLOCK: gl.constexpr):
    """Bring a row's block of query vectors to shared memory, in the form that `Queries` has. Those that the row does
    not have become zero."""
    VECTOR: gl.constexpr = LATENT + ROPE
    CHUNK: gl.constexpr = GROUP // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    m = gl.arange(0, BLOCK, gl.SliceLayout(1, layout)) + (share.block * BLOCK + unknown_zero())
    queries.back.store(gl.maximum(share.drafts - m // share.heads, 0))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    at = q + row.to(gl.int64) * share.queries * VECTOR + ((m * VECTOR)[:, None] + c[None, :])
    inside = (m < share.queries)[:, None]
    rope = gl.load(at + LATENT, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    # Roped features are scaled with the others, but for magnitudes 2^100 apart they must not grow beyond fp32.
    least = (gl.max(gl.abs(rope), 1).to(gl.int32, bitcast=True) >> 23) - 100
    peak = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, layout))
    for chunk in range(2 * GROUPS):
        part = gl.load(at + chunk * CHUNK, mask=inside, other=0.0, cache_modifier=".cg")
        peak = gl.maximum(peak, gl.max(gl.abs(part.to(gl.float32)), 1))
    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) >> 23, gl.maximum(least, 15))
    unit = ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    inverse = ((268 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    queries.unit.store(unit * share.scale)
    rope = gl.load(at + LATENT, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    queries.rope.store((rope * inverse).to(gl.bfloat16))
    for g in range(GROUPS):
        for i in gl.static_range(2):
            place = at + (2 * g + i) * CHUNK
            part = gl.load(place, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
            half = gl.reshape((part * inverse).to(gl.float16), [BLOCK, CHUNK // 4, 2, 2])
            first, second = gl.split(gl.permute(half, (0, 1, 3, 2)))
            first_s = queries.latent.index(2 * g).slice(i * CHUNK // 2, CHUNK // 2, dim=1)
            first_s.store(gl.reshape(first, [BLOCK, CHUNK // 2]))
            second_s = queries.latent.index(2 * g + 1).slice(i * CHUNK // 2, CHUNK // 2, dim=1)
            second_s.store(gl.reshape(second, [BLOCK, CHUNK // 2]))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def scores(queries, fetched, stage, BLOCK: gl.constexpr):
    """Products [N, M] of a tile with the query vectors, over their units.

    The products of a group of features are issued before those of the group before are waited for, and while they run
    the next group becomes fp16.
    """
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    nothing = gl.zeros([TILE, BLOCK], gl.float32, SUMS)
    scales = fetched.scales.index(stage)
    zero = unknown_zero()
    latest = warpgroup_mma(
        fetched.rope.index(stage), queries.rope.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    score = nothing
    before = ()
    for g in gl.static_range(GROUPS):
        first, second = keys_in_half(fetched.latent.index(stage * GROUPS + g).load(LEFT))
        finished = latest
        right, other = queries.latent.index(2 * g + zero), queries.latent.index(2 * g + 1 + zero)
        latest = warpgroup_mma(first, right.permute((1, 0)), nothing, use_acc=False, is_async=True)
        latest = warpgroup_mma(second, other.permute((1, 0)), latest, is_async=True)
        if g == 0:
            score = warpgroup_mma_wait(2, deps=(finished,))
        else:
            done, _, _ = warpgroup_mma_wait(2, deps=(finished, before[0], before[1]))
            score += done * scales.slice(g - 1, 1, dim=1).load(SUMS)
        before = (first, second)
    done, _, _ = warpgroup_mma_wait(0, deps=(latest, before[0], before[1]))
    return score + done * scales.slice(GROUPS - 1, 1, dim=1).load(SUMS)


@gluon.jit
def scores_in_place(queries, fetched, stage, BLOCK: gl.constexpr):
    """As `scores`, for so many query vectors that registers have place for one set of sums only. They are brought to
    each group's scale before its products are added, and roped features come last."""
    SUMS: gl.constexpr = sums_layout(BLOCK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDTH: gl.constexpr = PAIRS // 2
    scales = fetched.scales.index(stage)
    zero = unknown_zero()
    sums = gl.zeros([TILE, BLOCK], gl.float32, SUMS)
    scale = scales.slice(0, 1, dim=1).load(SUMS)
    largest = scale
    before = ()
    for g in gl.static_range(GROUPS):
        keys = fetched.latent.index(stage * GROUPS + g)
        for part in gl.static_range(2):
            first, second = keys_in_half(keys.slice(part * WIDTH, WIDTH, dim=1).load(LEFT))
            right = queries.latent.index(2 * g + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            other = queries.latent.index(2 * g + 1 + zero).slice(part * WIDTH, WIDTH, dim=1).permute((1, 0))
            if g > 0 and part == 0:
                done, _, _ = warpgroup_mma_wait(0, deps=(sums, before[0], before[1]))
                # With a scale so far below another one the sums would leave fp32, and what is added does not show.
                next_scale = gl.maximum(scales.slice(g, 1, dim=1).load(SUMS), largest * 2.0**-60)
                largest = gl.maximum(largest, next_scale)
                sums = done * (scale / next_scale)
                scale = next_scale
            sums = warpgroup_mma(first, right, sums, use_acc=g + part > 0, is_async=True)
            sums = warpgroup_mma(second, other, sums, is_async=True)
            if part > 0:
                _, _ = warpgroup_mma_wait(2, deps=(before[0], before[1]))
            before = (first, second)
    done, _, _ = warpgroup_mma_wait(0, deps=(sums, before[0], before[1]))
    sums = warpgroup_mma(fetched.rope.index(stage), queries.rope.permute((1, 0)), done * scale, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))
