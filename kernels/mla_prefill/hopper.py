"""Ragged flash attention for Hopper: bfloat16, 128 + 64 or 64 + 64 features per key, 128 per value.

A program holds 128 queries of one row and head. Two groups of four warps have 64 each, and a softmax of their own; a
ninth warp fetches tiles of 128 keys by TMA into rings of two. The schedule is FlashAttention-3's (Shah et al., 2024)
for heads this wide: a group starts the scores of tile i, then the sum of tile i - 1, and its softmax of tile i runs
beside that sum. The groups run freely, so one's softmax also runs beside the other's products.

Tiles go from the last to the first, which puts what must be masked first: the row's end and, causally, the diagonal.
A tile may reach past the row's end, where anything may lie: scores there become -inf, and values there zero, because
0 x NaN is NaN. Both groups see every tile the program visits and hand every one of its keys back, also a group whose
queries see none of them or do not exist; a program without a tile waits for nothing. A tile of keys is fetched when
both groups have handed back the tile two before it, so nobody waits for what can only come later. Nothing depends on
the other rows: a row's result is the same alone and in any batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.mla_prefill import kernel

ROPE = gl.constexpr(64)
VALUE = gl.constexpr(128)
GROUP_QUERIES = gl.constexpr(64)
KEYS = gl.constexpr(128)
"""Keys of a tile. Two tiles of keys and values and the queries fill the shared memory."""
_LOWEST = gl.constexpr(-1.0e30)
"""Start of the running maximum: finite, so that exp2(-inf - lowest) is 0, and below every real score."""
_LN2 = gl.constexpr(0.6931471805599453)
SUMS = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
"""Registers of scores and of outputs, 64 x 128 each."""
TILED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
place = gluon.jit(kernel.place.fn)
part_of = gluon.jit(kernel.part_of.fn)


class Boxes(NamedTuple):
    """The TMA descriptors of a launch, see `attend_hopper`."""

    q: Any
    q_rope: Any
    k: Any
    k_rope: Any
    v: Any


class Fetched(NamedTuple):
    """Shared memory that the fetching warp fills, in bfloat16."""

    q: Any
    """[2, GROUP_QUERIES, NOPE]: of both groups; NOPE are the features of a key without its roped ones."""
    q_rope: Any
    """[2, GROUP_QUERIES, ROPE]."""
    k: Any
    """[2, KEYS, NOPE]: a ring, as all below."""
    k_rope: Any
    """[2, KEYS, ROPE]."""
    v: Any
    """[2, KEYS, VALUE]."""
    result: Any
    """[2, GROUP_QUERIES, VALUE]: for results of both groups; the queries', where these are as wide."""


