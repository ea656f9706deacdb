"""The residual stream of a few tokens in fp32, and its pending norm: where layers begin, and after an all-reduce.

A pending norm is what the kernels of few tokens hand one another instead of normed activations. The sum of squares of a
row is complete only when every program that wrote a piece of the row is done, so the division by the root mean square
is left to whoever multiplies the row by a matrix: it commutes with the product.

Shape legend: T tokens, E features, Y rows of a table, P = E / 16 pieces.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PIECE = 16
"""Features of one sum of squares: the columns of one program."""
ENTERED = 512
"""Features of a program, so that several bring a token's row from memory at once."""
_PIECE = tl.constexpr(PIECE)


@dataclass(frozen=True)
class PendingNorm:
    """Rows that are normed but for the division by their root mean square."""

    x_TE: Tensor
    """The rows times the norm's weight, and a factor of each row where it is to be scaled, in the dtype of the
    products."""
    square_TP: Tensor
    """fp32: sums of squares of 16 features each, of the rows without the weight. Who divides needs their sum alone, so
    a program that ends within 16 features may leave the squares of its part in a piece beside."""
    eps: float

    def __post_init__(self) -> None:
        tokens, features = self.x_TE.shape
        if features % PIECE or self.square_TP.shape != (tokens, features // PIECE):
            raise ValueError(f"{features} features of {tokens} tokens have no sums {tuple(self.square_TP.shape)}")
        if self.square_TP.dtype != torch.float32 or not self.square_TP.is_contiguous():
            raise ValueError("sums of squares are contiguous fp32")

    @staticmethod
    def empty(tokens: int, features: int, eps: float, dtype: torch.dtype, empty: Callable[..., Tensor]) -> PendingNorm:
        """Memory for one, from `empty(*shape, dtype=...)`."""
        square_TP = empty(tokens, features // PIECE, dtype=torch.float32)
        return PendingNorm(empty(tokens, features, dtype=dtype), square_TP, eps)


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
        write(residual_TE, norm_E, out)
        return
    launch_enter(source_YE, id_T, residual_TE, norm_E, out, add=add, dependent=dependent)


def write(residual_TE: Tensor, norm_E: Tensor, out: PendingNorm, scale_T: Tensor | None = None) -> None:
    """The pending norm of rows, each times its `scale_T` if there is one, in plain torch."""
    weighted_TE = residual_TE * norm_E.float()
    out.x_TE.copy_(weighted_TE if scale_T is None else weighted_TE * scale_T.unsqueeze(1))
    out.square_TP.copy_(residual_TE.square().view(*out.square_TP.shape, PIECE).sum(-1))


def inverse_rms(pending: PendingNorm) -> Tensor:
    """Compute the factor that is left to multiply each row by, fp32 [T, 1], in plain torch."""
    features = pending.x_TE.shape[1]
    return torch.rsqrt(pending.square_TP.sum(1, keepdim=True) / features + pending.eps)


def normed(pending: PendingNorm) -> Tensor:
    """The finished norm, fp32 [T, E], in plain torch."""
    return pending.x_TE.float() * inverse_rms(pending)


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
    enter_kernel[(tokens, triton.cdiv(features, block))](
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


@triton.jit
def enter_kernel(
    source,
    ids,
    residual,
    norm,
    out,
    square,
    SOURCE_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    GATHER: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Enter some features of a token: residual = or += its row (GATHER: of a table); out = residual * norm, sums of
    squares by pieces. Grid: tokens, blocks of features."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = e < FEATURES
    w = tl.load(norm + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: kernels after this may read before theirs what precedes this one
    row = token
    if GATHER:
        row = tl.load(ids + token).to(tl.int64)
    value = tl.load(source + row * SOURCE_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    place = residual + token * RESIDUAL_STRIDE + e
    if ADD:
        value += tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(place, value, mask=inside)
    tl.store(out + token * OUT_STRIDE + e, (value * w).to(out.dtype.element_ty), mask=inside)
    piece = tl.sum(tl.reshape(value * value, [BLOCK // _PIECE, _PIECE]), 1)
    p = tl.program_id(1) * (BLOCK // _PIECE) + tl.arange(0, BLOCK // _PIECE)
    tl.store(square + token * PIECES + p, piece, mask=p < PIECES)
