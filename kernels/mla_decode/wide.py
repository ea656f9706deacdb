"""Decode attention for Hopper where `narrow` has too few query vectors per program: 64 per program, on wgmma.

Two groups of four warps share the work, a fifth fetches. 64 x 512 fp32 of output fill the registers of both groups,
so each holds one half of the latent columns: "left" the first 256, "right" the others. Cache tiles of 64 tokens are
scored in turns, by left the first, third and so on of a row, by right the others, so that one group's softmax runs
while the other group keeps the tensor cores busy (after FlashMLA's 2025 kernel, "seesaw"). Each multiplies the weights
of every tile, in their order, with its half of the values:

    left:   S0 = q K0'   softmax -> W0, a0   O = O a0 + W0 V0                            O = O a1 + W1 V1   S2 ...
    right:  S1 = q K1'                       O = O a0 + W0 V0  |  softmax -> W1, a1      O = O a1 + W1 V1   S3 ...

a0 and a1 shrink what was summed before. Messages between the groups are mbarriers: `first` (left's maximum, a0 and W0)
and `second` (right's maximum, a1 and W1). What stands on either side of | happens at once.

The ring has room for two tiles. Each group hands its half of a tile back as soon as it has multiplied it; the tile's
scores are done by then, as its weights were made of them. Left waits for the next tile to score when it holds nothing
more, so that nothing waits with it. Right begins its scores before it multiplies left's weights, so that the tensor
cores have them while left's softmax runs.

Of latents of 256 features each group holds 128 columns, in half as many registers, and the ring has room for four
tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon.dependent import hand_on, let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.schedule import PARTS_FIELD
from kernels.mla_decode.split_kv import CTA, TILE, first_work_to_fetch, part_of, share_of, work_behind
from kernels.mla_decode.wide_groups import left_group, right_group
from kernels.mla_decode.wide_tile import (
    BLOCK,
    HALF_LATENT,
    ROPE,
    TILED,
    Fetched,
    buffer_of,
    exchange_memory,
    phase_of,
)

_INTS = ["first", "table_stride", "queries", "drafts", "heads", "blocks", "ctas"]
_PARTS = gl.constexpr(PARTS_FIELD)


@gluon.constexpr_function
def buffers_of(latent):
    """Tiles that shared memory has room for beside the query vectors: as many bytes of either size of entries."""
    return 1024 // latent


@gluon.constexpr_function
def registers_of(latent):
    """Registers of a thread of the right group, by the sums that it holds."""
    return 240 if latent == 512 else 168


class Boxes(NamedTuple):
    """The TMA descriptors of a launch, see `attend_wide`."""

    q_half: Any
    q_rope: Any
    kv_half: Any
    kv_rope: Any


def boxes(x: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of a bfloat16 tensor of some latent features and 64 roped ones, its vectors laid end to end: 64 x
    half the latent and 64 x 64 elements."""
    vectors = x.reshape(-1, x.shape[-1])
    half = (x.shape[-1] - ROPE.value) // 2
    return tuple(TensorDescriptor.from_tensor(vectors, [64, width], TILED.value) for width in (half, ROPE.value))


