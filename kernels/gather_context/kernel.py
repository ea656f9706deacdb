"""The gather in Triton: a program copies some features of a block of entries."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.latent_entry import GROUP

_GROUP = tl.constexpr(GROUP)


@triton.jit(do_not_specialize=["rows", "entries", "begin", "table_stride"])
def gather(
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
    """ROWS: rows that are looked at together for the one an entry belongs to."""
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
