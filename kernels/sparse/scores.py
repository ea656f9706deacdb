"""Index keys and index scores in Triton.

Keys are the rows of the products and (token, head) pairs their columns, so that a key's NaN stays in its own scores:
what the last page holds behind a bound needs no mask. Sums over heads run along a row, which few threads hold.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.index_entry import rounded
from kernels.page import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)


class Indexer(NamedTuple):
    """Sizes of an indexer's heads, and layout of their entries: one constant of a launch."""

    heads: int
    head_lanes: int
    """Heads padded to a power of two."""
    features: int
    feature_lanes: int
    """Features padded to a power of two."""
    int8: bool
    page: int
    """Elements from one page of keys to the next."""
    scale_page: int
    """Elements from one page of scales to the next; in INT8 alone."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""
    keys: int = PAGE_TOKENS
    """Keys of a page: a power of two, 64 at most. Of fewer than 64, those of several pages are scored at a time."""


class TokenTile(NamedTuple):
    """Tokens that a program takes."""

    tokens: int
    lanes: int
    """Tokens padded to a power of two."""


@triton.jit(do_not_specialize=["tokens", "slots"], do_not_specialize_on_alignment=["slot"])
def write_keys(
    key, slot, index, scale, tokens, slots, KEY_STRIDE: tl.constexpr, INDEXER: tl.constexpr, TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs of TOKENS tokens. `scale`: where the scales of the first page lie, in INT8."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, INDEXER.feature_lanes)
    inside = token < tokens
    wanted = inside[:, None] & (d < INDEXER.features)[None, :]
    x = tl.load(
        key + token.to(tl.int64)[:, None] * KEY_STRIDE + d[None, :], mask=wanted, other=0.0, cache_modifier=".cg"
    )
    entry = tl.load(slot + token, mask=inside, other=-1)
    exists = (entry >= 0) & (entry < slots)
    page = entry // _PAGE
    place = entry % _PAGE
    at = index + (page * INDEXER.page + place * INDEXER.features)[:, None] + d[None, :]
    there = wanted & exists[:, None]
    if INDEXER.int8:
        code, own = rounded(x.to(tl.float32))
        tl.store(at, code, mask=there)
        tl.store(scale + page * INDEXER.scale_page + place, own, mask=exists)
    else:
        tl.store(at, x, mask=there)


@triton.jit
def page_scales(scale, page, pages, INDEXER: tl.constexpr):
    """Scales of a page's keys in INT8, past L1; 1 where there are none."""
    if INDEXER.int8:
        at = tl.where((page >= 0) & (page < pages), page, 0).to(tl.int64) * INDEXER.scale_page
        found = tl.load(scale + at + tl.arange(0, _PAGE), cache_modifier=".cg")
    else:
        found = tl.full((_PAGE,), 1.0, tl.float32)
    return found


