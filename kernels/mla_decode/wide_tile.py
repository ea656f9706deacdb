"""Work of the two groups of `wide` on one tile: scores, weights, sums, results; and the layouts they share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import LN2, TILE, divisor_and_log, first_entry

BLOCK = gl.constexpr(64)
"""Query vectors a program holds."""
HALF_LATENT = gl.constexpr(256)
"""Latent columns of a group, of entries with 512 latent features."""
ROPE = gl.constexpr(64)
LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: below every real score."""
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""Shared-memory layout of every matrix."""


@gluon.constexpr_function
def output_layout(stored, half):
    """Layout of a group's sums, of `half` latent columns. Where eight more warps store tiles, a thread starts with 128
    registers, and ptxas takes no instruction that names more of them, so products have 128 columns there."""
    columns = 128 if stored else half
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


class Fetched(NamedTuple):
    """Shared memory that the fetching warp fills, in bfloat16: BUFFERS tiles, and HALF latent columns for each group
    (`wide_memory`). Whoever works on it reads both numbers off its shapes."""

    q: Any
    """[2, BLOCK, HALF]: the halves of the query's latent features."""
    q_rope: Any
    """[1, BLOCK, ROPE]."""
    kv: Any
    """[2 * BUFFERS, TILE, HALF]: left halves of the tiles, then right halves."""
    rope: Any
    """[BUFFERS, TILE, ROPE]; left puts the weights of a tile here that it has scored."""


class Ring(NamedTuple):
    """The mbarriers between the fetching warp and the groups."""

    q_full: Any
    q_empty: Any
    full: Any
    """[2 * BUFFERS, 1], as `Fetched.kv`; those of the right halves stand for the rope, too."""
    empty: Any
    """[2 * BUFFERS, 1]."""


class Exchanged(NamedTuple):
    """Shared memory through which the groups tell each other results. Vectors are fp32 [2, BLOCK], first left's, then
    right's."""

    weights: Any
    """bfloat16 [BLOCK, TILE]: right's weights."""
    top: Any
    """The maximum after a tile."""
    shrink: Any
    """The factor for what was summed before."""
    total: Any
    """The sum of the weights."""


class Messages(NamedTuple):
    """The mbarriers between the groups, see `wide`."""

    first: Any
    second: Any
    totals: Any
    """[2, 1]: of left, of right; or several of those."""


@gluon.constexpr_function
def turns_of(buffers):
    """How far the number of a tile is shifted for how often its buffer was filled before: log2 of the buffers."""
    return buffers.bit_length() - 1