class Ring(NamedTuple):
    """The mbarriers between the fetching warp and the groups: one for the queries, [2, 1] for the rings."""

    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def box(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """TMA descriptor of tokens by features, a token's heads laid end to end as its strides have them."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2] if x.ndim == 3 else x.shape[1]
    return TensorDescriptor(x, [x.shape[0], width], [x.stride(0), 1], [rows, columns], TILED.value)


@gluon.jit
def fetch(boxes, token, key, q_column, k_column, v_column, tiles, fetched, ring):
    """The fetching warp: the queries once, then keys a tile ahead of values, as the groups use them."""
    NOPE: gl.constexpr = fetched.q.shape[2]
    if tiles > 0:
        mbarrier.expect(ring.q_full, 2 * (boxes.q.block_type.nbytes + boxes.q_rope.block_type.nbytes))
        for group in gl.static_range(2):
            at = token + group * GROUP_QUERIES
            tma.async_copy_global_to_shared(boxes.q, [at, q_column], ring.q_full, fetched.q.index(group))
            tma.async_copy_global_to_shared(
                boxes.q_rope, [at, q_column + NOPE], ring.q_full, fetched.q_rope.index(group)
            )
        for i in range(tiles + 1):
            at = key + (tiles - 1 - i) * KEYS
            if i < tiles:
                stage = i & 1  # the rings have two places
                full = ring.k_full.index(stage)
                mbarrier.wait(ring.k_empty.index(stage), ((i >> 1) & 1) ^ 1)
                mbarrier.expect(full, boxes.k.block_type.nbytes + boxes.k_rope.block_type.nbytes)
                tma.async_copy_global_to_shared(boxes.k, [at, k_column], full, fetched.k.index(stage))
                tma.async_copy_global_to_shared(boxes.k_rope, [at, 0], full, fetched.k_rope.index(stage))
            if i > 0:
                stage = (i - 1) & 1
                full = ring.v_full.index(stage)
                mbarrier.wait(ring.v_empty.index(stage), (((i - 1) >> 1) & 1) ^ 1)
                mbarrier.expect(full, boxes.v.block_type.nbytes)
                tma.async_copy_global_to_shared(boxes.v, [at + KEYS, v_column], full, fetched.v.index(stage))


@gluon.jit
def start_scores(fetched, i, GROUP: gl.constexpr):
    """Start the products of a group's queries with tile i, which is there."""
    stage = i & 1  # the rings have two places
    score = gl.zeros([GROUP_QUERIES, KEYS], gl.float32, SUMS)
    score = warpgroup_mma(
        fetched.q.index(GROUP), fetched.k.index(stage).permute((1, 0)), score, use_acc=False, is_async=True
    )
    return warpgroup_mma(fetched.q_rope.index(GROUP), fetched.k_rope.index(stage).permute((1, 0)), score, is_async=True)


@gluon.jit
def hand_back(empty, i):
    """Say that all warps of the group are done with tile i."""
    gl.thread_barrier()
    mbarrier.arrive(empty.index(i & 1), count=1)


@gluon.jit
def masked(score, low, bound):
    """Scores of the tile that begins at key `low`, -inf from each query's bound on."""
    at = low + gl.arange(0, KEYS, gl.SliceLayout(0, SUMS))
    return gl.where(at[None, :] < bound[:, None], score, float("-inf"))


@gluon.jit
def weigh(score, top, scale):
    """Online softmax of one tile: (weights, new maximum, factor for what was summed before)."""
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    return gl.exp2(score * scale - new_top[:, None]), new_top, gl.exp2(top - new_top)


@gluon.jit
def as_left_operand(weight):
    """Rounded weights as the left side of a product with values: the same lanes hold them."""
    return gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def clear_values(value_s, count, cleared, GROUP: gl.constexpr):
    """Zero the values of a tile from key `count` on. Each group takes one half of the keys, then both go on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(KEYS // 32):
        part = value_s.slice(GROUP * (KEYS // 2) + i * 16, 16, dim=0)
        key = GROUP * (KEYS // 2) + i * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        part.store(gl.where((key < count)[:, None], part.load(layout), 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(cleared, count=1)
    mbarrier.wait(cleared, 0)


@gluon.jit
def attend_group(
    out, lse, scale, first, queries, token, keys, tiles, fetched, ring, cleared,
    STRIDES: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One group: the program's queries from GROUP * 64 on. `first`, `token`: the program's first query, in its row and
    among all."""
    first += GROUP * GROUP_QUERIES
    token += GROUP * GROUP_QUERIES
    m = gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, SUMS))
    seen = keys  # by every query of the group
    bound = keys + gl.zeros_like(m)
    if CAUSAL:
        seen = gl.minimum(first + 1 + keys - queries, keys)
        bound = gl.minimum(first + m + 1 + keys - queries, keys)
    top = gl.full([GROUP_QUERIES], _LOWEST, gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.zeros([GROUP_QUERIES], gl.float32, gl.SliceLayout(1, SUMS))
    sums = gl.zeros([GROUP_QUERIES, VALUE], gl.float32, SUMS)
    if tiles > 0:
        low = (tiles - 1) * KEYS
        mbarrier.wait(ring.q_full, 0)
        mbarrier.wait(ring.k_full.index(0), 0)
        score = start_scores(fetched, 0, GROUP)
        score = warpgroup_mma_wait(0, deps=(score,))
        hand_back(ring.k_empty, 0)
        weight, top, _ = weigh(masked(score, low, bound), top, scale)
        total = gl.sum(weight, 1)
        factor = as_left_operand(weight)
        if low + KEYS > keys:
            mbarrier.wait(ring.v_full.index(0), 0)
            clear_values(fetched.v.index(0), keys - low, cleared, GROUP)
        mbarrier.wait(ring.k_full.index(1), 0, pred=tiles > 1)
        for i in range(1, tiles):
            low -= KEYS
            score = start_scores(fetched, i, GROUP)
            before = (i - 1) & 1
            mbarrier.wait(ring.v_full.index(before), ((i - 1) >> 1) & 1)
            summing = warpgroup_mma(factor, fetched.v.index(before), sums, is_async=True)
            score = warpgroup_mma_wait(1, deps=(score,))
            hand_back(ring.k_empty, i)
            if CAUSAL:
                if low + KEYS > seen:
                    score = masked(score, low, bound)
            weight, top, shrink = weigh(score, top, scale)
            total = total * shrink + gl.sum(weight, 1)
            # Waiting here for the next keys, not where they are used, keeps the compiler from moving the wait for the
            # sum before the exponentials, which are to run beside it.
            mbarrier.wait(ring.k_full.index((i + 1) & 1), ((i + 1) >> 1) & 1, pred=i + 1 < tiles)
            sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
            hand_back(ring.v_empty, i - 1)
            sums = sums * shrink[:, None]
            factor = as_left_operand(weight)
        last = (tiles - 1) & 1
        mbarrier.wait(ring.v_full.index(last), ((tiles - 1) >> 1) & 1)
        summing = warpgroup_mma(factor, fetched.v.index(last), sums, is_async=True)
        sums, factor = warpgroup_mma_wait(0, deps=(summing, factor))
    divisor = gl.where(total > 0, total, 1.0)
    sums = sums * (1.0 / divisor)[:, None]
    inside = first + m < queries
    log = gl.where(total > 0, top + gl.log2(divisor), float("-inf"))
    gl.store(lse + token * STRIDES.lse_token + m * STRIDES.lse_token, log * _LN2, mask=inside)
    if out.dtype.element_ty == gl.bfloat16:
        # Through shared memory that the group alone has, so that a lane writes 16 bytes at a time.
        by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
        result_s = fetched.result.index(GROUP)
        result_s.store(sums.to(gl.bfloat16))
        gl.thread_barrier()
        r = gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, by_rows))
        c = gl.arange(0, VALUE, gl.SliceLayout(0, by_rows))
        at = out + token * STRIDES.out_token + (r[:, None] * STRIDES.out_token + c[None, :])
        gl.store(at, result_s.load(by_rows), mask=(first + r < queries)[:, None])
    else:
        c = gl.arange(0, VALUE, gl.SliceLayout(0, SUMS))
        at = out + token * STRIDES.out_token + (m[:, None] * STRIDES.out_token + c[None, :])
        gl.store(at, sums.to(out.dtype.element_ty), mask=inside[:, None])


