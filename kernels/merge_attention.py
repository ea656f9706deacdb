"""Joins attention results over disjoint sets of keys into the result over their union.

Shape legend: T query tokens, H heads, V value features, Z parts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096
"""Numbers of each part a program holds."""


def merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """out = (exp(a_lse) a + exp(b_lse) b) / (exp(a_lse) + exp(b_lse)), out_lse = log of that denominator.

    LSE is the natural logarithm of the sum of exponentials of the scaled scores, fp32. A part without keys has output 0
    and LSE -inf; such parts alone give 0 and -inf, never NaN. `b_THV`, `b_lse_TH` may be `b_ZTHV` and `b_lse_ZTH`: then
    all Z parts are joined with `a`. The outputs may be `a_THV` and `a_lse_TH`. A head's features lie side by side, and
    the LSEs are contiguous.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if a_THV.is_cuda:
        launch_merge_attention(a_THV, a_lse_TH, b_THV, b_lse_TH, out_THV, out_lse_TH)
        return
    merge_attention_reference(a_THV, a_lse_TH, b_THV, b_lse_TH, out_THV, out_lse_TH)


def merge_attention_reference(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """`merge_attention` in plain torch."""
    compute = torch.promote_types(a_THV.dtype, torch.float32)
    b_ZTHV = b_THV if b_THV.ndim == 4 else b_THV.unsqueeze(0)
    part_PTHV = torch.cat([a_THV.unsqueeze(0).to(compute), b_ZTHV.to(compute)])
    lse_PTH = torch.cat([a_lse_TH.unsqueeze(0), b_lse_TH.view(b_ZTHV.shape[:3])])
    top_TH = lse_PTH.amax(0)
    # With no keys on any side the shift must stay finite: exp(-inf - 0) is the 0 that is wanted, -inf - -inf is NaN.
    top_TH = top_TH.masked_fill(top_TH == -torch.inf, 0.0)
    weight_PTH = torch.exp(lse_PTH - top_TH)
    sum_TH = weight_PTH.sum(0)
    merged_THV = (weight_PTH.unsqueeze(-1) * part_PTHV).sum(0)
    out_THV.copy_(merged_THV / sum_TH.masked_fill(sum_TH == 0, 1.0).unsqueeze(-1))
    out_lse_TH.copy_(top_TH + torch.log(sum_TH))


def launch_merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """`merge_attention` as a Triton kernel."""
    tokens, heads, value = a_THV.shape
    if not tokens:
        return
    parts, b_part, b_lse_part = 1, 0, 0
    if b_THV.ndim == 4:
        parts, b_part, b_lse_part = b_THV.shape[0], b_THV.stride(0), b_lse_TH.stride(0)
        b_THV, b_lse_TH = b_THV[0], b_lse_TH[0]
    for tensor in (a_THV, b_THV, out_THV):
        assert tensor.stride(2) == 1
    for tensor in (a_lse_TH, b_lse_TH, out_lse_TH):
        assert tensor.is_contiguous()
    lanes = triton.next_power_of_2(value)
    pairs = max(_ELEMENTS // lanes, 1)
    merge_attention_kernel[(triton.cdiv(tokens * heads, pairs),)](
        a_THV,
        a_lse_TH,
        b_THV,
        b_lse_TH,
        out_THV,
        out_lse_TH,
        tokens * heads,
        heads,
        parts,
        b_part,
        b_lse_part,
        A_ROW=a_THV.stride(0),
        A_HEAD=a_THV.stride(1),
        B_ROW=b_THV.stride(0),
        B_HEAD=b_THV.stride(1),
        OUT_ROW=out_THV.stride(0),
        OUT_HEAD=out_THV.stride(1),
        VALUE=value,
        LANES=lanes,
        PAIRS=pairs,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["pairs", "heads", "parts", "b_lse_part"])
def merge_attention_kernel(
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
    """A block of (token, head) pairs. Every number of the outputs' features is read once and written once. Weights are
    exp(lse) over the largest of all; the LSEs are contiguous [T, H]. `b_part`, `b_lse_part`: elements from one of the
    `parts` parts of b to the next."""
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
