"""The residual stream of a few tokens in fp32, and its pending norm: where layers begin, and after an all-reduce.

Shape legend: T tokens, E features, Y rows of a table.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.pending_norm import kernel, reference
from kernels.pending_norm.pieces import PIECE, PendingNorm

__all__ = ["PIECE", "PendingNorm", "add", "enter"]

ENTERED = 512
"""Features of a program, so that several bring a token's row from memory at once."""


def enter(
    source_YE: Tensor,
    id_T: Tensor | None,
    residual_TE: Tensor,
    norm_E: Tensor,
    out: PendingNorm,
    *,
    dependent: bool = False,
) -> None:
    """residual = rows `id_T` of `source_YE`, or without ids `source_YE` itself; `out` = its pending norm.

    `residual_TE`: fp32. `dependent`: programmatic dependent launch. It is always safe, and what was written before the
    kernel before this one may be read by those after this one before they wait.
    """
    _enter(source_YE, id_T, residual_TE, norm_E, out, add=False, dependent=dependent)


def add(x_TE: Tensor, residual_TE: Tensor, norm_E: Tensor, out: PendingNorm, *, dependent: bool = False) -> None:
    """residual += x in place; `out` = its pending norm."""
    _enter(x_TE, None, residual_TE, norm_E, out, add=True, dependent=dependent)


def _enter(
    source_YE: Tensor,
    id_T: Tensor | None,
    residual_TE: Tensor,
    norm_E: Tensor,
    out: PendingNorm,
    *,
    add: bool,
    dependent: bool,
) -> None:
    if not residual_TE.is_cuda:
        rows_TE = (source_YE if id_T is None else source_YE[id_T]).float()
        residual_TE.copy_(residual_TE + rows_TE if add else rows_TE)
        reference.write(residual_TE, norm_E, out)
        return
    launch_enter(source_YE, id_T, residual_TE, norm_E, out, add=add, dependent=dependent)


def launch_enter(
    source_YE: Tensor,
    id_T: Tensor | None,
    residual_TE: Tensor,
    norm_E: Tensor,
    out: PendingNorm,
    *,
    add: bool = False,
    dependent: bool = False,
) -> None:
    """`enter` or `add` as a Triton kernel."""
    tokens, features = residual_TE.shape
    if id_T is not None and not id_T.is_contiguous():
        raise ValueError("ids are contiguous")
    block = min(triton.next_power_of_2(features), ENTERED)
    kernel.enter[(tokens, triton.cdiv(features, block))](
        source_YE,
        source_YE if id_T is None else id_T,
        residual_TE,
        norm_E,
        out.x_TE,
        out.square_TP,
        SOURCE_STRIDE=source_YE.stride(0),
        RESIDUAL_STRIDE=residual_TE.stride(0),
        OUT_STRIDE=out.x_TE.stride(0),
        FEATURES=features,
        BLOCK=block,
        PIECES=features // PIECE,
        GATHER=id_T is not None,
        ADD=add,
        DEPENDENT=dependent,
        num_warps=max(block // 256, 1),
        **({"launch_pdl": True} if dependent else {}),
    )