@triton.jit
def page_at(mine, n, there, longest, KEYS: tl.constexpr):
    """The page of the n-th 64 keys of a row of `longest`, if they are there; of smaller pages each key's own, the null
    page behind the last one."""
    if KEYS == _PAGE:
        page = tl.load(mine + n, mask=there, other=0)
    else:
        key = n * _PAGE + tl.arange(0, _PAGE)
        page = tl.load(mine + key // KEYS, mask=there & (key < longest), other=0)
    return page


_INTS = ["tokens", "width", "tiles", "rows", "pages", "scores", "table_stride", "score_stride", "weight_stride"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=["table", "row", "bound", "fault"])
def score_pages(
    q,
    weight,
    index,
    scale,
    table,
    row,
    bound,
    score,
    fault,
    tokens,
    width,
    tiles,
    rows,
    pages,
    scores,
    table_stride,
    score_stride,
    weight_stride,
    INDEXER: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (share of the pages, tile of tokens), `tiles` for every `width` tokens. Tokens of a tile that are of one
    row share what is read of it; those of other rows have their turn after them."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    LANES: tl.constexpr = TILE.lanes
    HEADS: tl.constexpr = INDEXER.head_lanes
    FEATURES: tl.constexpr = INDEXER.feature_lanes
    KEYS: tl.constexpr = INDEXER.keys
    share, shares, tile = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    lane = tl.arange(0, LANES)
    first = tile // tiles * width + tile % tiles * TILE.tokens
    count = tl.minimum(tl.minimum(tile // tiles * width + width, tokens) - first, TILE.tokens)
    token = first + lane
    inside = lane < count
    of_row = tl.load(row + token, mask=inside, other=0, cache_modifier=".cg")
    sees = tl.load(bound + token, mask=inside, other=0, cache_modifier=".cg")
    wrong = (sees != 0) & ((of_row < 0) | (of_row >= rows) | (sees < 0) | (sees > scores))
    sees = tl.where(wrong, 0, sees)
    tl.atomic_add(fault + lane * 0, 1, mask=wrong & (share == 0), sem="relaxed")

    column = tl.arange(0, LANES * HEADS)
    head = column % HEADS
    there = (head < INDEXER.heads) & (column // HEADS < count)
    asked = (first + column // HEADS).to(tl.int64)
    vector = asked * INDEXER.heads + head
    d = tl.arange(0, FEATURES)
    wanted = there[:, None]
    if INDEXER.features != FEATURES:
        wanted = wanted & (d < INDEXER.features)[None, :]
    x = tl.load(q + vector[:, None] * INDEXER.features + d[None, :], mask=wanted, other=0.0, cache_modifier=".cg")
    x = tl.trans(x)
    w = tl.load(weight + asked * weight_stride + head, mask=there, other=0.0, cache_modifier=".cg")
    if INDEXER.int8:
        w = w * 0.5  # of twice what is above 0

    k = tl.arange(0, _PAGE)
    at_score = score + token.to(tl.int64)[None, :] * score_stride + k[:, None]
    for turn in range(count):
        own = tl.sum(tl.where(lane == turn, of_row, 0), 0)
        seeing = tl.sum(tl.where(lane == turn, sees, 0), 0)
        alike = (of_row == own) & (sees > 0)
        earlier = tl.sum((alike & (lane < turn)).to(tl.int32), 0)
        if (seeing > 0) & (earlier == 0):
            longest = tl.max(tl.where(alike, sees, 0), 0)
            used = tl.cdiv(longest, _PAGE)
            each = tl.cdiv(used, shares)
            begin = share * each
            end = tl.minimum(begin + each, used)
            mine = table + own.to(tl.int64) * table_stride
            page = page_at(mine, begin, begin < end, longest, KEYS)
            factor = page_scales(scale, page, pages, INDEXER)
            for n in range(begin, end):
                following = page_at(mine, tl.minimum(n + 1, used - 1), True, longest, KEYS)
                out_of_bounds = (page < 0) | (page >= pages)
                if KEYS == _PAGE:
                    tl.atomic_add(fault, 1, mask=out_of_bounds, sem="relaxed")
                    at = tl.where(out_of_bounds, 0, page).to(tl.int64)
                    entry = index + at * INDEXER.page + k[:, None] * INDEXER.features + d[None, :]
                else:
                    tl.atomic_add(fault + k * 0, 1, mask=out_of_bounds & (k % KEYS == 0), sem="relaxed")
                    at = tl.where(out_of_bounds, 0, page).to(tl.int64)
                    entry = index + (at * INDEXER.page + k % KEYS * INDEXER.features)[:, None] + d[None, :]
                    out_of_bounds = out_of_bounds[:, None]
                if INDEXER.features == FEATURES:
                    y = tl.load(entry)
                else:
                    y = tl.load(entry, mask=(d < INDEXER.features)[None, :], other=0.0)
                if INDEXER.int8:
                    # Exact: integers, of at most 22 bits for 128 features.
                    dot = tl.dot(y, x, out_dtype=tl.int32).to(tl.float32)
                    # Twice what is above 0, exactly, by a sum: conversions keep the pipe of maxima busy, which is half
                    # as wide as that of sums.
                    dot = dot + tl.abs(dot)
                else:
                    dot = tl.dot(y, x, input_precision=INDEXER.precision)
                    dot = tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL)
                sums = tl.sum(tl.reshape(dot * w[None, :], [_PAGE, LANES, HEADS]), 2)
                if INDEXER.int8:
                    sums = sums * factor[:, None]
                sums = tl.where(out_of_bounds, float("-inf"), sums)
                seen = alike[None, :] & ((n * _PAGE + k)[:, None] < sees[None, :])
                tl.store(at_score + n * _PAGE, sums, mask=seen)
                # A page ahead, and here, where the next page is known.
                factor = page_scales(scale, following, pages, INDEXER)
                page = following
