"""Gathers pieces of cached context, which lie in pages all over the cache, one row's behind the other's.

Shape legend: B rows, P pages (of the cache, or of a row's page table), K = 64 entries per page, C cached features, S
gathered entries.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.latent_entry import GROUP, entries, entry_of
from kernels.page import PAGE_TOKENS

_ENTRIES, _COLUMNS, _ROWS = 32, 64, 16
_GROUP = tl.constexpr(GROUP)


def gather_context(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, *, begin: int, latent: int = 0
) -> None:
    """out[cu[b] + i] = entry `begin` + i of row b, for every i < cu[b + 1] - cu[b].

    - `cache_PKC`: entry i of a row lies at [page_BP[b, i // 64], i % 64]; entries are equally spaced.
    - `page_BP`: int32. What it holds behind a row's entries does not matter.
    - `cu_B1`: int32 [B + 1], from 0 to S. A row without entries begins where the next one does.
    - `latent`: how many of an entry's features are its latent. Of FP8 entries (`kernels.latent_entry`) it must be said.
    - `out_SC`: dtype of the cache, or of the model whose entries are FP8. S as `cu_B1` ends, else entries are missing
      or arbitrary.
    """
    compute = launch_gather_context if cache_PKC.is_cuda else gather_context_reference
    compute(cache_PKC, page_BP, cu_B1, out_SC, begin, latent)


def gather_context_reference(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, begin: int, latent: int = 0
) -> None:
    """`gather_context` in plain torch."""
    bounds = cu_B1.tolist()
    for page_P, first, end in zip(page_BP, bounds, bounds[1:], strict=False):
        entry = torch.arange(begin, begin + end - first)
        found_SC = cache_PKC[page_P[entry // PAGE_TOKENS].long(), entry % PAGE_TOKENS]
        out_SC[first:end] = entries(found_SC, latent, out_SC.shape[1] - latent, out_SC.dtype)


def launch_gather_context(
    cache_PKC: Tensor, page_BP: Tensor, cu_B1: Tensor, out_SC: Tensor, begin: int, latent: int = 0
) -> None:
    """`gather_context` as a Triton kernel."""
    (count, features), rows = out_SC.shape, page_BP.shape[0]
    if not count:
        return
    if cache_PKC.stride()[1:] != (cache_PKC.stride(0) // PAGE_TOKENS, 1) or out_SC.stride(1) != 1:
        raise ValueError("cache entries are equally spaced, and features lie side by side")
    if cu_B1.shape != (rows + 1,) or {page_BP.dtype, cu_B1.dtype} != {torch.int32} or page_BP.stride(1) != 1:
        raise ValueError(f"int32 page tables of {cu_B1.shape[0] - 1} rows in contiguous rows, not {page_BP.shape}")
    if cache_PKC.dtype not in (out_SC.dtype, torch.uint8):
        raise ValueError(f"the cache is {cache_PKC.dtype} {tuple(cache_PKC.shape)}, what is asked for {out_SC.dtype}")
    gather_context_kernel[(triton.cdiv(count, _ENTRIES), triton.cdiv(features, _COLUMNS))](
        cache_PKC,
        page_BP,
        cu_B1,
        out_SC,
        rows,
        count,
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


@triton.jit(do_not_specialize=["rows", "entries", "begin", "table_stride"])
def gather_context_kernel(
    cache,
    table,
    cu,
    out,
    rows,
    entries,
    begin,
    table_stride,
    CACHE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    LATENT: tl.constexpr,
    ENTRY: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gather some features of a block of entries. ROWS: rows that are looked at together for the one an entry belongs
    to."""
    s = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    inside = s < entries
    # As many rows end before an entry, or with it, as there are rows before its own.
    row = tl.zeros([ENTRIES], tl.int32)
    for i in range(1, rows, ROWS):
        n = i + tl.arange(0, ROWS)
        end = tl.load(cu + n, mask=n < rows, other=2147483647)
        row += tl.sum((end[None, :] <= s[:, None]).to(tl.int32), 1)
    entry = begin + s - tl.load(cu + row)
    page = tl.load(table + row.to(tl.int64) * table_stride + entry // PAGE, mask=inside, other=0)
    source = cache + (page.to(tl.int64) * PAGE + entry % PAGE) * CACHE_STRIDE
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = inside[:, None] & (c < FEATURES)
    if ENTRY.fp8:
        of_latent = mask & (c < LATENT)
        code = tl.load(source[:, None] + c, mask=of_latent, other=0)
        scales = (source + ENTRY.scales).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales[:, None] + c // _GROUP, mask=of_latent, other=0.0)
        keys = (source + ENTRY.rope).to(tl.pointer_type(out.dtype.element_ty))
        key = tl.load(keys[:, None] + c - LATENT, mask=mask & (c >= LATENT), other=0.0)
        number = code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
        value = tl.where(c < LATENT, number.to(key.dtype), key)
    else:
        value = tl.load(source[:, None] + c, mask=mask)
    tl.store(out + s.to(tl.int64)[:, None] * OUT_STRIDE + c, value, mask=mask)
