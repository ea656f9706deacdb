"""Index scores of INT8 keys on Hopper: products as in `kernels.sparse.scores`, by groups of four warps that take turns.

A fetching warp has the copy engine bring pages of keys, and their scales, into a ring in shared memory. Groups of four
warps multiply a page with the queries of some tokens each (64 keys are the rows, (token, head) pairs the columns), and
weigh and add up what came out while another group's products keep the tensor cores busy. Where a row has tokens enough
every group has tokens of its own and all read each page (`Groups.shared`), so that what is read of the cache serves
more of them; else all have the same tokens, and pages are dealt out among them. Groups that share pages may begin two
at once (`Groups.pairs`): then a group's own products keep the tensor cores busy while it weighs those of the page
before.

Gluon, for compute capability 9.0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.index_entry import SCALE_BYTES
from kernels.page import PAGE_TOKENS

FEATURES = 128
"""Features of a key."""
LINES = PAGE_TOKENS * (FEATURES + SCALE_BYTES) // FEATURES
"""Lines of 128 bytes of a page: its keys, and two of scales."""
CODES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2))
SCALES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))
_PAGE = gl.constexpr(PAGE_TOKENS)
_FEATURES = gl.constexpr(FEATURES)
_LINES = gl.constexpr(LINES)
_SCALE_LINES = gl.constexpr(LINES // 2)


class Groups(NamedTuple):
    """Division of a launch's work: one constant of it."""

    heads: int
    """Heads of the indexer, a power of two."""
    tokens: int
    """Tokens of a group, a power of two."""
    groups: int
    """Groups of four warps, 2 or 3; 2 with `pairs`."""
    shared: bool
    """Whether groups have tokens of their own and share pages; else they have the same tokens and share them out."""
    stages: int
    """Pages in the ring."""
    pairs: bool = False
    """Whether a group begins the products of two pages at once, and weighs those of one while the other's are under
    way. Only where groups share pages."""

    @property
    def of_program(self) -> int:
        """Tokens of a program."""
        return self.tokens * (self.groups if self.shared else 1)


class Ring(NamedTuple):
    """Shared memory of a program."""

    q: Any
    """Queries [groups, columns, 128]."""
    key: Any
    """[stages, 64, 128]."""
    scale: Any
    """[stages, 1, 64]."""
    q_full: Any
    full: Any
    empty: Any


class Tile(NamedTuple):
    """The tokens of a program: rows and bounds, one number each."""

    first: Any
    count: Any
    row: Any
    sees: Any


def boxes(q_THD: Tensor, index_PKE: Tensor, columns: int) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors: of `columns` query vectors, of a page's keys, and of its scales. The cache is contiguous."""
    page = index_PKE.view(-1)
    key = page.view(torch.int8).view(-1, FEATURES)
    scale = page.view(torch.float32).view(-1, PAGE_TOKENS)
    query = q_THD.view(-1, FEATURES)
    return (
        TensorDescriptor.from_tensor(query, [columns, FEATURES], CODES.value),
        TensorDescriptor.from_tensor(key, [PAGE_TOKENS, FEATURES], CODES.value),
        TensorDescriptor.from_tensor(scale, [1, PAGE_TOKENS], SCALES.value),
    )


