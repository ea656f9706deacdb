"""Work between the projections and attention, in one kernel: norm of the latent, rope of query and key, cache write.

Shape legend: T tokens, H heads, O rope features, L latent features, C = L + O, P pages, K = 64 entries per page.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_entry import entry_of, rope_cache_reference, store_entry
from kernels.page import PAGE_TOKENS

_GROUP = 16
"""Heads a program rotates."""


def rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Rotate the rope part of the queries in place; norm the latent and rotate the key; write both to the cache.

    - `q_THO`: rope part of every head's query, usually a strided view. Features (2i, 2i + 1) are one pair that turns by
      the token's i-th angle (Su et al., RoFormer, 2021), the order of the published checkpoints.
    - `kv_TC`: output of the down-projection, latent then rope key, not yet normed. L = `weight_L`.shape[0].
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1).
    - `cache_slot_T`: int64 index into the flattened cache [pages * 64]. Padding and suppressed writes point into the
      null page. A slot outside the cache, -1 included, is the caller's error and never written (on a CPU it raises).
    - `latent_TC`: receives what is read where something was written, for prefill's own keys. In the model's dtype.
    - `cache_PKC`: entries in that dtype, or FP8 entries as bytes, [P, K, E] (`kernels.latent_entry`).

    Strides between tokens and heads are even, O and L too. The norm and the rotation are computed in fp32 and rounded
    once; FP8 entries then once more.

    `dependent`: programmatic dependent launch (compute capability 9.0 and above). It is safe when the rotation and the
    cache slots were not written by the kernel launched just before; they are read ahead of the wait for it. The kernel
    lets its successor start only after its own wait, as early reads of attention want it.
    """
    tensors = (q_THO, kv_TC, weight_L, rotation_TO, cache_slot_T, latent_TC, cache_PKC)
    if q_THO.is_cuda:
        launch_rope_cache(*tensors, eps, dependent=dependent)
    else:
        rope_cache_reference(*tensors, eps)


def launch_rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    """`rope_cache` as a Triton kernel."""
    tokens, heads, rope = q_THO.shape
    if not tokens:
        return
    latent = weight_L.shape[0]
    if cache_PKC.stride(0) != PAGE_TOKENS * cache_PKC.stride(1):
        raise ValueError(f"cache entries must be equally spaced, but the strides are {cache_PKC.stride()}")
    group = min(_GROUP, triton.next_power_of_2(heads))
    latent_block = triton.next_power_of_2(latent)
    entry = entry_of(cache_PKC, latent, rope, latent_TC.dtype)
    rope_cache_kernel[(tokens, 1 + triton.cdiv(heads, group))](
        q_THO,
        kv_TC,
        weight_L,
        rotation_TO,
        cache_slot_T,
        latent_TC,
        cache_PKC,
        cache_PKC.shape[0] * PAGE_TOKENS,
        eps,
        Q_TOKEN=q_THO.stride(0),
        Q_HEAD=q_THO.stride(1),
        KV_STRIDE=kv_TC.stride(0),
        ROTATION_STRIDE=rotation_TO.stride(0),
        LATENT_STRIDE=latent_TC.stride(0),
        CACHE_STRIDE=cache_PKC.stride(1),
        HEADS=heads,
        GROUP=group,
        LATENT=latent,
        LATENT_BLOCK=latent_block,
        ROPE=rope,
        ROPE_BLOCK=triton.next_power_of_2(rope),
        ENTRY=entry,
        DEPENDENT=dependent,
        num_warps=min(max(latent_block // 128, 1), 4),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def _rotate(x, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th (cos, sin) of `turn`, [BLOCK]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(turn, [1, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit(do_not_specialize=["slots"])
def rope_cache_kernel(
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
