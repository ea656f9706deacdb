"""Norm of the latent, rope of query and key, and the cache write in one Triton kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_entry import store_entry


@triton.jit
def _rotate(x, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th (cos, sin) of `turn`, [BLOCK]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(turn, [1, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit(do_not_specialize=["slots"])
def rope_cache(
    q,
    kv,
    weight,
    rotation,
    cache_slot,
    latent,
    cache,
    slots,
    eps,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    ROTATION_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    ENTRY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (token, part): part 0 makes the token's cache entry, the others rotate GROUP heads each."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    o = tl.arange(0, ROPE_BLOCK)
    roped = o < ROPE
    turn = tl.load(rotation + token * ROTATION_STRIDE + o, mask=roped, other=0.0)
    if part == 0:
        c = tl.arange(0, LATENT_BLOCK)
        inside = c < LATENT
        w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        slot = tl.load(cache_slot + token)
        # Trigger after the wait: attention may then read what was written before this kernel.
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        source = kv + token * KV_STRIDE
        value = tl.load(source + c, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        key = tl.load(source + LATENT + o, mask=roped, other=0.0, cache_modifier=".cg").to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * w
        turned = tl.reshape(_rotate(tl.reshape(key, [1, ROPE_BLOCK]), turn, 1, ROPE_BLOCK), [ROPE_BLOCK])
        turned = turned.to(latent.dtype.element_ty)
        exists = (slot >= 0) & (slot < slots)
        cached = cache + slot * CACHE_STRIDE
        normed = store_entry(cached, normed.to(latent.dtype.element_ty), turned, exists, LATENT, ROPE, ENTRY)
        entry = latent + token * LATENT_STRIDE
        tl.store(entry + c, normed, mask=inside)
        tl.store(entry + LATENT + o, turned, mask=roped)
    else:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        at = q + token * Q_TOKEN + head[:, None] * Q_HEAD + o[None, :]
        mask = (head < HEADS)[:, None] & roped[None, :]
        x = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(at, _rotate(x, turn, GROUP, ROPE_BLOCK).to(q.dtype.element_ty), mask=mask)
