"""The merge in Triton: a block of (token, head) pairs per program; every number is read once and written once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs", "heads", "parts", "b_lse_part"])
def merge(
    a,
    a_lse,
    b,
    b_lse,
    out,
    out_lse,
    pairs,
    heads,
    parts,
    b_part,
    b_lse_part,
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
    """Weights exp(lse) over the largest of all; the LSEs are contiguous [T, H]. `b_part`, `b_lse_part`: elements from
    one of the `parts` parts of b to the next."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    token = (pair // heads).to(tl.int64)
    head = pair % heads
    c = tl.arange(0, LANES)[None, :]
    mask = inside[:, None] & (c < VALUE)
    left_lse = tl.load(a_lse + pair, mask=inside, other=float("-inf"))
    top = left_lse
    for part in range(parts):
        top = tl.maximum(top, tl.load(b_lse + part * b_lse_part + pair, mask=inside, other=float("-inf")))
    # With no keys on any side the shift must stay finite: exp(-inf - 0) is the 0 that is wanted, -inf - -inf is NaN.
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(left_lse - shift)
    left = tl.load(a + (token * A_ROW + head * A_HEAD)[:, None] + c, mask=mask, other=0.0).to(tl.float32)
    sums = total[:, None] * left
    place = b + (token * B_ROW + head * B_HEAD)[:, None] + c
    for part in range(parts):
        weight = tl.exp(tl.load(b_lse + part * b_lse_part + pair, mask=inside, other=float("-inf")) - shift)
        sums += weight[:, None] * tl.load(place, mask=mask, other=0.0).to(tl.float32)
        total += weight
        place += b_part
    divisor = tl.where(total > 0, total, 1.0)
    merged = sums / divisor[:, None]
    place = out + (token * OUT_ROW + head * OUT_HEAD)[:, None] + c
    tl.store(place, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + pair, tl.where(total > 0, shift + tl.log(divisor), float("-inf")), mask=inside)
