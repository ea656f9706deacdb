"""Decode attention for Hopper over FP8 entries, on wgmma.

Entries stay 8 bits in memory and in shared memory. They are the left side of both products, and query vectors the right
one, of which a program holds a block of 16 or 32:

    scores  [64 entries, M]           = entries [64, 512 + 64] x query vectors
    results [512 features, M]        += entries, transposed [512, 64] x weights [64, M]

Scores are sums of products of e4m3, as the entries are. A query vector is cut into two parts for that, each of which
keeps four bits of significand: together as many as bfloat16 has. Of such sums Hopper's tensor cores keep 14 bits. So
scores are off by up to 2^-13 of what the lengths of the vectors allow, where e4m3 itself has taken far more from the
entries. Values become fp16, which is exact, on their way into registers, from where wgmma takes its left operand.

Three groups of four warps share the work, and one more warp fetches. One group scores tile after tile and hands weights
on; products of the next tile run while it weighs one. The other two sum the values of a half of the features each.

The four scales of an entry are multiplied into the sums of its scores, in fp32. On the side of values a scale is a
power of two, the entry's unit, times a ratio below 2 for each group of features. The unit goes into the weight before
the online softmax finds its maximum, so that weights in fp16 cannot leave its range, whatever the scales are; the sum
of weights takes it out again. The ratio is multiplied into the weights, which are few beside the values: each group of
features has weights of its own. Query vectors are divided by a power of two each, as those of `kernels.fp16_scaled`
are.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.fp8_groups import next_stage, scoring_group, summing_group
from kernels.mla_decode.fp8_tile import (
    CODES,
    GROUP,
    GROUPS,
    PAIRS,
    ROPE,
    SCALES,
    TILED,
    Exchanged,
    Fetched,
    Messages,
    Queries,
    slots_of,
    weights_layout,
)
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import TILE, first_work_to_fetch, part_of, share_of, work_behind

_INTS = ["first", "table_stride", "queries", "drafts", "heads"]


class Boxes(NamedTuple):
    """The TMA descriptors of a launch, see `attend_fp8`."""

    pairs: Any
    rope: Any
    scales: Any


def fp8_boxes(cache_PKE: Tensor) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of FP8 entries laid end to end: boxes of 64 entries and 128 bytes, of 128 bytes, and of 16."""
    entry_TE = cache_PKE.view(-1, cache_PKE.shape[-1])
    views = ((torch.int16, 64, TILED), (torch.bfloat16, 64, TILED), (torch.float32, 4, SCALES))
    pairs, rope, scales = (
        TensorDescriptor.from_tensor(entry_TE.view(dtype), [64, width], layout.value) for dtype, width, layout in views
    )
    return pairs, rope, scales


