"""Work of Hopper's kernel of attention on one tile of entries, and its memory: see `wide`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from kernels.compressed.listing import RECORD_FIELDS
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import TILE
from kernels.mla_decode.wide_tile import BLOCK, SCORES, TILED, exchange_memory, scaled

HALF = gl.constexpr(256)
"""Features of a group."""
TURNED = gl.constexpr(HALF.value // 2)
"""Features, the last ones, among which those are that rope turns."""
LOG2E = gl.constexpr(1.4426950408889634)
RECORD = gl.constexpr(RECORD_FIELDS)


class Call(NamedTuple):
    """What the programs of a launch have in common: values of a running kernel."""

    listed: Any
    """Where entries lie, int32 [tokens, most]: see `kernels.compressed.listing`."""
    record: Any
    """int32 [tokens, RECORD]: see `kernels.compressed.listing`."""
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


class Item(NamedTuple):
    """What a program takes at a time: a block of a token's heads, or all heads of one or two tokens."""

    token: Any
    block: Any
    count: Any
    """Entries; 0: there is nothing to do."""
    shared: Any
    """The first so many are seen by both tokens."""
    firsts: Any
    """Those behind them, up to here, by the first one alone, the others by the second one."""
    tokens: Any


@gluon.jit
def item_of(call, step, PAIRS: gl.constexpr):
    """Return the item of a program's step. With PAIRS two steps are those of two neighbouring tokens."""
    shared, firsts, tokens = 0, 0, 1
    if PAIRS:
        token = 2 * (gl.program_id(0) + (step >> 1) * gl.num_programs(0)) + (step & 1)
        block = 0
    else:
        number = gl.program_id(0) + step * gl.num_programs(0)
        token, block = number // call.blocks, number % call.blocks
    there = token < call.tokens
    record = call.record + token.to(gl.int64) * RECORD
    count = gl.load(record, mask=there, other=0, cache_modifier=".cg")
    if PAIRS:
        shared = gl.load(record + 1, mask=there, other=0, cache_modifier=".cg")
        firsts = gl.load(record + 2, mask=there, other=0, cache_modifier=".cg")
        tokens = gl.load(record + 3, mask=there, other=1, cache_modifier=".cg")
    return Item(token=token, block=block, count=count, shared=shared, firsts=firsts, tokens=tokens)


@gluon.jit
def steps_of(call, PAIRS: gl.constexpr):
    """Return how many steps a program takes."""
    if PAIRS:
        return 2 * gl.cdiv((call.tokens + 1) // 2 - gl.program_id(0), gl.num_programs(0))
    return gl.cdiv(call.tokens * call.blocks - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def step_behind(step, item, PAIRS: gl.constexpr):
    """Return the step that follows: not that of a token which the item has."""
    if PAIRS:
        return step + item.tokens
    return step + 1


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
def weigh(score, top, call, item, low, PAIRS: gl.constexpr):
    """Online softmax of one tile, whose first entry is number `low`: (weights, new maximum, factor for what was summed
    before)."""
    scale = call.scale
    entry = low + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    if PAIRS:
        if low + TILE > item.shared:
            second = gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES)) >= call.heads
            of_second = (entry < item.shared) | ((entry >= item.firsts) & (entry < item.count))
            seen = gl.where(second[:, None], of_second[None, :], (entry < item.firsts)[None, :])
            score = gl.where(seen, score, float("-inf"))
    else:
        if low + TILE > item.count:
            score = gl.where((entry < item.count)[None, :], score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    shrink = gl.exp2(top - new_top)
    return gl.exp2(score * scale - new_top[:, None]), new_top, shrink


@gluon.jit
def turned_back(x, call, item, SIZES: gl.constexpr, PAIRS: gl.constexpr):
    """Turn the last features of x, [BLOCK, TURNED], by the opposite angles of each vector's token."""
    even, odd = gl.split(gl.reshape(x, [BLOCK, TURNED // 2, 2]))
    layout: gl.constexpr = even.type.layout
    angle = 2 * gl.arange(0, TURNED // 2, gl.SliceLayout(0, layout)) - (TURNED - SIZES.rope)
    turned = (angle >= 0)[None, :]
    angles = call.rotation + item.token.to(gl.int64) * SIZES.rotation
    if PAIRS:
        second = (gl.arange(0, BLOCK, gl.SliceLayout(1, layout)) >= call.heads) & (item.tokens > 1)
        at = angles + gl.expand_dims(second.to(gl.int32) * SIZES.rotation, 1) + angle[None, :]
        turned = turned & (gl.expand_dims(second, 1) | turned)
    else:
        at = angles + angle[None, :]
    cos = gl.load(at, mask=turned, other=1.0)
    sin = gl.load(at + 1, mask=turned, other=0.0)
    return gl.reshape(gl.join(even * cos + odd * sin, odd * cos - even * sin), [BLOCK, TURNED])


@gluon.jit
def store_half(
    sums, total, top, call, item, half_s, empty, SIDE: gl.constexpr, SIZES: gl.constexpr, PAIRS: gl.constexpr
):
    """Write one half of the output's features: left's (SIDE 0) or right's (1), of which the last are turned back. It
    goes through the memory of the token's last tile, `half_s`, which is handed back then."""
    per_query: gl.constexpr = gl.SliceLayout(1, SCORES)
    r = item.block * BLOCK + gl.arange(0, BLOCK, per_query)
    if PAIRS:
        r = gl.where(r >= call.heads, r - call.heads, r)
    logit = gl.load(call.sink + r, mask=r < call.heads, other=0.0) * LOG2E
    divisor = total + gl.exp2(logit - top)
    sums = scaled(sums, 1.0 / gl.where(divisor == 0.0, 1.0, divisor))
    if SIDE == 1:
        plain, roped = gl.split(gl.permute(gl.reshape(sums, [BLOCK, 2, TURNED]), (0, 2, 1)))
        half_s.slice(0, TURNED, dim=1).store(plain.to(gl.bfloat16))
        roped = turned_back(roped, call, item, SIZES, PAIRS)
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
    m = item.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, rows_of))
    feature = SIDE * HALF + gl.arange(0, HALF, gl.SliceLayout(0, rows_of))
    to = call.out + item.token.to(gl.int64) * call.heads * (2 * HALF)
    inside = m < call.heads * item.tokens
    gl.store(to + (m[:, None] * (2 * HALF) + feature[None, :]), result, mask=inside[:, None])


@gluon.jit
def wide_memory(ARRIVALS: gl.constexpr):
    """A program's shared memory, with its mbarriers ready: `Fetched`, `Exchanged`, `Ring` and `Messages`. Whoever
    fetches arrives ARRIVALS times when a half of a tile is there."""
    fetched = Fetched(
        q=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], TILED),
        kv=gl.allocate_shared_memory(gl.bfloat16, [4, TILE, HALF], TILED),
        weights=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, TILE], TILED),
    )
    exchanged, ring, messages = exchange_memory(ARRIVALS, 2, 2)  # left may be a token ahead
    return fetched, exchanged, ring, messages