@gluon.jit
def into_l2(cache, page, BYTES: gl.constexpr):
    """Ask for a whole page, of so many bytes, to be brought into the L2 cache."""
    instruction: gl.constexpr = """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
    }"""
    at = cache.to(gl.int64) + page.to(gl.int64) * BYTES
    size = unknown_zero() + BYTES
    gl.inline_asm_elementwise(instruction, "=r,l,r", [at, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fetch_queries(q_half, q_rope, row, share, fetched, ring):
    """Have the copy engine fetch a block of a row's query vectors. `q_half`, `q_rope`: see `boxes`."""
    HALF: gl.constexpr = fetched.q.shape[2]
    vector = row * share.queries + share.block * BLOCK
    mbarrier.expect(ring.q_full, 2 * q_half.block_type.nbytes + q_rope.block_type.nbytes)
    tma.async_copy_global_to_shared(q_half, [vector, 0], ring.q_full, fetched.q.index(0))
    tma.async_copy_global_to_shared(q_half, [vector, HALF], ring.q_full, fetched.q.index(1))
    tma.async_copy_global_to_shared(q_rope, [vector, 2 * HALF], ring.q_full, fetched.q_rope.index(0))


@gluon.jit
def fetch(cache, boxes, table, table_stride, share, fetched, ring, SPLIT: gl.constexpr, OVERLAP: gl.constexpr):
    """The fetching warp: the tiles and the queries of every row of the CTA's share."""
    EARLY: gl.constexpr = OVERLAP.dependent and OVERLAP.early
    PREFETCH: gl.constexpr = OVERLAP.stages
    BUFFERS: gl.constexpr = fetched.rope.shape[0]
    HALF: gl.constexpr = fetched.kv.shape[2]
    BYTES: gl.constexpr = TILE * (2 * HALF + ROPE) * 2
    work = first_work_to_fetch(share, EARLY)
    tiles = 0
    rows = 0
    while work.left > 0:
        part = part_of(work, share, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, "")
        start, stop = part.start, part.stop
        if stop > start:
            pages = table + work.row.to(gl.int64) * (table_stride + unknown_zero())
            page = gl.load(pages + start)
            for distance in gl.static_range(2, PREFETCH):
                if (start + distance < stop) & (share.block == 0):
                    into_l2(cache, gl.load(pages + start + distance), BYTES)
            for tile in range(start, stop):
                if PREFETCH:
                    if (tile + PREFETCH < stop) & (share.block == 0):
                        into_l2(cache, gl.load(pages + tile + PREFETCH), BYTES)
                next_page = gl.load(pages + gl.minimum(tile + 1, stop - 1))
                if EARLY:
                    # Older tiles were settled before the kernel before began; the newest may be its work.
                    if (tile + 1) * TILE >= part.tokens - share.drafts:
                        wait_for_kernel_before()
                buffer = buffer_of(tiles, fetched)
                phase = phase_of(tiles, fetched) ^ 1
                entry = page * TILE
                mbarrier.wait(ring.empty.index(buffer), phase)
                mbarrier.expect(ring.full.index(buffer), boxes.kv_half.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    boxes.kv_half, [entry, 0], ring.full.index(buffer), fetched.kv.index(buffer)
                )
                mbarrier.wait(ring.empty.index(BUFFERS + buffer), phase)
                mbarrier.expect(
                    ring.full.index(BUFFERS + buffer), boxes.kv_half.block_type.nbytes + boxes.kv_rope.block_type.nbytes
                )
                tma.async_copy_global_to_shared(
                    boxes.kv_half, [entry, HALF], ring.full.index(BUFFERS + buffer), fetched.kv.index(BUFFERS + buffer)
                )
                tma.async_copy_global_to_shared(
                    boxes.kv_rope, [entry, 2 * HALF], ring.full.index(BUFFERS + buffer), fetched.rope.index(buffer)
                )
                page = next_page
                tiles += 1
                if tile == start:
                    if EARLY:
                        wait_for_kernel_before()
                    mbarrier.wait(ring.q_empty, (rows & 1) ^ 1)
                    fetch_queries(boxes.q_half, boxes.q_rope, work.row, share, fetched, ring)
                    rows += 1
        work = work_behind(work, part)


@gluon.jit
def wide_memory(ARRIVALS: gl.constexpr, HALF: gl.constexpr = HALF_LATENT, BUFFERS: gl.constexpr = 2):
    """A program's shared memory, with its mbarriers ready: `Fetched`, `Exchanged`, `Ring` and `Messages`. Whoever
    fetches arrives ARRIVALS times when a part of a tile is there. BUFFERS, a power of two: tiles that there is room
    for."""
    fetched = Fetched(
        q=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, HALF], TILED),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK, ROPE], TILED),
        kv=gl.allocate_shared_memory(gl.bfloat16, [2 * BUFFERS, TILE, HALF], TILED),
        rope=gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, TILE, ROPE], TILED),
    )
    exchanged, ring, messages = exchange_memory(ARRIVALS, BUFFERS, 1)
    return fetched, exchanged, ring, messages


@gluon.jit
def wide_cta(
    cache, boxes, table, table_stride, share, LATENT: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr
):  # fmt: skip
    """One CTA's `Share`: its KV blocks of one or several rows, for one block of 64 queries. Waits, and lets the kernel
    after start, where `OVERLAP.early`."""
    fetched, exchanged, ring, messages = wide_memory(1, LATENT // 2, buffers_of(LATENT))
    # Under a name Gluon makes values of the running kernel of these constants. The groups' registers were measured with
    # that.
    unit, row_cost, invariant = SPLIT.unit, SPLIT.row_cost, SPLIT.invariant
    dependent, early = OVERLAP.dependent, OVERLAP.early
    OWN: gl.constexpr = SPLIT.own
    # Not a condition that is known not to hold: the compiler fails where a group needs less than is handed to it.
    PIECES: gl.constexpr = 1 if SPLIT.invariant else 0
    gl.warp_specialize(
        [
            (
                left_group,
                (
                    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
                    False, OWN, PIECES,
                ),
            ),
            (
                right_group,
                (
                    share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early,
                    False, OWN, PIECES,
                ),
            ),
            (fetch, (cache, boxes, table, table_stride, share, fetched, ring, SPLIT, OVERLAP)),
        ],
        [4, 1],
        [registers_of(LATENT), 32],
    )  # fmt: skip


@gluon.jit(do_not_specialize=_INTS)
def attend_wide(
    cache, q_half, q_rope, kv_half, kv_rope, table, length, seen, out, lse, partial, partial_lse, metadata,
    scale, first, table_stride, queries, drafts, heads, blocks,
    SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Variant of `kernel.attend` for 512 latent features or 256 and 64 roped ones in bfloat16; four warps, the others
    come on top.

    `q_half`, `q_rope`, `kv_half`, `kv_rope`: TMA descriptors of the query [vectors, LATENT + 64] and the cache
    [entries, LATENT + 64] with boxes of 64 x LATENT / 2 and 64 x 64. `OVERLAP.either`: works if the plan does not say
    that the row is short.
    """
    LATENT: gl.constexpr = 2 * kv_half.block_type.shape[1]
    if OVERLAP.dependent and not OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    works = True
    if OVERLAP.either:
        works = gl.load(metadata + gl.program_id(0) // blocks * CTA + _PARTS) == 1
    if works:
        ctas = gl.num_programs(0) // blocks
        share = share_of(
            length, seen, out, lse, partial, partial_lse, metadata, scale, first, queries, drafts, heads, ctas, blocks
        )
        boxes = Boxes(q_half=q_half, q_rope=q_rope, kv_half=kv_half, kv_rope=kv_rope)
        wide_cta(cache, boxes, table, table_stride, share, LATENT, SPLIT, OVERLAP)
    else:
        if OVERLAP.dependent and OVERLAP.early:
            hand_on()
