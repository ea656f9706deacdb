"""Absorbed attention over selected entries of the paged latent cache, in Triton: flash-decoding (Dao et al. 2023) as in
`kernels.mla_decode`, but each tile is gathered entry by entry. Online softmax after Milakov and Gimelshein (2018), in
base 2.

A program takes a part of a token's entries for a block of its heads. `attend` writes outputs, or pieces of them where
several programs share a token; `merge` adds the pieces up in order. There are no atomics but for counting what lies
outside. Entries that are absent are loaded as zero, because 0 x NaN is NaN.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_entry import load_keys, load_latents
from kernels.page import PAGE_TOKENS

_MASKED = tl.constexpr(-1.0e33)
_LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: far above `_MASKED`, so that exp2(masked - lowest) is 0, and below every real score."""
_PAGE = tl.constexpr(PAGE_TOKENS)
_LN2 = tl.constexpr(0.6931471805599453)
_INTS = ["tokens", "rows", "columns", "pages", "table_stride", "heads", "blocks"]


class Features(NamedTuple):
    """The features of a query vector or a cache entry: one constant of a launch."""

    latent: int
    pieces: int
    """A latent is loaded and multiplied in so many pieces: the whole would take more registers than there are."""
    piece: int
    """Features of a piece; of several pieces a group of FP8 entries."""
    lanes: int
    """Features of a piece, padded to a power of two."""
    rope: int
    rope_lanes: int
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""


class Shared(NamedTuple):
    """Division of a token's entries among programs: one constant of a launch."""

    selected: int
    part: int
    """Entries of a program."""
    part_lanes: int
    """Entries of a program, padded to a power of two."""
    parts: int


@triton.jit
def columns_of(rows, COUNT: tl.constexpr, LANES: tl.constexpr):
    """Mask of the columns of some rows: theirs, and if there are fewer columns than lanes only those that exist."""
    mask = rows[:, None]
    if COUNT != LANES:
        mask = mask & (tl.arange(0, LANES) < COUNT)[None, :]
    return mask


@triton.jit
def load_piece(at, mask, dtype: tl.constexpr, piece: tl.constexpr, FEATURES: tl.constexpr, ENTRY: tl.constexpr):
    """A piece of the latents [entries, lanes] of the entries at `at` that `mask` allows, in `dtype`; 0 elsewhere."""
    LANES: tl.constexpr = FEATURES.lanes
    if ENTRY.fp8 and FEATURES.pieces > 1:
        # A piece is a group, which has one scale.
        code = tl.load((at + piece * LANES)[:, None] + tl.arange(0, LANES)[None, :], mask=mask[:, None], other=0)
        scale = tl.load((at + ENTRY.scales).to(tl.pointer_type(tl.float32)) + piece, mask=mask, other=0.0)
        latent = (code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]).to(dtype)
    else:
        latent = load_latents(at + piece * LANES, mask, dtype, FEATURES.piece, LANES, ENTRY)
    return latent


@triton.jit
def places_of(position, table, own, rows, columns, pages, table_stride, fault, counting):
    """Return the indices in the flattened cache of the entries at some positions of row `own`, -1 for absent ones.
    Positions outside are absent, and counted if `counting`."""
    known = (own >= 0) & (own < rows)
    there = (position >= 0) & (position < columns * _PAGE) & known
    at_page = table + tl.where(known, own, 0).to(tl.int64) * table_stride + position // _PAGE
    page = tl.load(at_page, mask=there, other=0)
    out_of_bounds = (page < 0) | (page >= pages)
    outside = (position != -1) & (out_of_bounds | (there == 0))
    tl.atomic_add(fault + position * 0, 1, mask=outside & counting, sem="relaxed")
    return tl.where(there & (out_of_bounds == 0), page * _PAGE + position % _PAGE, -1)


