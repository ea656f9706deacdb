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


@triton.jit(do_not_specialize=["heads", "blocks", "pairs"])
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
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_ROW: tl.constexpr,
    K_HEAD: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    V_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    LSE_ROW: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    NOPE_LANES: tl.constexpr,
    ROPE_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Programs: the `blocks` blocks of queries of each of the `pairs` pairs of row and head. `scale` includes
    log2(e)."""
    block, row, head = place(tl.program_id(0), blocks, pairs, heads)
    first = block * QUERIES
    begin_q = tl.load(cu_q + row)
    count_q = tl.load(cu_q + row + 1) - begin_q
    if first < count_q:
        begin_k = tl.load(cu_k + row)
        count_k = tl.load(cu_k + row + 1) - begin_k
        m = tl.arange(0, QUERIES)
        n = tl.arange(0, KEYS)
        inside = first + m < count_q
        token = (begin_q + first).to(tl.int64)
        q += token * Q_ROW + head * Q_HEAD
        k += begin_k.to(tl.int64) * K_ROW + head * K_HEAD
        v += begin_k.to(tl.int64) * V_ROW + head * V_HEAD
        k_rope += begin_k.to(tl.int64) * ROPE_ROW
        q_nope = _rows(q, m, inside, Q_ROW, NOPE, NOPE_LANES)
        q_rope = _rows(q + NOPE, m, inside, Q_ROW, ROPE, ROPE_LANES)
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
            key = _rows(k, n, written, K_ROW, NOPE, NOPE_LANES)
            key_rope = _rows(k_rope, n, written, ROPE_ROW, ROPE, ROPE_LANES)
            value = _rows(v, n, written, V_ROW, VALUE, VALUE_LANES)
            k += KEYS * K_ROW
            k_rope += KEYS * ROPE_ROW
            v += KEYS * V_ROW
            score = tl.dot(q_nope, tl.trans(key), input_precision=PRECISION)
            score = tl.dot(q_rope, tl.trans(key_rope), score, input_precision=PRECISION)
            if start + KEYS > tl.minimum(seen, count_k):
                bound = tl.minimum(seen + m, count_k) if CAUSAL else tl.zeros_like(m) + count_k
                score = tl.where((start + n)[None, :] < bound[:, None], score, _MASKED)
            new_top = tl.maximum(top, tl.max(score, 1) * scale)
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(score * scale - new_top[:, None])
            total = total * shrink + tl.sum(weight, 1)
            sums = sums * shrink[:, None]
            top = new_top
            sums = tl.dot(weight.to(value.dtype), value, sums, input_precision=PRECISION)
        divisor = tl.where(total > 0, total, 1.0)
        sums = sums * (1.0 / divisor)[:, None]
        c = tl.arange(0, VALUE_LANES)[None, :]
        mask = inside[:, None]
        if VALUE != VALUE_LANES:
            mask = mask & (c < VALUE)
        at = out + token * OUT_ROW + head * OUT_HEAD + m[:, None] * OUT_ROW + c
        tl.store(at, sums.to(out.dtype.element_ty), mask=mask)
        log = tl.where(total > 0, top + tl.log2(divisor), float("-inf")) * _LN2
        tl.store(lse + token * LSE_ROW + head + m * LSE_ROW, log, mask=inside)
