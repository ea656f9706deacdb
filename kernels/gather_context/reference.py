"""Reference of `kernels.gather_context`, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.latent_entry import entries
from kernels.page import PAGE_TOKENS


def gather_context(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, begin: int, latent: int = 0
) -> None:
    """See `kernels.gather_context.gather_context`."""
    bounds = cu_B1.tolist()
    for page_P, first, end in zip(page_BP, bounds, bounds[1:], strict=False):
        entry = torch.arange(begin, begin + end - first)
        found_SC = cache_PKC[page_P[entry // PAGE_TOKENS].long(), entry % PAGE_TOKENS]
        out_SC[first:end] = entries(found_SC, latent, out_SC.shape[1] - latent, out_SC.dtype)