@gluon.jit
def exchange_memory(ARRIVALS: gl.constexpr, BUFFERS: gl.constexpr, TURNS: gl.constexpr):
    """Shared memory and mbarriers between the fetching warps and the groups: `Exchanged`, `Ring` and `Messages`.
    Whoever fetches arrives ARRIVALS times when a part of a tile is there. BUFFERS: tiles that there is room for. TURNS:
    rows of which each group may have told its sum of weights while the other has still to read it."""
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    exchanged = Exchanged(
        weights=gl.allocate_shared_memory(gl.bfloat16, [BLOCK, TILE], TILED),
        top=gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector),
        shrink=gl.allocate_shared_memory(gl.float32, [2, BLOCK], vector),
        total=gl.allocate_shared_memory(gl.float32, [2 * TURNS, BLOCK], vector),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    first = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    second = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    totals = gl.allocate_shared_memory(gl.int64, [2 * TURNS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(first, count=1)
    mbarrier.init(second, count=1)
    for i in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2 * TURNS):
        mbarrier.init(totals.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    ring = Ring(q_full=q_full, q_empty=q_empty, full=full, empty=empty)
    return exchanged, ring, Messages(first=first, second=second, totals=totals)


@gluon.jit
def buffer_of(tiles, fetched):
    """Return the buffer of a tile, by the number of tiles before it."""
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    return tiles & (BUFFERS - 1)


@gluon.jit
def phase_of(tiles, fetched):
    """Return the phase in which that buffer is full of it."""
    TURNS: gl.constexpr = turns_of(fetched.rope.shape[0])
    return (tiles >> TURNS) & 1


@gluon.jit
def seen_entries(tokens, share):
    """Return the number of a row's entries that each query vector sees. It is computed anew for every row: there are no
    registers to keep what all rows have in common."""
    query = share.block * BLOCK + unknown_zero() + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    return gl.minimum(tokens - (share.drafts - query // share.heads), tokens)


@gluon.jit
def seen_own_entries(row, share):
    """`seen_entries` of a shard's own. They are loaded where they are needed: a register more would spill."""
    query = share.block * BLOCK + unknown_zero() + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    at = share.seen + row.to(gl.int64) * (share.drafts + 2) + query // share.heads
    return gl.load(at, mask=query < share.queries, other=0, cache_modifier=".cg")


@gluon.jit
def begins_or_ends_in(low, end, share, OWN: gl.constexpr):
    """Whether the entries before `end` begin or end inside of a tile. A shard's own begin inside their first tile."""
    begins = low < share.first
    if OWN:
        begins = low == 0
    return (low + TILE > end) | begins


@gluon.jit
def without_outside(values_s, low, row, tokens, share, OWN: gl.constexpr):
    """Zero the rows of a tile's half that lie outside the row's entries: 0 x NaN is NaN."""
    first = first_entry(row, share, OWN)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for i in gl.static_range(TILE // 16):
        part = values_s.slice(i * 16, 16, dim=0)
        entry = low + i * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        keep = (entry >= first) & (entry < tokens)
        part.store(gl.where(keep[:, None], part.load(layout), 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def until_there(barrier, phase, STORED: gl.constexpr):
    """Wait for a part of a tile. STORED: threads have written it, which products see behind a fence; of those threads
    one would wait for whatever they are loading."""
    mbarrier.wait(barrier, phase)
    if STORED:
        fence_async_shared()


@gluon.jit
def begin_scores(fetched, full, buffer, phase, STORED: gl.constexpr):
    """Begin the products of the queries with one tile, with each of its halves once that is there."""
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    score = gl.zeros([BLOCK, TILE], gl.float32, SCORES)
    zero = unknown_zero()
    until_there(full.index(buffer), phase, STORED)
    score = warpgroup_mma(
        fetched.q.index(zero), fetched.kv.index(buffer).permute((1, 0)), score, use_acc=False, is_async=True
    )
    until_there(full.index(BUFFERS + buffer), phase, STORED)
    score = warpgroup_mma(
        fetched.q.index(zero + 1), fetched.kv.index(BUFFERS + buffer).permute((1, 0)), score, is_async=True
    )
    return warpgroup_mma(fetched.q_rope.index(zero), fetched.rope.index(buffer).permute((1, 0)), score, is_async=True)


@gluon.jit
def weigh(score, top, share, row, low, sure, bound, OWN: gl.constexpr):
    """Online softmax of one tile: (weights, new maximum, factor for what was summed before)."""
    scale = share.scale
    if begins_or_ends_in(low, sure, share, OWN):
        first = first_entry(row, share, OWN)
        if OWN:
            bound = seen_own_entries(row, share)
        entry = low + gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
        seen = (entry[None, :] < bound[:, None]) & (entry >= first)[None, :]
        score = gl.where(seen, score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    shrink = gl.exp2(top - new_top)
    return gl.exp2(score * scale - new_top[:, None]), new_top, shrink


@gluon.jit
def scaled(sums, factor):
    """Multiply each query's sums by its factor."""
    per_query: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return sums * gl.convert_layout(factor, per_query, assert_trivial=True)[:, None]


@gluon.jit
def as_left_operand(weight, sums):
    """Weights as the left side of a product with values that is added to `sums`: the same registers."""
    return gl.convert_layout(weight, gl.DotOperandLayout(0, sums.type.layout, 2), assert_trivial=True)


@gluon.jit
def store_half(
    sums, total, top, share, fetched, q_empty, row, position, whole, at_start,
    HALF_INDEX: gl.constexpr, invariant,
):  # fmt: skip
    """Write one half of the latent columns, and with the left half the log-sum-exp."""
    HALF: gl.constexpr = fetched.kv.shape[2]
    divisor, log = divisor_and_log(total, top)
    sums = scaled(sums, 1.0 / divisor)
    # Through the shared memory of the query, which both groups are done with, so that a lane writes 16 bytes at a time.
    rows_of: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half_s = fetched.q.index(HALF_INDEX)
    half_s.store(sums.to(gl.bfloat16))
    gl.thread_barrier()
    result = half_s.load(rows_of)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(q_empty, count=1)
    zero = unknown_zero()
    m = share.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, rows_of)) + zero
    r = share.block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES)) + zero
    at_out = m[:, None] * (2 * HALF) + (HALF_INDEX * HALF + gl.arange(0, HALF, gl.SliceLayout(0, rows_of)))[None, :]
    inside = (m < share.queries)[:, None]
    if whole:
        base = row.to(gl.int64) * share.queries
        to = share.out + base * (2 * HALF) + at_out
        gl.store(to, result.to(share.out.dtype.element_ty), mask=inside, eviction_policy="evict_last")
        if HALF_INDEX == 0:
            gl.store(share.lse + base + r, log * LN2, mask=r < share.queries)
    else:
        slot = gl.where(at_start, share.ctas + share.cta, share.cta)
        if invariant:
            slot = position
        base = slot.to(gl.int64) * share.queries
        to = share.partial + base * (2 * HALF) + at_out
        gl.store(to, result.to(share.partial.dtype.element_ty), mask=inside, eviction_policy="evict_last")
        if HALF_INDEX == 0:
            gl.store(share.partial_lse + base + r, log, mask=r < share.queries)
