"""Work of Hopper's kernel of attention on one tile of entries, and its memory: see `wide`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.wide_tile import BLOCK, SCORES, TILE, TILED, Exchanged, Messages, Ring, scaled

HALF = gl.constexpr(256)
"""Features of a group."""
TURNED = gl.constexpr(HALF.value // 2)
"""Features, the last ones, among which those are that rope turns."""
LOG2E = gl.constexpr(1.4426950408889634)


class Call(NamedTuple):
    """What the programs of a launch have in common: values of a running kernel."""

    listed: Any
    """Where entries lie, int32 [tokens, most]: see `kernels.compressed.listing`."""
    count: Any
    """Entries of each token, int32."""
    sink: Any
    rotation: Any
    out: Any
    scale: Any
    """Of scores, with log2(e)."""
    tokens: Any
    heads: Any
    blocks: Any
    """Blocks of heads."""
    most: Any


class Fetched(NamedTuple):
    """Shared memory in bfloat16 that is read by products."""

    q: Any
    """[2, BLOCK, HALF]: the halves of the queries."""
    kv: Any
    """[4, TILE, HALF]: left halves of two tiles, then right halves. Of a token's last tile they carry its output."""
    weights: Any
    """[2, BLOCK, TILE]: weights of the tiles that left has scored, beside those tiles."""


@gluon.jit
def entries_of(call, item):
    """Return the number of entries of a token; an item is a block of its heads. There are none behind the last item."""
    there = item < call.tokens * call.blocks
    return gl.load(call.count + item // call.blocks, mask=there, other=0, cache_modifier=".cg")


@gluon.jit
def begin_scores(fetched, full, buffer, phase):
    """Begin the products of the queries with one tile, with each of its halves once that is there."""
    score = gl.zeros([BLOCK, TILE], gl.float32, SCORES)
    zero = unknown_zero()
    mbarrier.wait(full.index(buffer), phase)
    score = warpgroup_mma(
        fetched.q.index(zero), fetched.kv.index(buffer).permute((1, 0)), score, use_acc=False, is_async=True
    )
    mbarrier.wait(full.index(2 + buffer), phase)
    return warpgroup_mma(fetched.q.index(zero + 1), fetched.kv.index(2 + buffer).permute((1, 0)), score, is_async=True)


@gluon.jit
def weigh(score, top, scale, low, count):
    """Online softmax of one tile, whose first entry is number `low` of `count`: (weights, new maximum, factor for what
    was summed before)."""
    if low + TILE > count:
        entry = low + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        score = gl.where((entry < count)[None, :], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    shrink = gl.exp2(top - new_top)
    return gl.exp2(score * scale - new_top[:, None]), new_top, shrink


@gluon.jit
def turned_back(x, angles, ROPE: gl.constexpr):
    """Turn the last ROPE features of x, [BLOCK, TURNED], by the opposite angles of `angles`."""
    even, odd = gl.split(gl.reshape(x, [BLOCK, TURNED // 2, 2]))
    angle = 2 * gl.arange(0, TURNED // 2, gl.SliceLayout(0, even.type.layout)) - (TURNED - ROPE)
    cos = gl.load(angles + angle, mask=angle >= 0, other=1.0)[None, :]
    sin = gl.load(angles + angle + 1, mask=angle >= 0, other=0.0)[None, :]
    return gl.reshape(gl.join(even * cos + odd * sin, odd * cos - even * sin), [BLOCK, TURNED])


@gluon.jit
def store_half(sums, total, top, call, item, half_s, empty, SIDE: gl.constexpr, SIZES: gl.constexpr):
    """Write one half of the output's features: left's (SIDE 0) or right's (1), of which the last are turned back. It
    goes through the memory of the token's last tile, `half_s`, which is handed back then."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    token, block = item // call.blocks, item % call.blocks
    r = block * BLOCK + gl.arange(0, BLOCK, per_query)
    divisor = total + gl.exp2(gl.load(call.sink + r, mask=r < call.heads, other=0.0) * LOG2E - top)
    sums = scaled(sums, 1.0 / gl.where(divisor == 0.0, 1.0, divisor))
    if SIDE == 1:
        plain, roped = gl.split(gl.permute(gl.reshape(sums, [BLOCK, 2, TURNED]), (0, 2, 1)))
        roped = turned_back(roped, call.rotation + token.to(gl.int64) * SIZES.rotation, SIZES.rope)
        half_s.slice(0, TURNED, dim=1).store(plain.to(gl.bfloat16))
        half_s.slice(TURNED, TURNED, dim=1).store(roped.to(gl.bfloat16))
    else:
        half_s.store(sums.to(gl.bfloat16))
    gl.thread_barrier()
    # A lane writes 16 bytes at a time.
    rows_of: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    result = half_s.load(rows_of)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(empty, count=1)
    m = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, rows_of))
    feature = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, rows_of))
    to = call.out + token.to(gl.int64) * call.heads * (2 * HALF)
    gl.store(to + (m[:, None] * (2 * HALF) + feature[None, :]), result, mask=(m < call.heads)[:, None])


@gluon.jit
def wide_memory(ARRIVALS: gl.constexpr):
    """A program's shared memory, with its mbarriers ready: `Fetched`, `Exchanged`, `Ring` and `Messages`. Whoever
    fetches arrives ARRIVALS times when a half of a tile is there."""
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fetched = Fetched(
        q=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], TILED),
        kv=gl.allocate_shared_memory(gl.bfloat16, [4, TILE, HALF], TILED),
        weights=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, TILE], TILED),
    )
    exchanged = Exchanged(
        weights=gl.allocate_shared_memory(gl.bfloat16, [BLOCK, TILE], TILED),
        top=gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector),
        shrink=gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector),
        # Two of each group: left may be a token ahead of what right has still to read.
        total=gl.allocate_shared_memory(gl.float32, [4, BLOCK], vector),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    first = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    totals = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(totals.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    ring = Ring(q_full=q_full, q_empty=q_empty, full=full, empty=empty)
    return fetched, exchanged, ring, Messages(first=first, second=second, totals=totals)
