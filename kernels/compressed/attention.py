"""Attention to a window of tokens' entries and to entries that stand for several tokens, in Triton: flash-decoding (Dao
et al. 2023) as in `kernels.sparse.attention`, over entries that lie in a ring, among the step's own, or on pages.
Online softmax after Milakov and Gimelshein (2018), in base 2.

A program takes a part of a token's entries for a block of its heads. First it lists where they lie, then it reads them
tile by tile. Several programs of a token leave pieces, which `merge` adds up in order. Entries that are absent are
loaded as zero, because 0 x NaN is NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 (Triton knows no stars)

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.compressed.entries import UNALIGNED, place_of, turn
from kernels.page import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)
_MASKED = tl.constexpr(-1.0e33)
_LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: far above `_MASKED`, so that exp2(masked - lowest) is 0, and below every real score."""
_LOG2E = tl.constexpr(1.4426950408889634)
_RING = tl.constexpr(0)
_STEP = tl.constexpr(1)
_PAGES = tl.constexpr(2)
_INTS = ["tokens", "rows", "places", "columns", "pages", "table_stride", "heads", "blocks", "most"]


class Sizes(NamedTuple):
    """Sizes of a call: one constant of its launches."""

    features: int
    pieces: int
    """An entry is loaded and multiplied in so many pieces: the whole would take more registers than there are."""
    lanes: int
    """Features of a piece, padded to a power of two where there is one piece."""
    rope: int
    rotation: int
    """Elements from one token's rotations to the next."""
    window: int
    first: int
    """Position before which there are no tokens."""
    length: int
    """Tokens that a ring holds."""
    own: bool
    """Whether the step's own entries are beside the ring."""
    block: int
    """Neighbouring tokens that all see what the last of them does; 0: each sees what it does itself."""
    ratio: int
    """Tokens of an entry on a page; 0: there are none."""
    entries: int
    """Entries of a page."""
    selected: int
    """Numbers of entries that a token is given; 0: it takes all that it may see."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""
    dependent: bool = False
    """Whether the launch is dependent. What steps write is read past L1 then."""


@triton.jit
def span_of(token, position, row, slot, rows, places, most, SIZES: tl.constexpr):
    """What a token attends to: (its row, the place of its slot, whether it has one, the token whose entries it sees,
    and that one's position, the position of the first entry of its window, entries of the window, all entries, whether
    anything is outside of what it points into)."""
    own, place, there, outside = place_of(token, row, slot, rows, places)
    PAST: tl.constexpr = ".cg" if SIZES.dependent else ""
    p = tl.load(position + token, cache_modifier=PAST).to(tl.int32)
    there = there & (p >= 0)
    sees = token
    if SIZES.block:
        sees += SIZES.block - 1 - token % SIZES.block
        p += (sees - token).to(tl.int32)
    least = tl.maximum(p - SIZES.window + 1, SIZES.first)
    near = tl.where(there, tl.maximum(p + 1 - least, 0), 0)
    total = near
    if SIZES.ratio:
        more = (p + 1) // SIZES.ratio
        if SIZES.selected:
            more = tl.minimum(more, SIZES.selected)
        total += tl.where(there, more, 0)
    # More than there is memory for, a table knows no pages of.
    outside = outside | (total > most)
    return own, place, there, sees, p, least, near, tl.minimum(total, most), outside


@triton.jit
def codes_of(
    i, live, token, own, place, p, row, selected, table, least, near, columns, pages, table_stride, SIZES: tl.constexpr
):
    """Return where the entries numbered `i` lie: four times their place among those of their source, and the source; -1
    for absent ones. The `near` first ones are the window's, from position `least` on. Of those that are `live` also how
    many are outside of what they point into."""
    PAST: tl.constexpr = ".cg" if SIZES.dependent else ""
    faults = 0
    at = least + i
    code = (place * SIZES.length + at % SIZES.length) * 4 + _RING
    if SIZES.own:
        back = p - at
        maybe = live & (i < near) & (token >= back)
        of_step = maybe & (tl.load(row + token - back, mask=maybe, other=-1) == own)
        code = tl.where(of_step, (token - back) * 4 + _STEP, code)
    if SIZES.ratio:
        compressed = live & (i >= near)
        number = i - near
        if SIZES.selected:
            mine = selected + token * SIZES.selected
            number = tl.load(mine + number, mask=compressed, other=-1, cache_modifier=PAST)
        there = compressed & (number >= 0) & (number < (p + 1) // SIZES.ratio)
        last = (number + 1).to(tl.int64) * SIZES.ratio - 1
        there = there & (last // _PAGE < columns)
        page = table + own.to(tl.int64) * table_stride + last // _PAGE
        page = tl.load(page, mask=there, other=-1, cache_modifier=PAST)
        there = there & (page >= 0) & (page < pages)
        faults = tl.sum((compressed & (number != -1) & (there == 0)).to(tl.int32), 0)
        on_page = (page.to(tl.int64) * SIZES.entries + last % _PAGE // SIZES.ratio) * 4 + _PAGES
        code = tl.where(compressed, tl.where(there, on_page, -1), code)
    return code.to(tl.int32), faults


@triton.jit
def list_entries(
    listed, token, own, place, p, row, selected, table, begin, end, least, near, columns, pages, table_stride,
    SIZES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write `codes_of` the entries numbered from `begin` up to `end`; return how many are outside."""
    faults = 0
    for first in range(begin, end, LANES):
        i = first + tl.arange(0, LANES)
        code, more = codes_of(
            i, i < end, token, own, place, p, row, selected, table, least, near, columns, pages, table_stride, SIZES
        )
        faults += more
        tl.store(listed + i, code, mask=i < end)
    return faults


