"""References of `kernels.head_linear` on torch's batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear.reference import invariant_groups
from kernels.parts import added
from kernels.rope_cache import rope_cache_reference


def head_linear(x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor) -> None:
    """See `kernels.head_linear.head_linear`."""
    out_THL.copy_(torch.bmm(x_THN.transpose(0, 1), weight_HNL).transpose(0, 1))


def invariant_head_linear(x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor) -> None:
    """`head_linear` in an order that depends on N alone."""
    invariant_groups(x_THN, weight_HNL.transpose(1, 2), out_THL)


def absorb(q_THD: Tensor, weight_HNL: Tensor, out_THC: Tensor) -> None:
    """See `kernels.head_linear.absorb`."""
    nope, latent = weight_HNL.shape[1:]
    head_linear(q_THD[..., :nope], weight_HNL, out_THC[..., :latent])
    out_THC[..., latent:] = q_THD[..., nope:]


def rope_absorb(
    q_THD: Tensor,
    kv_TC: Tensor,
    weight_HNL: Tensor,
    norm_L: Tensor,
    rotation_PO: Tensor,
    position_T: Tensor,
    cache_slot_T: Tensor,
    out_THC: Tensor,
    cache_PKC: Tensor,
    eps: float,
) -> None:
    """See `kernels.head_linear.rope_absorb`."""
    latent = weight_HNL.shape[2]
    if kv_TC.dim() == 3:
        q_THD, kv_TC = (added(x, out_THC.dtype) for x in (q_THD, kv_TC))
    absorb(q_THD, weight_HNL, out_THC)
    rope_cache_reference(
        out_THC[..., latent:],
        kv_TC,
        norm_L,
        rotation_PO[position_T],
        cache_slot_T,
        torch.empty_like(kv_TC, memory_format=torch.contiguous_format),
        cache_PKC,
        eps,
    )
