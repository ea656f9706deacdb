"""The merge in Triton: a block of (token, head) pairs a program; every number is read once and written once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "heads"])
def merge(
    a,
    a_lse,
    b,
    b_lse,
    out,
    out_lse,
    pairs,
    heads,
    A_ROW: tl.constexpr,
    A_HEAD: tl.constexpr,
    B_ROW: tl.constexpr,
    B_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    LANES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Weights exp(lse) over the larger of the two; the LSEs are contiguous [T, H]."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    token = (pair // heads).to(tl.int64)
    head = pair % heads
    x = tl.load(a_lse + pair, mask=inside, other=float("-inf"))
    y = tl.load(b_lse + pair, mask=inside, other=float("-inf"))
    top = tl.maximum(x, y)
    # With no keys on either side the shift must stay finite: exp(-inf - 0) is the 0 that is wanted, -inf - -inf is NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    x = tl.exp(x - shift)
    y = tl.exp(y - shift)
    total = x + y
    divisor = tl.where(total > 0, total, 1.0)
    c = tl.arange(0, LANES)[None, :]
    mask = inside[:, None] & (c < VALUE)
    left = tl.load(a + (token * A_ROW + head * A_HEAD)[:, None] + c, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(b + (token * B_ROW + head * B_HEAD)[:, None] + c, mask=mask, other=0.0).to(tl.float32)
    merged = (x[:, None] * left + y[:, None] * right) / divisor[:, None]
    place = out + (token * OUT_ROW + head * OUT_HEAD)[:, None] + c
    tl.store(place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + pair, tl.where(total > 0, shift + tl.log(divisor), float("-inf")), mask=inside)