@gluon.jit(do_not_specialize=["heads", "blocks", "pairs", "lse_part"])
def attend_hopper(
    q_box, q_rope_box, k_box, k_rope_box, v_box, cu_q, cu_k, out, lse, scale, heads, blocks, pairs,
    out_part, lse_part, NOPE: gl.constexpr, STRIDES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Variant of `kernel.attend` with 128 queries per program and four warps, to which five come. Boxes of `box`:
    queries 64 x NOPE and 64 x 64, keys 128 x NOPE, their roped part 128 x 64, values 128 x 128."""
    block, row, head = place(gl.program_id(0), blocks, pairs, heads)
    first = block * (2 * GROUP_QUERIES)
    begin_q = gl.load(cu_q + row)
    queries = gl.load(cu_q + row + 1) - begin_q
    begin_k = gl.load(cu_k + row)
    keys = gl.load(cu_k + row + 1) - begin_k
    if not CAUSAL:
        skipped, keys = part_of(keys, KEYS)
        begin_k += skipped
        out += gl.program_id(1).to(gl.int64) * out_part
        lse += gl.program_id(1).to(gl.int64) * lse_part
    end = keys
    if CAUSAL:
        end = gl.minimum(keys, gl.minimum(first + 2 * GROUP_QUERIES, queries) + keys - queries)
    tiles = gl.where(first < queries, (gl.maximum(end, 0) + KEYS - 1) // KEYS, 0)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP_QUERIES, NOPE], TILED)
    result_s = q_s
    if NOPE != VALUE:
        result_s = gl.allocate_shared_memory(gl.bfloat16, [2, GROUP_QUERIES, VALUE], TILED)
    fetched = Fetched(
        q=q_s,
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [2, GROUP_QUERIES, ROPE], TILED),
        k=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, NOPE], TILED),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], TILED),
        v=gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, VALUE], TILED),
        result=result_s,
    )
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    cleared = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(cleared, count=2)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()
    ring = Ring(q_full=q_full, k_full=k_full, k_empty=k_empty, v_full=v_full, v_empty=v_empty)
    boxes = Boxes(q=q_box, q_rope=q_rope_box, k=k_box, k_rope=k_rope_box, v=v_box)
    out += head * STRIDES.out_head
    lse += head
    token = (begin_q + first).to(gl.int64)
    gl.warp_specialize(
        [
            (
                attend_group,
                (
                    out, lse, scale, first, queries, token, keys, tiles, fetched, ring, cleared,
                    STRIDES, CAUSAL, 0,
                ),
            ),
            (
                attend_group,
                (
                    out, lse, scale, first, queries, token, keys, tiles, fetched, ring, cleared,
                    STRIDES, CAUSAL, 1,
                ),
            ),
            (
                fetch,
                (
                    boxes, begin_q + first, begin_k,
                    head * STRIDES.q_head, head * STRIDES.k_head, head * STRIDES.v_head, tiles, fetched, ring,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
