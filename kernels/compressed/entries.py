"""Entries of tokens and of several tokens, and queries, in Triton. A program has a token, or heads of one, and no
program reads what another one writes.

What steps write is read past L1 (`.cg`): a dependent launch may find lines there that are older than the kernel before.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.page import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)
UNALIGNED = ["position", "row", "slot", "table", "fault"]
"""Tensors of which a program reads single numbers. A chunk's lie behind those of decode rows, of whatever number these
are: kernels should not be compiled anew where a pointer is less aligned."""


@triton.jit
def place_of(token, row, slot, rows, places):
    """Return a token's row, the place of its slot in rings, whether it has one, and whether row or slot are outside of
    what they point into."""
    own = tl.load(row + token, cache_modifier=".cg")
    known = (own >= 0) & (own < rows)
    found = tl.load(slot + own, mask=known, other=-1, cache_modifier=".cg")
    outside = (own < -1) | (own >= rows) | (found < -1) | (found >= places - 1)
    return own, found + 1, (found >= 0) & (outside == 0), outside


@triton.jit
def turn(x, cos, sin, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th angle; `cos`, `sin`: [1, BLOCK / 2]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit
def angles(rotation, FEATURES: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines and sines of all pairs of FEATURES features, [1, BLOCK / 2]: those before the last ROPE features turn by
    no angle."""
    pair = tl.arange(0, BLOCK // 2)
    at = 2 * pair - (FEATURES - ROPE)
    roped = (at >= 0) & (at < ROPE)
    cos = tl.load(rotation + at, mask=roped, other=1.0, cache_modifier=".cg")
    sin = tl.load(rotation + at + 1, mask=roped, other=0.0, cache_modifier=".cg")
    return cos[None, :], sin[None, :]


@triton.jit(do_not_specialize=["rows", "places"], do_not_specialize_on_alignment=UNALIGNED)
def rope_store_kernel(
    q,
    kv,
    norm,
    rotation,
    entry,
    ring,
    position,
    row,
    slot,
    fault,
    rows,
    places,
    eps,
    Q_TOKEN: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    ROTATION: tl.constexpr,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    ROPE: tl.constexpr,
    LENGTH: tl.constexpr,
    ENTRY: tl.constexpr,
    KEEP: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (token, part): with ENTRY part 0 makes the token's entry, and with KEEP writes it to the ring; each
    other part has GROUP heads, which it norms with NORM and turns."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    cos, sin = angles(rotation + token * ROTATION, FEATURES, ROPE, BLOCK)
    if ENTRY and part == 0:
        inside = d < FEATURES
        x = tl.load(kv + token * KV_TOKEN + d, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        w = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / FEATURES + eps) * w
        x = tl.reshape(turn(tl.reshape(x, [1, BLOCK]), cos, sin, 1, BLOCK), [BLOCK]).to(entry.dtype.element_ty)
        tl.store(entry + token * FEATURES + d, x, mask=inside)
        if KEEP:
            _, place, there, outside = place_of(token, row, slot, rows, places)
            p = tl.load(position + token, cache_modifier=".cg").to(tl.int32)
            outside = outside | (there & (p < 0))
            tl.atomic_add(fault, 1, mask=outside, sem="relaxed")
            kept = there & (outside == 0)
            tl.store(ring + (place * LENGTH + p % LENGTH) * FEATURES + d, x, mask=inside & kept)
    else:
        head = (part - (1 if ENTRY else 0)) * GROUP + tl.arange(0, GROUP)
        wanted = (head < HEADS)[:, None] & (d < FEATURES)[None, :]
        at = q + token * Q_TOKEN + head[:, None] * FEATURES + d[None, :]
        query = tl.load(at, mask=wanted, other=0.0, cache_modifier=".cg").to(tl.float32)
        if NORM:
            query = query * tl.rsqrt(tl.sum(query * query, 1) / FEATURES + eps)[:, None]
        tl.store(at, turn(query, cos, sin, GROUP, BLOCK).to(q.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["tokens", "rows", "places"], do_not_specialize_on_alignment=UNALIGNED)
def keep_entries_kernel(
    entry,
    ring,
    position,
    row,
    slot,
    fault,
    tokens,
    rows,
    places,
    FEATURES: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token's entry into the ring, if none of its row comes behind that lies at the same place."""
    token = tl.program_id(0).to(tl.int64)
    own, place, there, outside = place_of(token, row, slot, rows, places)
    at = tl.load(position + token).to(tl.int32)
    outside = outside | (there & (at < 0))
    tl.atomic_add(fault, 1, mask=outside, sem="relaxed")
    newest = tl.load(row + token + LENGTH, mask=token + LENGTH < tokens, other=-1) != own
    if there & (outside == 0) & newest:
        d = tl.arange(0, BLOCK)
        x = tl.load(entry + token * FEATURES + d, mask=d < FEATURES, other=0.0)
        tl.store(ring + (place * LENGTH + at % LENGTH) * FEATURES + d, x, mask=d < FEATURES)


_INTS = ["tokens", "rows", "places", "positions", "columns", "pages", "table_stride"]


@triton.jit(do_not_specialize=_INTS, do_not_specialize_on_alignment=UNALIGNED)
def compress_kernel(
    made,
    bias,
    norm,
    rotation,
    state,
    entry,
    position,
    row,
    slot,
    table,
    fault,
    tokens,
    rows,
    places,
    positions,
    columns,
    pages,
    table_stride,
    eps,
    MADE_TOKEN: tl.constexpr,
    ROTATION: tl.constexpr,
    RATIO: tl.constexpr,
    FEATURES: tl.constexpr,
    HALVES: tl.constexpr,
    ROPE: tl.constexpr,
    LENGTH: tl.constexpr,
    ENTRIES: tl.constexpr,
    COMPLETE: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token. With KEEP what was made of it goes into the ring, if it is among the newest LENGTH of its row; with
    COMPLETE the entry that it ends is made, TILE tokens at a time, by an online softmax for each feature (Milakov and
    Gimelshein, 2018). HALVES: 2 where entries overlap."""
    WIDTH: tl.constexpr = HALVES * FEATURES
    token = tl.program_id(0).to(tl.int64)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    own, place, there, outside = place_of(token, row, slot, rows, places)
    at = tl.load(position + token, cache_modifier=".cg").to(tl.int32)
    outside = outside | (there & (at < 0))
    there = there & (outside == 0)
    d = tl.arange(0, BLOCK)
    inside = d < FEATURES
    if KEEP:
        newest = tl.load(row + token + LENGTH, mask=token + LENGTH < tokens, other=-1) != own
        if there & newest:
            source = made + token * MADE_TOKEN + d
            target = state + (place * LENGTH + at % LENGTH) * (2 * WIDTH) + d
            added = bias + at % RATIO * WIDTH + d
            for half in tl.static_range(HALVES):
                first = half * FEATURES
                value = tl.load(source + first, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                logit = tl.load(source + WIDTH + first, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                logit += tl.load(added + first, mask=inside, other=0.0)
                tl.store(target + first, value, mask=inside)
                tl.store(target + WIDTH + first, logit, mask=inside)
    if COMPLETE:
        if there & ((at + 1) % RATIO == 0):
            column = at // _PAGE
            page = tl.load(table + own.to(tl.int64) * table_stride + column, mask=column < columns, other=-1)
            outside = (page < 0) | (page >= pages) | (at >= positions)
            REACH: tl.constexpr = HALVES * RATIO
            top = tl.full((BLOCK,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK,), tl.float32)
            sums = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, REACH, TILE):
                i = begin + tl.arange(0, TILE)
                back = REACH - 1 - i
                exists = (back >= 0) & (at - back >= 0)
                # The first tokens of an entry that overlaps are those of the entry before.
                half = (i // RATIO) * FEATURES
                near = exists & (token - back >= 0)
                of_step = near & (tl.load(row + token - back, mask=near, other=-1, cache_modifier=".cg") == own)
                of_ring = exists & (of_step == 0)
                source = made + (token - back) * MADE_TOKEN + half
                past = state + (place * LENGTH + (at - back) % LENGTH) * (2 * WIDTH) + half
                added = bias + i % RATIO * WIDTH + half
                new = of_step[:, None] & inside[None, :]
                old = of_ring[:, None] & inside[None, :]
                d_ = d[None, :]
                logit = tl.load(source[:, None] + WIDTH + d_, mask=new, other=0.0, cache_modifier=".cg").to(tl.float32)
                logit += tl.load(added[:, None] + d_, mask=new, other=0.0)
                before = tl.load(past[:, None] + WIDTH + d_, mask=old, other=float("-inf"), cache_modifier=".cg")
                logit = tl.where(new, logit, before)
                value = tl.load(source[:, None] + d_, mask=new, other=0.0, cache_modifier=".cg").to(tl.float32)
                before = tl.load(past[:, None] + d_, mask=old, other=0.0, cache_modifier=".cg")
                value = tl.where(new, value, before)
                new_top = tl.maximum(top, tl.max(logit, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shrink = tl.exp(top - base)
                weight = tl.exp(logit - base[None, :])
                total = total * shrink + tl.sum(weight, 0)
                sums = sums * shrink + tl.sum(weight * value, 0)
                top = new_top
            mean = sums / tl.where(inside, total, 1.0)
            w = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
            x = mean * tl.rsqrt(tl.sum(mean * mean, 0) / FEATURES + eps) * w
            begins = tl.where(outside, 0, at - RATIO + 1)
            cos, sin = angles(rotation + begins * ROTATION, FEATURES, ROPE, BLOCK)
            x = tl.reshape(turn(tl.reshape(x, [1, BLOCK]), cos, sin, 1, BLOCK), [BLOCK])
            to = entry + (page.to(tl.int64) * ENTRIES + at % _PAGE // RATIO) * FEATURES + d
            tl.store(to, x.to(entry.dtype.element_ty), mask=inside & (outside == 0))
        tl.atomic_add(fault, 1, mask=outside, sem="relaxed")