@triton.jit
def base_of(code, ring, step, paged, SIZES: tl.constexpr):
    """Where the entries lie that were listed as `code`."""
    base = ring
    if SIZES.own or SIZES.ratio:
        base = tl.where(code & 3 == _RING, ring, paged if SIZES.ratio else step)
    if SIZES.own and SIZES.ratio:
        base = tl.where(code & 3 == _STEP, step, base)
    return base + (code >> 2).to(tl.int64) * SIZES.features


@triton.jit
def drop_odd(listed, begin, end, ring, step, paged, SIZES: tl.constexpr, TILE: tl.constexpr):
    """List those entries of the window as absent that are not finite. They are few, and read once more here: attention
    itself has no registers left to look at them."""
    PAST: tl.constexpr = ".cg" if SIZES.dependent else ""
    LANES: tl.constexpr = SIZES.lanes
    PIECES: tl.constexpr = SIZES.pieces
    c = tl.arange(0, LANES)
    for first in range(begin, end, TILE):
        i = first + tl.arange(0, TILE)
        code = tl.load(listed + i, mask=i < end, other=-1, cache_modifier=PAST)
        found = (code >= 0) & (code & 3 != _PAGES)
        at = base_of(code, ring, step, paged, SIZES)[:, None] + c[None, :]
        odd = tl.zeros((TILE,), tl.float32)
        for piece in tl.static_range(PIECES):
            kept = found[:, None] & (piece * LANES + c < SIZES.features)[None, :]
            # 0 times what is not finite is NaN.
            x = tl.load(at + piece * LANES, mask=kept, other=0.0, cache_modifier=PAST)
            odd += tl.sum(x.to(tl.float32) * 0.0, 1)
        tl.debug_barrier()
        tl.store(listed + i, tl.full((TILE,), -1, tl.int32), mask=(i < end) & (odd != 0.0))
    tl.debug_barrier()


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=UNALIGNED)
def attend(
    q,
    ring,
    step,
    paged,
    selected,
    sink,
    rotation,
    out,
    partial,
    partial_lse,
    listed,
    position,
    row,
    slot,
    table,
    fault,
    scale,
    tokens,
    rows,
    places,
    columns,
    pages,
    table_stride,
    heads,
    blocks,
    most,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Programs (block of heads and part, token). `scale` includes log2(e). `most`: entries that a token has at most.
    `listed`: [blocks, tokens, most]: every block of heads lists for itself, so that none reads what another one
    writes."""
    PAST: tl.constexpr = ".cg" if SIZES.dependent else ""
    LANES: tl.constexpr = SIZES.lanes
    PIECES: tl.constexpr = SIZES.pieces
    FEATURES: tl.constexpr = SIZES.features
    dtype: tl.constexpr = q.dtype.element_ty
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    token = tl.program_id(1).to(tl.int64)
    if SIZES.dependent:
        gdc_launch_dependents()
        gdc_wait()
    m = block * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, LANES)
    inside = m < heads
    wanted = inside[:, None]
    if PIECES * LANES != FEATURES:
        wanted = wanted & (c < FEATURES)[None, :]
    vector = (token * heads + m)[:, None]
    queries = ()
    # Before the entries are listed, which takes several answers of memory, one after the other.
    for piece in tl.static_range(PIECES):
        query = q + vector * FEATURES + piece * LANES + c[None, :]
        queries = queries + (tl.load(query, mask=wanted, other=0.0, cache_modifier=PAST),)
    own, place, there, sees, p, least, near, total, outside = span_of(
        token, position, row, slot, rows, places, most, SIZES
    )
    each = tl.cdiv(tl.cdiv(total, TILE), PARTS) * TILE
    begin = tl.minimum(part * each, total)
    end = tl.minimum(begin + each, total)
    mine = listed + (block.to(tl.int64) * tokens + token) * most
    faults = list_entries(
        mine, sees, own, place, p, row, selected, table, begin, end, least, near, columns, pages, table_stride,
        SIZES, LISTED,
    )  # fmt: skip
    faults += (outside & (part == 0)).to(tl.int32)
    tl.atomic_add(fault, faults.to(tl.int64), mask=(block == 0) & (faults > 0), sem="relaxed")
    tl.debug_barrier()
    if SIZES.first:
        drop_odd(mine, begin, end, ring, step, paged, SIZES, TILE)

    n = tl.arange(0, TILE)
    sums = ()
    for _piece in tl.static_range(PIECES):
        sums = sums + (tl.zeros((BLOCK, LANES), tl.float32),)
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, TILE):
        code = tl.load(mine + first + n, mask=first + n < end, other=-1, cache_modifier=PAST)
        found = code >= 0
        base = base_of(code, ring, step, paged, SIZES)
        entries = ()
        for piece in tl.static_range(PIECES):
            kept = found[:, None]
            if PIECES * LANES != FEATURES:
                kept = kept & (c < FEATURES)[None, :]
            features = base[:, None] + piece * LANES + c[None, :]
            entries = entries + (tl.load(features, mask=kept, other=0.0, cache_modifier=PAST),)
        score = tl.zeros((BLOCK, TILE), tl.float32)
        for piece in tl.static_range(PIECES):
            score = tl.dot(queries[piece], tl.trans(entries[piece]), score, input_precision=SIZES.precision)
        score = score * scale + tl.where(found, 0.0, _MASKED)[None, :]
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        weights = weights * shrink + tl.sum(weight, 1)
        top = new_top
        weight = weight.to(dtype)
        new_sums = ()
        for piece in tl.static_range(PIECES):
            shrunk = sums[piece] * shrink[:, None]
            new_sums = new_sums + (tl.dot(weight, entries[piece], shrunk, input_precision=SIZES.precision),)
        sums = new_sums
    if PARTS == 1:
        logit = tl.load(sink + m, mask=inside, other=0.0) * _LOG2E
        divisor = weights + tl.exp2(logit - top)
        divisor = tl.where(divisor == 0.0, 1.0, divisor)
        at = out + vector * FEATURES + c[None, :]
        pair = tl.arange(0, LANES // 2)
        angle = 2 * pair - (FEATURES - (PIECES - 1) * LANES - SIZES.rope)
        roped = (angle >= 0) & (angle < SIZES.rope) & there
        turns = rotation + token * SIZES.rotation + angle
        cos = tl.load(turns, mask=roped, other=1.0, cache_modifier=PAST)
        sin = tl.load(turns + 1, mask=roped, other=0.0, cache_modifier=PAST)
        for piece in tl.static_range(PIECES):
            result = sums[piece] / divisor[:, None]
            if piece == PIECES - 1:
                result = turn(result, cos[None, :], -sin[None, :], BLOCK, LANES)
            tl.store(at + piece * LANES, result.to(out.dtype.element_ty), mask=wanted)
    else:
        divisor = tl.where(weights == 0.0, 1.0, weights)
        log = tl.where(weights == 0.0, float("-inf"), top + tl.log2(divisor))
        own_piece = (part.to(tl.int64) * tokens + token) * heads + m
        tl.store(partial_lse + own_piece, log, mask=inside)
        for piece in tl.static_range(PIECES):
            at = partial + own_piece[:, None] * FEATURES + piece * LANES + c[None, :]
            tl.store(at, sums[piece] / divisor[:, None], mask=wanted)


@triton.jit(do_not_specialize=["vectors", "heads", "rows", "places"], do_not_specialize_on_alignment=UNALIGNED)
def merge(
    partial,
    partial_lse,
    sink,
    rotation,
    out,
    row,
    slot,
    vectors,
    heads,
    rows,
    places,
    SIZES: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs of a query vector: the sum of its pieces, TILE of them at a time, with the sink; turned back."""
    PAST: tl.constexpr = ".cg" if SIZES.dependent else ""
    vector = tl.program_id(0).to(tl.int64)
    token = vector // heads
    if SIZES.dependent:
        gdc_launch_dependents()
        gdc_wait()
    _, _, there, _ = place_of(token, row, slot, rows, places)
    d = tl.arange(0, BLOCK)
    inside = d < SIZES.features
    top = tl.load(sink + vector % heads) * _LOG2E
    weights = tl.full((), 1.0, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in tl.static_range(0, PARTS, TILE):
        part = first + tl.arange(0, TILE)
        piece = part.to(tl.int64) * vectors + vector
        log = tl.load(partial_lse + piece, mask=part < PARTS, other=float("-inf"), cache_modifier=PAST)
        at = partial + piece[:, None] * SIZES.features + d[None, :]
        wanted = (part < PARTS)[:, None] & inside[None, :]
        own = tl.load(at, mask=wanted, other=0.0, cache_modifier=PAST)
        new_top = tl.maximum(top, tl.max(log, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(log - base)
        weights = weights * shrink + tl.sum(weight, 0)
        sums = sums * shrink + tl.sum(own * weight[:, None], 0)
        top = new_top
    result = sums / tl.where(weights == 0.0, 1.0, weights)
    pair = tl.arange(0, BLOCK // 2)
    angle = 2 * pair - (SIZES.features - SIZES.rope)
    roped = (angle >= 0) & (angle < SIZES.rope) & there
    turns = rotation + token * SIZES.rotation + angle
    cos = tl.load(turns, mask=roped, other=1.0, cache_modifier=PAST)
    sin = tl.load(turns + 1, mask=roped, other=0.0, cache_modifier=PAST)
    result = tl.reshape(turn(tl.reshape(result, [1, BLOCK]), cos[None, :], -sin[None, :], 1, BLOCK), [BLOCK])
    tl.store(out + vector * SIZES.features + d, result.to(out.dtype.element_ty), mask=inside)
