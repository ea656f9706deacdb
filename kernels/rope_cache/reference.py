"""Reference of `kernels.rope_cache` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.latent_entry import write


def rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    eps: float,
) -> None:
    """See `kernels.rope_cache.rope_cache`."""
    latent = weight_L.shape[0]
    compute = torch.promote_types(kv_TC.dtype, torch.float32)
    turn_TI = _pairs(rotation_TO.to(compute))
    normed_TL = F.rms_norm(kv_TC[:, :latent].to(compute), weight_L.shape, weight_L.to(compute), eps)
    latent_TC[:, :latent].copy_(normed_TL)
    latent_TC[:, latent:].copy_(_rotate(kv_TC[:, latent:].to(compute), turn_TI))
    q_THO.copy_(_rotate(q_THO.to(compute), turn_TI.unsqueeze(1)))
    write(latent_TC, latent, cache_slot_T, cache_PKC)


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(_pairs(x) * turn).flatten(-2)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