@gluon.jit
def fetch(
    boxes, table, table_stride, share, fetched, messages,
    ENTRY: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The fetching warp: the tiles of every row of the CTA's share."""
    EARLY: gl.constexpr = OVERLAP.dependent and OVERLAP.early
    BYTES: gl.constexpr = (
        GROUPS * boxes.pairs.block_type.nbytes + boxes.rope.block_type.nbytes + boxes.scales.block_type.nbytes
    )
    work = first_work_to_fetch(share, EARLY)
    stage = 0
    phase = 1
    while work.left > 0:
        part = part_of(work, share, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, "")
        start, stop = part.start, part.stop
        if stop > start:
            pages = table + work.row.to(gl.int64) * (table_stride + unknown_zero())
            page = gl.load(pages + start)
            for tile in range(start, stop):
                next_page = gl.load(pages + gl.minimum(tile + 1, stop - 1))
                if EARLY:
                    # Older tiles were settled before the kernel before began; the newest may be its work.
                    if ((tile + 1) * TILE >= part.tokens - share.drafts) | (tile + 1 == stop):
                        wait_for_kernel_before()
                entry = page * TILE
                mbarrier.wait(messages.empty.index(stage), phase)
                full = messages.full.index(stage)
                mbarrier.expect(full, BYTES)
                for g in gl.static_range(GROUPS):
                    latent = fetched.latent.index(stage * GROUPS + g)
                    tma.async_copy_global_to_shared(boxes.pairs, [entry, g * PAIRS], full, latent)
                tma.async_copy_global_to_shared(boxes.rope, [entry, ENTRY.rope // 2], full, fetched.rope.index(stage))
                tma.async_copy_global_to_shared(
                    boxes.scales, [entry, ENTRY.scales // 4], full, fetched.scales.index(stage)
                )
                page = next_page
                stage, phase = next_stage(stage, phase, OVERLAP.stages)
        work = work_behind(work, part)


@gluon.jit
def _mbarriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate and initialize COUNT mbarriers, [COUNT, 1]."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def fp8_memory(BLOCK: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A program's shared memory, with its mbarriers ready: `Fetched`, `Queries`, `Exchanged` and `Messages`. Whoever
    fetches arrives ARRIVALS times when a tile is there."""
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fetched = Fetched(
        latent=gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, TILE, PAIRS], TILED),
        rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, ROPE], TILED),
        scales=gl.allocate_shared_memory(gl.float32, [STAGES, TILE, GROUPS], SCALES),
    )
    queries = Queries(
        latent=gl.allocate_shared_memory(gl.float8e4nv, [GROUPS, 2 * BLOCK, GROUP], CODES),
        rope=gl.allocate_shared_memory(gl.bfloat16, [BLOCK, ROPE], TILED),
        unit=gl.allocate_shared_memory(gl.float32, [BLOCK], vector),
        back=gl.allocate_shared_memory(gl.int32, [BLOCK], vector),
    )
    exchanged = Exchanged(
        weights=gl.allocate_shared_memory(gl.float16, [slots_of(BLOCK) * GROUPS, TILE, BLOCK], weights_layout(BLOCK)),
        shrink=gl.allocate_shared_memory(gl.float32, [slots_of(BLOCK), BLOCK], vector),
        factor=gl.allocate_shared_memory(gl.float32, [BLOCK], vector),
    )
    messages = Messages(
        full=_mbarriers(STAGES, ARRIVALS),
        empty=_mbarriers(STAGES, 3),
        weights_full=_mbarriers(slots_of(BLOCK), 1),
        weights_empty=_mbarriers(slots_of(BLOCK), 2),
        factor_full=_mbarriers(1, 1).index(0),
        factor_empty=_mbarriers(1, 2).index(0),
    )
    fence_async_shared()
    gl.thread_barrier()
    return fetched, queries, exchanged, messages


@gluon.jit
def fp8_cta(
    q, boxes, table, table_stride, share,
    ENTRY: gl.constexpr, SPLIT: gl.constexpr, TILE_OF: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One CTA's `Share`: its units of one or several rows, for one block of query vectors. Waits, and lets the
    kernel after start, where `OVERLAP.early`."""
    BLOCK: gl.constexpr = TILE_OF.queries
    fetched, queries, exchanged, messages = fp8_memory(BLOCK, OVERLAP.stages, 1)
    gl.warp_specialize(
        [
            (scoring_group, (q, share, queries, fetched, exchanged, messages, BLOCK, SPLIT, OVERLAP)),
            (summing_group, (share, fetched, exchanged, messages, 0, BLOCK, SPLIT, OVERLAP)),
            (summing_group, (share, fetched, exchanged, messages, 1, BLOCK, SPLIT, OVERLAP)),
            (fetch, (boxes, table, table_stride, share, fetched, messages, ENTRY, SPLIT, OVERLAP)),
        ],
        [4, 4, 1],
        [136, 136, 24],
    )


@gluon.jit(do_not_specialize=_INTS)
def attend_fp8(
    q, pairs, rope, scales, table, length, seen, out, lse, partial, partial_lse, metadata, scale,
    first, table_stride, queries, drafts, heads,
    ENTRY: gl.constexpr, SPLIT: gl.constexpr, TILE_OF: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Variant of `kernel.attend` for FP8 entries of 512 latent features and 64 roped ones in bfloat16; four
    warps, the others come on top. Grid: CTAs times blocks.

    `pairs`, `rope`, `scales`: TMA descriptors of the cache, see `fp8_boxes`.
    """
    if OVERLAP.dependent and not OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    blocks = (queries + TILE_OF.queries - 1) // TILE_OF.queries
    ctas = gl.num_programs(0) // blocks
    share = share_of(
        length, seen, out, lse, partial, partial_lse, metadata, scale, first, queries, drafts, heads, ctas, blocks
    )
    boxes = Boxes(pairs=pairs, rope=rope, scales=scales)
    fp8_cta(q, boxes, table, table_stride, share, ENTRY, SPLIT, TILE_OF, OVERLAP)
