"""Ragged flash attention over expanded keys and values in portable Triton.

A program holds a block of queries of one row and head and walks over the keys they see, with the online softmax of
Milakov and Gimelshein (2018) in base 2 and fp32 sums, as FlashAttention-2 does (Dao, 2023). The roped part of a key is
shared by all heads, so a score is the sum of two products. Keys and values past a row's end are loaded as zero, because
0 x NaN is NaN. Nothing depends on the other rows: a row's result is the same alone and in any batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

_MASKED = tl.constexpr(-1.0e33)
_LOWEST = tl.constexpr(-1.0e30)
"""Start of the running maximum: far above `_MASKED`, so that exp2(masked - lowest) is 0, and below every real score."""
_LN2 = tl.constexpr(0.6931471805599453)
_TOGETHER = tl.constexpr(16)


@triton.jit
def place(program, blocks, pairs, heads):
    """(block, row, head) of a program. Of 16 pairs of row and head at a time, the last blocks come first: causally they
    take longest, so that the short ones fill up the end. The pairs are few, so that blocks of one pair run at the same
    time and find its keys in the L2 cache."""
    together = program // (blocks * _TOGETHER)
    member = program % (blocks * _TOGETHER)
    count = min(pairs - together * _TOGETHER, _TOGETHER)
    pair = together * _TOGETHER + member % count
    return blocks - 1 - member // count, pair // heads, pair % heads


@triton.jit
def _rows(pointer, row, inside, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Rows of COLUMNS numbers, zero where not `inside`; LANES columns."""
    lane = tl.arange(0, LANES)[None, :]
    mask = inside[:, None]
    if COLUMNS != LANES:
        mask = mask & (lane < COLUMNS)
    return tl.load(pointer + row[:, None] * STRIDE + lane, mask=mask, other=0.0)


@triton.jit
def part_of(keys, KEYS: tl.constexpr):
    """(first key, keys) of this program's part of a row's keys. Parts are the grid's second dimension, and whole tiles,
    as many in every part as the last ones leave."""
    part = tl.program_id(1)
    each = tl.cdiv(tl.cdiv(keys, KEYS), tl.num_programs(1)) * KEYS
    return part * each, tl.minimum(tl.maximum(keys - part * each, 0), each)


@triton.jit(do_not_specialize=["heads", "blocks", "pairs", "lse_part"])
def attend(
    q,
    k,
    k_rope,
    v,
    cu_q,
    cu_k,
    out,
    lse,
    scale,
    heads,
    blocks,
    pairs,
    out_part,
    lse_part,
    STRIDES: tl.constexpr,
    TOKEN_STRIDES: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Programs: the `blocks` blocks of queries of each of the `pairs` pairs of row and head, for each part of the keys,
    which are one where attention is causal. `scale` includes log2(e). `out_part`, `lse_part`: elements from one part's
    results to the next one's."""
    NOPE: tl.constexpr = FEATURES.nope
    VALUE_LANES: tl.constexpr = FEATURES.v_lanes
    QUERIES: tl.constexpr = TILE.queries
    KEYS: tl.constexpr = TILE.keys
    block, row, head = place(tl.program_id(0), blocks, pairs, heads)
    first = block * QUERIES
    begin_q = tl.load(cu_q + row)
    count_q = tl.load(cu_q + row + 1) - begin_q
    if first < count_q:
        begin_k = tl.load(cu_k + row)
        count_k = tl.load(cu_k + row + 1) - begin_k
        if not CAUSAL:
            skipped, count_k = part_of(count_k, KEYS)
            begin_k += skipped
            out += tl.program_id(1).to(tl.int64) * out_part
            lse += tl.program_id(1).to(tl.int64) * lse_part
        m = tl.arange(0, QUERIES)
        n = tl.arange(0, KEYS)
        inside = first + m < count_q
        token = (begin_q + first).to(tl.int64)
        q += token * TOKEN_STRIDES.q + head * STRIDES.q_head
        k += begin_k.to(tl.int64) * TOKEN_STRIDES.k + head * STRIDES.k_head
        v += begin_k.to(tl.int64) * TOKEN_STRIDES.v + head * STRIDES.v_head
        k_rope += begin_k.to(tl.int64) * TOKEN_STRIDES.k_rope
        q_nope = _rows(q, m, inside, TOKEN_STRIDES.q, NOPE, FEATURES.nope_lanes)
        q_rope = _rows(q + NOPE, m, inside, TOKEN_STRIDES.q, FEATURES.rope, FEATURES.rope_lanes)
        # Query m sees `seen` + m keys, if there are so many.
        seen = count_k
        end = count_k
        if CAUSAL:
            seen = first + count_k - count_q + 1
            end = tl.minimum(count_k, tl.minimum(first + QUERIES, count_q) + count_k - count_q)
        top = tl.full((QUERIES,), _LOWEST, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES, VALUE_LANES), tl.float32)
        for start in range(0, end, KEYS):
            written = start + n < count_k
            key = _rows(k, n, written, TOKEN_STRIDES.k, NOPE, FEATURES.nope_lanes)
            key_rope = _rows(k_rope, n, written, TOKEN_STRIDES.k_rope, FEATURES.rope, FEATURES.rope_lanes)
            value = _rows(v, n, written, TOKEN_STRIDES.v, FEATURES.v, VALUE_LANES)
            k += KEYS * TOKEN_STRIDES.k
            k_rope += KEYS * TOKEN_STRIDES.k_rope
            v += KEYS * TOKEN_STRIDES.v
            score = tl.dot(q_nope, tl.trans(key), input_precision=FEATURES.precision)
            score = tl.dot(q_rope, tl.trans(key_rope), score, input_precision=FEATURES.precision)
            if start + KEYS > tl.minimum(seen, count_k):
                bound = tl.minimum(seen + m, count_k) if CAUSAL else tl.zeros_like(m) + count_k
                score = tl.where((start + n)[None, :] < bound[:, None], score, _MASKED)
            new_top = tl.maximum(top, tl.max(score, 1) * scale)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(score * scale - new_top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            sums = sums * shrink[:, None]
            top = new_top
            sums = tl.dot(weight.to(value.dtype), value, sums, input_precision=FEATURES.precision)
        divisor = tl.where(total > 0, total, 1.0)
        sums = sums * (1.0 / divisor)[:, None]
        c = tl.arange(0, VALUE_LANES)[None, :]
        mask = inside[:, None]
        if FEATURES.v != VALUE_LANES:
            mask = mask & (c < FEATURES.v)
        at = out + token * STRIDES.out_token + head * STRIDES.out_head + m[:, None] * STRIDES.out_token + c
        tl.store(at, sums.to(out.dtype.element_ty), mask=mask)
        log = tl.where(total > 0, top + tl.log2(divisor), float("-inf")) * _LN2
        tl.store(lse + token * STRIDES.lse_token + head + m * STRIDES.lse_token, log, mask=inside)
