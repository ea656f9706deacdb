"""Launches the Triton gather. Allocates nothing and waits for nothing."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kernels.gather_context import kernel
from kernels.latent_entry import entry_of
from kernels.page import PAGE_TOKENS

_ENTRIES, _COLUMNS, _ROWS = 32, 64, 16


def gather_context(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, begin: int, latent: int = 0
) -> None:
    """See `kernels.gather_context.gather_context`."""
    (entries, features), rows = out_SC.shape, page_BP.shape[0]
    if not entries:
        return
    if cache_PKC.stride()[1:] != (cache_PKC.stride(0) // PAGE_TOKENS, 1) or out_SC.stride(1) != 1:
        raise ValueError("cache entries are equally spaced, and features lie side by side")
    if cu_B1.shape != (rows + 1,) or {page_BP.dtype, cu_B1.dtype} != {torch.int32} or page_BP.stride(1) != 1:
        raise ValueError(f"int32 page tables of {cu_B1.shape[0] - 1} rows in contiguous rows, not {page_BP.shape}")
    if cache_PKC.dtype not in (out_SC.dtype, torch.uint8):
        raise ValueError(f"the cache is {cache_PKC.dtype} {tuple(cache_PKC.shape)}, what is asked for {out_SC.dtype}")
    kernel.gather[(triton.cdiv(entries, _ENTRIES), triton.cdiv(features, _COLUMNS))](
        cache_PKC,
        page_BP,
        cu_B1,
        out_SC,
        rows,
        entries,
        begin,
        page_BP.stride(0),
        CACHE_STRIDE=cache_PKC.stride(1),
        OUT_STRIDE=out_SC.stride(0),
        FEATURES=features,
        LATENT=latent,
        ENTRY=entry_of(cache_PKC, latent, features - latent, out_SC.dtype),
        PAGE=PAGE_TOKENS,
        ENTRIES=_ENTRIES,
        COLUMNS=_COLUMNS,
        ROWS=_ROWS,
        num_warps=4,
    )
