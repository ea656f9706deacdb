"""Launches the Triton kernel. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is safe when the rotation
and the cache slots were not written by the kernel launched just before; they are read ahead of the wait for it. The
kernel lets its successor start only after its own wait, as early reads of attention want it.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.latent_entry import entry_of
from kernels.page import PAGE_TOKENS
from kernels.rope_cache import kernel

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
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.rope_cache.rope_cache`."""
    tokens, heads, rope = q_THO.shape
    if not tokens:
        return
    latent = weight_L.shape[0]
    if cache_PKC.stride(0) != PAGE_TOKENS * cache_PKC.stride(1):
        raise ValueError(f"cache entries must be equally spaced, but the strides are {cache_PKC.stride()}")
    group = min(_GROUP, triton.next_power_of_2(heads))
    latent_block = triton.next_power_of_2(latent)
    entry = entry_of(cache_PKC, latent, rope, latent_TC.dtype)
    kernel.rope_cache[(tokens, 1 + triton.cdiv(heads, group))](
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
