"""Decode attention for Hopper over FP8 entries where a program has many query vectors: the groups of `wide` work on
tiles in bfloat16, and eight more warps make these of FP8 entries (`widen`), once for all 64 query vectors.

Results are those of `wide` over what the entries are read as, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: SIM102 (a condition on compile-time constants must stay apart from one on run-time values)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.mla_decode.narrow_tile import unknown_zero
from kernels.mla_decode.split_kv import TILE, first_work_to_fetch, part_of, share_of, work_behind
from kernels.mla_decode.wide import fetch_queries, into_l2, wide_memory
from kernels.mla_decode.wide_groups import left_group, right_group
from kernels.mla_decode.widen import PIECE, QUARTERS, ROWS, first_pieces, widen_half

_INTS = ["first", "table_stride", "queries", "drafts", "heads", "blocks", "ctas"]


@gluon.jit
def numbers_of(page):
    """The numbers of a page's entries in the cache, [ROWS] for each quarter."""
    numbers = ()
    for quarter in gl.static_range(QUARTERS):
        own = page * TILE + (quarter * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, PIECE)))
        numbers = numbers + (own,)  # noqa: RUF005 - Gluon knows no stars
    return numbers


@gluon.jit
def fetch(
    cache, q_half, q_rope, rope, table, table_stride, share, fetched, ring,
    SIDE: gl.constexpr, ENTRY: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The four warps that fetch one side of every row of the CTA's share: of the tiles the left half (SIDE 0) or the
    right one with the roped features (1). Those of the left side fetch the queries, too."""
    EARLY: gl.constexpr = OVERLAP.dependent and OVERLAP.early
    PREFETCH: gl.constexpr = OVERLAP.stages
    BYTES: gl.constexpr = TILE * ENTRY.size
    work = first_work_to_fetch(share, EARLY)
    tiles = 0
    rows = 0
    while work.left > 0:
        part = part_of(work, share, SPLIT.unit, SPLIT.row_cost, SPLIT.invariant, "")
        start, stop = part.start, part.stop
        if stop > start:
            pages = table + work.row.to(gl.int64) * (table_stride + unknown_zero())
            if EARLY:
                # Older tiles were settled before the kernel before began; the newest may be its work.
                if (start + 1) * TILE >= part.tokens - share.drafts:
                    wait_for_kernel_before()
            page = gl.load(pages + start)
            loaded = first_pieces(cache, numbers_of(page), SIDE, ENTRY)
            if SIDE == 0:
                for distance in gl.static_range(1, PREFETCH):
                    if (start + distance < stop) & (share.block == 0):
                        into_l2(cache, gl.load(pages + start + distance), BYTES)
            if EARLY:
                wait_for_kernel_before()
            if SIDE == 0:
                mbarrier.wait(ring.q_empty, (rows & 1) ^ 1)
                fetch_queries(q_half, q_rope, work.row, share, fetched, ring)
                rows += 1
            for tile in range(start, stop):
                if SIDE == 0:
                    # Loaded here and used behind the tile, so that nothing waits for it.
                    told = gl.load(pages + gl.minimum(tile + PREFETCH, stop - 1))
                next_page = gl.load(pages + gl.minimum(tile + 1, stop - 1))
                numbers, following = numbers_of(page), numbers_of(next_page)
                if SIDE == 1:
                    buffer = tiles & 1
                    mbarrier.wait(ring.empty.index(2 + buffer), ((tiles >> 1) & 1) ^ 1)
                    mbarrier.expect(ring.full.index(2 + buffer), rope.block_type.nbytes)
                    tma.async_copy_global_to_shared(
                        rope, [page * TILE, ENTRY.rope // 2], ring.full.index(2 + buffer), fetched.rope.index(buffer)
                    )
                loaded = widen_half(cache, loaded, numbers, following, fetched, ring, tiles, SIDE, ENTRY, False)
                if SIDE == 0:
                    if (tile + PREFETCH < stop) & (share.block == 0):
                        into_l2(cache, told, BYTES)
                page = next_page
                tiles += 1
        work = work_behind(work, part)


@gluon.jit(do_not_specialize=_INTS)
def attend_wide_fp8(
    cache, q_half, q_rope, rope, table, length, out, lse, partial, partial_lse, metadata, scale, first,
    table_stride, queries, drafts, heads, blocks, ctas,
    ENTRY: gl.constexpr, SPLIT: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Variant of `kernel.attend` for FP8 entries of 512 latent features and 64 roped ones in bfloat16; four warps, the
    others come on top. There is no invariant mode of it. `q_half`, `q_rope`: see `wide.boxes`."""
    if OVERLAP.dependent and not OVERLAP.early:
        wait_for_kernel_before()
        let_kernel_after_start()
    # Not negative, which the compiler is to know: it would keep the sign in a register for every division.
    first &= 0x7FFFFFFF
    share = share_of(
        length, length, out, lse, partial, partial_lse, metadata, scale, first, queries, drafts, heads, ctas, blocks
    )
    fetched, exchanged, ring, messages = wide_memory(2)
    unit, row_cost, invariant = SPLIT.unit, SPLIT.row_cost, SPLIT.invariant
    dependent, early = OVERLAP.dependent, OVERLAP.early
    gl.warp_specialize(
        [
            (
                left_group,
                (share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early, True),
            ),
            (
                right_group,
                (share, fetched, exchanged, ring, messages, unit, row_cost, invariant, dependent, early, True),
            ),
            (
                fetch,
                (cache, q_half, q_rope, rope, table, table_stride, share, fetched, ring, 0, ENTRY, SPLIT, OVERLAP),
            ),
            (
                fetch,
                (cache, q_half, q_rope, rope, table, table_stride, share, fetched, ring, 1, ENTRY, SPLIT, OVERLAP),
            ),
        ],
        [4, 4, 4],
        [200, 48, 48],
    )