@gluon.constexpr_function
def sums_layout(columns):
    """Layout of the products of a page with so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.constexpr_function
def registers_of(groups):
    """Registers of a thread that multiplies, of two groups: by the products that it holds."""
    return 216 if groups.pairs else 168


@gluon.jit
def of_token(values, turn, TOKENS: gl.constexpr):
    """The number of token `turn` of a tuple."""
    found = values[0]
    for token in gl.static_range(1, TOKENS):
        found = gl.where(turn == token, values[token], found)
    return found


@gluon.jit
def turn_of(tile, turn, TOKENS: gl.constexpr):
    """Return, for token `turn`, its row and the number of keys that its row's tokens see; 0 where an earlier one of its
    row had its turn."""
    own = of_token(tile.row, turn, TOKENS)
    longest = of_token(tile.sees, turn, TOKENS)
    seeing = longest > 0
    for token in gl.static_range(TOKENS):
        alike = (tile.row[token] == own) & (tile.sees[token] > 0)
        longest = gl.where(alike, gl.maximum(longest, tile.sees[token]), longest)
        seeing = seeing & ((token >= turn) | (alike == 0))
    return own, gl.where(seeing, longest, 0)


@gluon.jit
def pages_of(longest, share, shares):
    """Return which of a row's pages are a program's, and how many are used."""
    used = (longest + _PAGE - 1) // _PAGE
    each = (used + shares - 1) // shares
    begin = share * each
    return begin, gl.minimum(begin + each, used), used


@gluon.jit
def tile_of(row, bound, tokens, width, tiles, rows, scores, GROUPS: gl.constexpr):
    """The program's tokens, and how many of their rows and bounds make no sense."""
    TOKENS: gl.constexpr = GROUPS.of_program
    tile = gl.program_id(1)
    first = tile // tiles * width + tile % tiles * TOKENS
    count = gl.minimum(gl.minimum(tile // tiles * width + width, tokens) - first, TOKENS)
    of_row = ()
    of_bound = ()
    out_of_bounds = count * 0
    for token in gl.static_range(TOKENS):
        own = gl.load(row + first + token, mask=token < count, other=0)
        sees = gl.load(bound + first + token, mask=token < count, other=0)
        wrong = (sees != 0) & ((own < 0) | (own >= rows) | (sees < 0) | (sees > scores))
        out_of_bounds += wrong.to(gl.int32)
        of_row = of_row + (own,)  # noqa: RUF005 - Gluon knows no stars
        of_bound = of_bound + (gl.where(wrong, 0, sees),)  # noqa: RUF005
    return Tile(first=first, count=count, row=of_row, sees=of_bound), out_of_bounds


@gluon.jit
def fetch(boxes, table, tile, pages, table_stride, fault, ring, GROUPS: gl.constexpr):
    """The fetching warp: queries, then the pages of every row of the tile."""
    TOKENS: gl.constexpr = GROUPS.of_program
    q_box, key_box, scale_box = boxes
    OWN: gl.constexpr = GROUPS.groups if GROUPS.shared else 1
    mbarrier.expect(ring.q_full, OWN * q_box.block_type.nbytes)
    for group in gl.static_range(OWN):
        vector = (tile.first + group * GROUPS.tokens) * GROUPS.heads
        tma.async_copy_global_to_shared(q_box, [vector, 0], ring.q_full, ring.q.index(group))
    stage = 0
    phase = 1
    for turn in range(tile.count):
        own, longest = turn_of(tile, turn, TOKENS)
        begin, end, used = pages_of(longest, gl.program_id(0), gl.num_programs(0))
        mine = table + own.to(gl.int64) * table_stride
        last = gl.maximum(used - 1, 0)
        # Four pages ahead: each is known by the time it is asked for.
        page_0 = gl.load(mine + gl.minimum(begin, last), mask=longest > 0, other=0)
        page_1 = gl.load(mine + gl.minimum(begin + 1, last), mask=longest > 0, other=0)
        page_2 = gl.load(mine + gl.minimum(begin + 2, last), mask=longest > 0, other=0)
        page_3 = gl.load(mine + gl.minimum(begin + 3, last), mask=longest > 0, other=0)
        for n in range(begin, end):
            page_4 = gl.load(mine + gl.minimum(n + 4, last))
            out_of_bounds = (page_0 < 0) | (page_0 >= pages)
            gl.atomic_add(fault, 1, mask=out_of_bounds, sem="relaxed")
            page = gl.where(out_of_bounds, 0, page_0)
            full = ring.full.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(full, key_box.block_type.nbytes + scale_box.block_type.nbytes)
            tma.async_copy_global_to_shared(key_box, [page * _LINES, 0], full, ring.key.index(stage))
            tma.async_copy_global_to_shared(
                scale_box, [page * (_LINES // 2) + _SCALE_LINES - 1, 0], full, ring.scale.index(stage)
            )
            page_0 = page_1
            page_1 = page_2
            page_2 = page_3
            page_3 = page_4
            stage = gl.where(stage + 1 == GROUPS.stages, 0, stage + 1)
            phase = gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def begin_page(queries, at, ring, GROUPS: gl.constexpr):
    """Begin the products of the queries with the page that is number `at` in the ring. Returns them, on their way, and
    the scales of its keys."""
    COLUMNS: gl.constexpr = GROUPS.tokens * GROUPS.heads
    SUMS: gl.constexpr = sums_layout(COLUMNS)
    stage = at % GROUPS.stages
    mbarrier.wait(ring.full.index(stage), at // GROUPS.stages & 1)
    products = gl.zeros([_PAGE, COLUMNS], gl.int32, SUMS)
    products = warpgroup_mma(ring.key.index(stage), queries, products, use_acc=False, is_async=True)
    return products, ring.scale.index(stage).reshape([_PAGE]).load(gl.SliceLayout(1, SUMS))


@gluon.jit
def hand_back(at, ring, GROUPS: gl.constexpr):
    """Hand back a page of the ring whose products are there."""
    gl.thread_barrier()
    mbarrier.arrive(ring.empty.index(at % GROUPS.stages), count=1)


@gluon.jit
def weigh_page(
    products, factor, page, n, own, w, score, tile, pages, score_stride, GROUPS: gl.constexpr, FIRST: gl.constexpr
):  # fmt: skip
    """Weigh a page's products, add up each token's, and write the scores of its keys; `n`: the page's place in its
    row."""
    TOKENS: gl.constexpr = GROUPS.tokens
    out_of_bounds = (page < 0) | (page >= pages)
    # Exact: integers, of at most 22 bits. Twice what is above 0, exactly, by a sum: conversions keep the pipe of maxima
    # busy, which is half as wide as that of sums.
    dot = products.to(gl.float32)
    dot = (dot + gl.abs(dot)) * w[None, :]
    sums = gl.sum(gl.reshape(dot, [_PAGE, TOKENS, GROUPS.heads]), 2)
    OWN: gl.constexpr = sums.type.layout
    k = n * _PAGE + gl.arange(0, _PAGE, gl.SliceLayout(1, OWN))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, OWN))
    seen = gl.zeros_like(token)
    for one in gl.static_range(TOKENS):
        sees = gl.where(tile.row[FIRST + one] == own, tile.sees[FIRST + one], 0)
        seen = gl.where(token == one, sees, seen)
    sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, OWN))[:, None]
    sums = gl.where(out_of_bounds, float("-inf"), sums)
    to = score + (tile.first + FIRST + token).to(gl.int64)[None, :] * score_stride + k[:, None]
    gl.store(to, sums, mask=k[:, None] < seen[None, :])


@gluon.jit
def score_group(
    weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Run one group of four warps: scores of its tokens, of its pages."""
    TOKENS: gl.constexpr = GROUPS.tokens
    ALL: gl.constexpr = GROUPS.of_program
    COLUMNS: gl.constexpr = TOKENS * GROUPS.heads
    SUMS: gl.constexpr = sums_layout(COLUMNS)
    FIRST: gl.constexpr = GROUP * TOKENS if GROUPS.shared else 0
    OFFSET: gl.constexpr = 0 if GROUPS.shared else GROUP
    STEP: gl.constexpr = 1 if GROUPS.shared else GROUPS.groups
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
    there = column < (tile.count - FIRST) * GROUPS.heads
    vector = ((tile.first + FIRST) * GROUPS.heads).to(gl.int64)
    # Half of it: products are of twice what is above 0.
    w = gl.load(weight + vector + column, mask=there, other=0.0, cache_modifier=".cg") * 0.5
    queries = ring.q.index(GROUP if GROUPS.shared else 0).permute((1, 0))
    mbarrier.wait(ring.q_full, 0)
    seen_pages = 0
    for turn in range(tile.count):
        own, longest = turn_of(tile, turn, ALL)
        begin, end, used = pages_of(longest, gl.program_id(0), gl.num_programs(0))
        mine = table + own.to(gl.int64) * table_stride
        last = gl.maximum(used - 1, 0)
        # A slot of the ring is one group's, whatever rows came before: who skipped a round of a slot would take the
        # phase of its barrier for the one before.
        first = begin + (OFFSET + STEP - seen_pages % STEP) % STEP
        page = gl.load(mine + gl.minimum(first, last), mask=longest > 0, other=0)
        if GROUPS.pairs:
            second = gl.load(mine + gl.minimum(first + 1, last), mask=longest > 0, other=0)
            pairs = gl.maximum(end - first, 0) // 2
            for pair in range(pairs):
                n = first + 2 * pair
                following = gl.load(mine + gl.minimum(n + 2, last))
                behind = gl.load(mine + gl.minimum(n + 3, last))
                at = seen_pages + (n - begin)
                products, factor = begin_page(queries, at, ring, GROUPS)
                more, factor_of_more = begin_page(queries, at + 1, ring, GROUPS)
                products = warpgroup_mma_wait(1, deps=(products,))
                hand_back(at, ring, GROUPS)
                weigh_page(products, factor, page, n, own, w, score, tile, pages, score_stride, GROUPS, FIRST)
                more = warpgroup_mma_wait(0, deps=(more,))
                hand_back(at + 1, ring, GROUPS)
                weigh_page(
                    more, factor_of_more, second, n + 1, own, w, score, tile, pages, score_stride, GROUPS, FIRST
                )  # fmt: skip
                page = following
                second = behind
            first += 2 * pairs
        for n in range(first, end, STEP):
            following = gl.load(mine + gl.minimum(n + STEP, last))
            at = seen_pages + (n - begin)
            products, factor = begin_page(queries, at, ring, GROUPS)
            products = warpgroup_mma_wait(0, deps=(products,))
            hand_back(at, ring, GROUPS)
            weigh_page(products, factor, page, n, own, w, score, tile, pages, score_stride, GROUPS, FIRST)
            page = following
        seen_pages += gl.maximum(end - begin, 0)


@gluon.jit(
    do_not_specialize=[
        "tokens",
        "width",
        "tiles",
        "rows",
        "pages",
        "scores",
        "table_stride",
        "score_stride",
    ],
    do_not_specialize_on_alignment=["table", "row", "bound", "fault"],
)
def score_pages_hopper(
    q_box, key_box, scale_box, weight, table, row, bound, score, fault,
    tokens, width, tiles, rows, pages, scores, table_stride, score_stride,
    GROUPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Variant of `kernels.sparse.scores.score_pages`: programs (share of the pages, tile of tokens), `tiles` for every
    `width` tokens. Boxes: see `boxes`. Four warps, those of the other groups and the fetching one come on top."""
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()
    COLUMNS: gl.constexpr = GROUPS.tokens * GROUPS.heads
    OWN: gl.constexpr = GROUPS.groups if GROUPS.shared else 1
    STAGES: gl.constexpr = GROUPS.stages
    ring = Ring(
        q=gl.allocate_shared_memory(gl.int8, [OWN, COLUMNS, _FEATURES], CODES),
        key=gl.allocate_shared_memory(gl.int8, [STAGES, _PAGE, _FEATURES], CODES),
        scale=gl.allocate_shared_memory(gl.float32, [STAGES, 1, _PAGE], SCALES),
        q_full=gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(ring.q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=OWN)
    fence_async_shared()
    gl.thread_barrier()
    tile, out_of_bounds = tile_of(row, bound, tokens, width, tiles, rows, scores, GROUPS)
    gl.atomic_add(fault, out_of_bounds.to(gl.int64), mask=(out_of_bounds > 0) & (gl.program_id(0) == 0), sem="relaxed")
    boxes = q_box, key_box, scale_box
    if GROUPS.groups == 3:
        gl.warp_specialize(
            [
                (score_group, (weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS, 0)),
                (score_group, (weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS, 1)),
                (score_group, (weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS, 2)),
                (fetch, (boxes, table, tile, pages, table_stride, fault, ring, GROUPS)),
            ],
            [4, 4, 1],
            [152, 152, 24],
        )
    else:
        gl.warp_specialize(
            [
                (score_group, (weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS, 0)),
                (score_group, (weight, table, score, tile, pages, table_stride, score_stride, ring, GROUPS, 1)),
                (fetch, (boxes, table, tile, pages, table_stride, fault, ring, GROUPS)),
            ],
            [4, 1],
            [registers_of(GROUPS), 24],
        )