@triton.jit
def find_entries(
    mine, places, table, own, begin, stop, rows, columns, pages, table_stride, fault, block, SHARED: tl.constexpr
):
    """Write where a part's entries lie. Returns the end of those that are there: absent ones mostly stand last."""
    slot = begin + tl.arange(0, SHARED.part_lanes)
    position = tl.load(mine + slot, mask=slot < stop, other=-1, cache_modifier=".cg")
    found = places_of(position, table, own, rows, columns, pages, table_stride, fault, block == 0)
    tl.store(places + slot, found, mask=slot < stop)
    tl.debug_barrier()
    return tl.max(tl.where(found >= 0, slot + 1, 0), 0)


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=["table", "row", "fault"])
def attend(
    q,
    cache,
    table,
    row,
    selected,
    out,
    lse,
    partial,
    partial_lse,
    place,
    fault,
    scale,
    tokens,
    rows,
    columns,
    pages,
    table_stride,
    heads,
    blocks,
    FEATURES: tl.constexpr,
    ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (block of heads and part, token). `scale` includes log2(e)."""
    BLOCK: tl.constexpr = TILE.queries
    TOKENS: tl.constexpr = TILE.tokens
    LATENT: tl.constexpr = FEATURES.latent
    PIECES: tl.constexpr = FEATURES.pieces
    LANES: tl.constexpr = FEATURES.lanes
    VECTOR: tl.constexpr = LATENT + FEATURES.rope
    APART: tl.constexpr = ENTRY.size if ENTRY.fp8 else VECTOR
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    token = tl.program_id(1).to(tl.int64)
    own = tl.load(row + token)
    mine = selected + token * SHARED.selected
    begin = part * SHARED.part
    stop = tl.minimum(begin + SHARED.part, SHARED.selected)

    # Every block of heads has its own, so that none reads what another one writes.
    places = place + (block.to(tl.int64) * tokens + token) * SHARED.selected
    end = find_entries(mine, places, table, own, begin, stop, rows, columns, pages, table_stride, fault, block, SHARED)

    m = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, TOKENS)
    c = tl.arange(0, LANES)
    r = tl.arange(0, FEATURES.rope_lanes)
    inside = m < heads
    has_latent = columns_of(inside, FEATURES.piece, LANES)
    has_rope = columns_of(inside, FEATURES.rope, FEATURES.rope_lanes)
    vector = (token * heads + m)[:, None]
    at_q = q + vector * VECTOR
    queries = ()
    sums = ()
    for piece in tl.static_range(PIECES):
        own_q = tl.load(at_q + piece * LANES + c[None, :], mask=has_latent, other=0.0, cache_modifier=".cg")
        queries = queries + (own_q,)  # noqa: RUF005 - Triton knows no stars
        sums = sums + (tl.zeros((BLOCK, LANES), tl.float32),)  # noqa: RUF005
    q_rope = tl.load(at_q + LATENT + r[None, :], mask=has_rope, other=0.0, cache_modifier=".cg")
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(begin, end, TOKENS):
        at = tl.load(places + first + n, mask=first + n < stop, other=-1)
        there = at >= 0
        base = cache + at.to(tl.int64) * APART
        latents = ()
        score = tl.zeros((BLOCK, TOKENS), tl.float32)
        for piece in tl.static_range(PIECES):
            latent = load_piece(base, there, q.dtype.element_ty, piece, FEATURES, ENTRY)
            score = tl.dot(queries[piece], tl.trans(latent), score, input_precision=FEATURES.precision)
            latents = latents + (latent,)  # noqa: RUF005
        rope = load_keys(base, there, q.dtype.element_ty, LATENT, FEATURES.rope, FEATURES.rope_lanes, ENTRY)
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision=FEATURES.precision)
        score = score * scale + tl.where(there, 0.0, _MASKED)[None, :]
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        weight = tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
        weight = weight.to(q.dtype.element_ty)
        new_sums = ()
        for piece in tl.static_range(PIECES):
            shrunk = sums[piece] * shrink[:, None]
            shrunk = tl.dot(weight, latents[piece], shrunk, input_precision=FEATURES.precision)
            new_sums = new_sums + (shrunk,)  # noqa: RUF005
        sums = new_sums
    divisor = tl.where(total > 0, total, 1.0)
    log = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
    if SHARED.parts == 1:
        at_out = out + vector * LATENT + c[None, :]
        tl.store(lse + token * heads + m, log * _LN2, mask=inside)
    else:
        piece = (part.to(tl.int64) * tokens + token) * heads + m
        at_out = partial + piece[:, None] * LATENT + c[None, :]
        tl.store(partial_lse + piece, log, mask=inside)
    dtype: tl.constexpr = at_out.dtype.element_ty
    for piece in tl.static_range(PIECES):
        tl.store(at_out + piece * LANES, (sums[piece] / divisor[:, None]).to(dtype), mask=has_latent)


@triton.jit(do_not_specialize=["vectors", "heads"])
def merge(
    partial,
    partial_lse,
    pieces,
    out,
    lse,
    vectors,
    heads,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (query vector, columns): the sum of a vector's pieces, LANES of them at a time. COUNTED: `pieces` says
    how many a token has. If it has one or none, its results are written."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    vector = tl.program_id(0).to(tl.int64)
    count = PARTS
    if COUNTED:
        count = tl.load(pieces + vector // heads, cache_modifier=".cg")
        if count <= 1:
            return
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = c < LATENT
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sum_latent = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.static_range(0, PARTS, LANES):
        part = first + tl.arange(0, LANES)
        piece = part.to(tl.int64) * vectors + vector
        log = tl.load(partial_lse + piece, mask=part < count, other=float("-inf"), cache_modifier=".cg")
        at = partial + piece[:, None] * LATENT + c[None, :]
        own = tl.load(at, mask=(part < count)[:, None] & inside[None, :], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(log, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(log - base)
        total = total * shrink + tl.sum(weight, 0)
        sum_latent = sum_latent * shrink + tl.sum(own.to(tl.float32) * weight[:, None], 0)
        top = new_top
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + vector * LATENT + c, (sum_latent / divisor).to(out.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(lse + vector, tl.where(total > 0, top + tl.log2(divisor), float("-inf")) * _LN2)
