"""From the projections to the absorbed query and the cache entry, in one Triton launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _rotate(x, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th (cos, sin) of `turn`, [BLOCK]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(turn, [1, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit
def _write_entry(
    source,
    norm,
    turn,
    entry,
    exists,
    eps,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """A token's cache entry: the normed latent, then the rotated key."""
    c = tl.arange(0, LATENT_BLOCK)
    inside = c < LATENT
    o = tl.arange(0, ROPE_BLOCK)
    roped = o < ROPE
    w = tl.load(norm + c, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(source + c, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    key = tl.load(source + LATENT + o, mask=roped, other=0.0, cache_modifier=".cg").to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * w
    turned = tl.reshape(_rotate(tl.reshape(key, [1, ROPE_BLOCK]), turn, 1, ROPE_BLOCK), [ROPE_BLOCK])
    tl.store(entry + c, normed.to(entry.dtype.element_ty), mask=inside & exists)
    tl.store(entry + LATENT + o, turned.to(entry.dtype.element_ty), mask=roped & exists)


@triton.jit
def _rope_heads(
    source,
    turn,
    target,
    first,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
):
    """Rotate the rope part of GROUP heads of one token."""
    head = first + tl.arange(0, GROUP)
    o = tl.arange(0, ROPE_BLOCK)
    mask = (head < HEADS)[:, None] & (o < ROPE)[None, :]
    x = tl.load(source + head[:, None] * FROM + o[None, :], mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    turned = _rotate(x, turn, GROUP, ROPE_BLOCK)
    tl.store(target + head[:, None] * TO + o[None, :], turned.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "slots", "eps"])
def rope_absorb(
    q,
    kv,
    weight,
    norm,
    rotation,
    position,
    cache_slot,
    out,
    cache,
    tokens,
    slots,
    eps,
    Q_TOKEN: tl.constexpr,
    KV_TOKEN: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs: for every head and COLUMNS latent features, W_UK into all tokens' queries; then for every token the
    rope of GROUP heads each, and its cache entry. Lets its successor start only after its own wait, so attention may
    read all older cache entries before its own. Reads positions and cache slots before its wait.
    """
    CHUNKS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    PARTS: tl.constexpr = 1 + (HEADS + GROUP - 1) // GROUP
    C: tl.constexpr = LATENT + ROPE
    D: tl.constexpr = NOPE + ROPE
    program = tl.program_id(0)
    if program < HEADS * CHUNKS:
        head = program // CHUNKS
        n = tl.arange(0, NOPE_BLOCK)
        c = program % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
        at = weight + head.to(tl.int64) * W_HEAD + n[:, None] * W_ROW + c[None, :]
        tile = tl.load(at, mask=(n < NOPE)[:, None] & (c < LATENT)[None, :], other=0.0)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        t = tl.arange(0, TOKENS)
        inside = (t < tokens)[:, None]
        source = q + t[:, None] * Q_TOKEN + head * D + n[None, :]
        x = tl.load(source, mask=inside & (n < NOPE)[None, :], other=0.0, cache_modifier=".cg")
        y = tl.dot(x, tile, input_precision=PRECISION)
        target = out + (t * HEADS + head).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=inside & (c < LATENT)[None, :])
    else:
        program -= HEADS * CHUNKS
        token = (program // PARTS).to(tl.int64)
        part = program % PARTS
        o = tl.arange(0, ROPE_BLOCK)
        turn = tl.load(rotation + tl.load(position + token) * ROPE + o, mask=o < ROPE, other=0.0)
        slot = tl.load(cache_slot + token)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        if part == 0:
            exists = (slot >= 0) & (slot < slots)
            _write_entry(
                kv + token * KV_TOKEN, norm, turn, cache + slot * CACHE_STRIDE, exists, eps, LATENT, LATENT_BLOCK, ROPE,
                ROPE_BLOCK,
            )  # fmt: skip
        else:
            first = (part - 1) * GROUP
            _rope_heads(
                q + token * Q_TOKEN + NOPE, turn, out + token * HEADS * C + LATENT, first, D, C, HEADS, GROUP, ROPE,
                ROPE_BLOCK,
            )  # fmt: skip
