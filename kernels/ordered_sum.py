"""Sums of parts in an order that is stated, so that it does not matter who computed which of them.

Shape legend: G parts, T tokens, E features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def ordered_sum(part_GTE: Tensor, out_TE: Tensor, *, dependent: bool = False) -> None:
    """out = ((part 0 + part 1) + (part 2 + part 3)) + ..., a balanced binary tree in fp32, rounded once.

    G is a power of two (else ValueError). Equal neighbouring shares of the parts are subtrees: summed apart into fp32,
    their sums in order give the same bits. `part_GTE` is fp32, `out_TE` of any floating dtype; the features of both are
    contiguous. `dependent`: programmatic dependent launch, after whose wait the kernel behind may start.
    """
    parts = part_GTE.shape[0]
    if parts < 1 or parts & (parts - 1):
        raise ValueError(f"{parts} parts make no balanced tree: their number must be a power of two")
    if part_GTE.is_cuda:
        launch_ordered_sum(part_GTE, out_TE, dependent=dependent)
    else:
        ordered_sum_reference(part_GTE, out_TE)


def ordered_sum_reference(part_GTE: Tensor, out_TE: Tensor) -> None:
    """`ordered_sum` in plain torch."""
    while len(part_GTE) > 1:
        part_GTE = part_GTE[0::2] + part_GTE[1::2]
    out_TE.copy_(part_GTE[0])


def launch_ordered_sum(part_GTE: Tensor, out_TE: Tensor, *, dependent: bool = False) -> None:
    """`ordered_sum` as a Triton kernel."""
    parts, tokens, features = part_GTE.shape
    if not tokens:
        return
    block = max(16, min(triton.next_power_of_2(features), 2048 // parts))
    ordered_sum_kernel[(tokens, triton.cdiv(features, block))](
        part_GTE,
        out_TE,
        part_GTE.stride(0),
        TOKEN_STRIDE=part_GTE.stride(1),
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        PARTS=parts,
        LEVELS=parts.bit_length() - 1,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit(do_not_specialize=["part_stride"])
def ordered_sum_kernel(
    part,
    out,
    part_stride,
    TOKEN_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Every part of a block of one token's features: neighbours are added level by level. PARTS = 2 ** LEVELS. Grid:
    tokens, blocks of features."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.arange(0, PARTS).to(tl.int64)
    at = part + token * TOKEN_STRIDE + e[:, None] + g[None, :] * part_stride
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    x = tl.load(at, mask=(e < FEATURES)[:, None], other=0.0, cache_modifier=".cg")
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(x, [BLOCK, PARTS >> (level + 1), 2]))
        x = left + right
    total = tl.reshape(x, [BLOCK])
    tl.store(out + token * OUT_STRIDE + e, total.to(out.dtype.element_ty), mask=e < FEATURES)
