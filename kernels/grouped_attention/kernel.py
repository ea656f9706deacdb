"""Grouped-query attention over a paged cache in Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.page import PAGE_TOKENS

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def rope_store(
    qkv,
    rotation,
    cache_slot,
    cache,
    TOKEN: tl.constexpr,
    ROTATION: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (token, head): of a query, a key or a value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    at = qkv + token * TOKEN + head * FEATURES + feature
    x = tl.load(at, mask=inside, other=0.0)
    if head < HEADS + KEY_HEADS:
        turn = tl.load(rotation + token * ROTATION + feature, mask=inside, other=0.0)
        even, odd = tl.split(tl.reshape(x.to(tl.float32), [BLOCK // 2, 2]))
        cos, sin = tl.split(tl.reshape(turn, [BLOCK // 2, 2]))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK]).to(x.dtype)
    if head < HEADS:
        tl.store(at, x, mask=inside)
    else:
        entry = tl.load(cache_slot + token)
        into = cache + entry * (2 * KEY_HEADS * FEATURES) + (head - HEADS) * FEATURES
        tl.store(into + feature, x, mask=inside)


@triton.jit(do_not_specialize=["rows", "pages"])
def attend(
    q,
    cache,
    page_table,
    table,
    out,
    rows,
    pages,
    scale,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    Q_TOKEN: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (row or tile, part of a key head's query heads). WIDTH 0: tiles, of which `table` says all; else rows of
    so many tokens, of which it says the length."""
    tile = tl.program_id(0)
    key_head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    if WIDTH:
        begin, count, row = tile * WIDTH, WIDTH, tile
        length = tl.load(table + tile)
    else:
        begin = tl.load(table + tile)
        count = tl.load(table + rows + tile)
        row = tl.load(table + 2 * rows + tile)
        length = tl.load(table + 3 * rows + tile)
    line = tl.arange(0, QUERIES * HEADS)
    query, head = line // HEADS, part * HEADS + line % HEADS
    live = (query < count) & (head < GROUP)
    token = (begin + query).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    inside = feature < FEATURES
    of_head = (key_head * GROUP + head) * FEATURES
    at_q = q + (token * Q_TOKEN + of_head)[:, None] + feature[None, :]
    x = tl.load(at_q, mask=live[:, None] & inside[None, :], other=0.0)
    # Entries that a token may see are before this.
    bound = length - (count - 1 - query)
    most = tl.full((QUERIES * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * HEADS,), tl.float32)
    sums = tl.zeros((QUERIES * HEADS, BLOCK), tl.float32)
    offset = tl.arange(0, _PAGE)
    for index in range(FIRST // _PAGE, tl.cdiv(length, _PAGE)):
        page = tl.load(page_table + row.to(tl.int64) * pages + index).to(tl.int64)
        entry = index * _PAGE + offset
        there = (entry >= FIRST) & (entry < length)
        key_at = cache + (page * _PAGE + offset) * (2 * KEY_HEADS * FEATURES) + key_head * FEATURES
        mask = there[:, None] & inside[None, :]
        key = tl.load(key_at[:, None] + feature[None, :], mask=mask, other=0.0)
        value = tl.load(key_at[:, None] + KEY_HEADS * FEATURES + feature[None, :], mask=mask, other=0.0)
        score = tl.dot(x, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(there[None, :] & (entry[None, :] < bound[:, None]), score, float("-inf"))
        highest = tl.maximum(most, tl.max(score, 1))
        # A token that sees nothing yet has no highest score.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(score - base[:, None])
        kept = tl.exp(most - base)
        total = total * kept + tl.sum(weight, 1)
        sums = sums * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = highest
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    at_out = out + (token * OUT_TOKEN + of_head)[:, None] + feature[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])
