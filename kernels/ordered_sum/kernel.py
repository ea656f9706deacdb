"""The tree in Triton: a program holds every part of a block of one token's features."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["part_stride"])
def ordered_sum(
    part,
    out,
    part_stride,
    TOKEN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Neighbours are added level by level; PARTS = 2 ** LEVELS. Grid: tokens, blocks of features."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, PARTS).to(tl.int64)
    at = part + token * TOKEN_STRIDE + e[:, None] + g[None, :] * part_stride
    x = tl.load(at, mask=(e < FEATURES)[:, None], other=0.0)
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, [BLOCK, PARTS >> (level + 1), 2]))
        x = left + right
    total = tl.reshape(x, [BLOCK])
    tl.store(out + token * OUT_STRIDE + e, total.to(out.dtype.element_ty), mask=e < FEATURES)
