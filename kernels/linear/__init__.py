"""Products of activations with a weight matrix; for few tokens, in one launch with the norm before and the sum after.

Shape legend: T tokens, E input features, F output features, I intermediate features (F = 2 I: gate, then up),
A features of the next norm, P parts of a sum (of a pending norm: one for 16 output features), G groups of U output
features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp16_scaled import Fp16Scaled
from kernels.gluon.tiles import ROWS
from kernels.linear import fp8_even_launch, fp8_groups_launch, fp8_launch, launch, micro_scaled, parts, reference
from kernels.linear.groups import launch_group_linear
from kernels.linear.launch import MOST_STREAMED
from kernels.linear.mxfp8_launch import mxfp8_linear, mxfp8_pieces
from kernels.linear.parts import Cut
from kernels.linear.w8a8 import (
    PIECE,
    fits_w8a8,
    padded_scales,
    supports_w8a8,
    w8a8_linear,
    w8a8_pieces,
)
from kernels.linear.w8a8_groups_launch import takes_w8a8_groups, w8a8_group_linear
from kernels.matrix import BlockScaled, Matrix, MicroScaled
from kernels.pending_norm import PendingNorm
from kernels.runtime.dependent import launches_dependently
from kernels.runtime.hopper import is_hopper, multiprocessors

__all__ = [
    "MOST_STREAMED",
    "PIECE",
    "ROWS",
    "fits_pending_norm",
    "fits_w8a8",
    "gated_linear",
    "group_linear",
    "grouped_linear",
    "linear",
    "linear_to_norm",
    "linear_to_residual",
    "mxfp8_linear",
    "mxfp8_pieces",
    "normed_linear",
    "padded_scales",
    "part_linear",
    "parts_of",
    "supports_w8a8",
    "takes_fp8",
    "takes_fp16_scaled",
    "takes_mxfp8",
    "takes_ring",
    "takes_w8a8_groups",
    "w8a8_group_linear",
    "w8a8_linear",
    "w8a8_pieces",
]


def takes_fp16_scaled(tokens: int, weight: Matrix) -> bool:
    """Whether `linear` and `linear_to_residual`, and `few_experts`, take so many tokens in scaled fp16 for this matrix
    (these experts): on Hopper, for FP8 weights whose input features are whole blocks of 128, where no kernel makes fp16
    of them as it multiplies them."""
    alone = fp8_launch.whole(tokens, weight) or fp8_even_launch.even(tokens, weight)
    return fp8_launch.fetched(tokens, weight) and not alone


def takes_fp8(x_TE: Tensor, weight: Matrix) -> bool:
    """Whether `linear` multiplies these tokens by this matrix in FP8 as it is stored: at most 8, on a GPU in bf16 and
    in whole 16-byte pieces, where kernels can be launched dependently. Of more tokens other products are faster."""
    if not isinstance(weight, BlockScaled) or not 0 < x_TE.shape[0] <= fp8_launch.MOST_TOKENS:
        return False
    return not x_TE.is_cuda or (launches_dependently(x_TE.device) and launch.streamable(x_TE, weight))


def takes_mxfp8(x_TE: Tensor, weight: Matrix) -> bool:
    """Whether `linear` multiplies these tokens by this matrix in MXFP8 as it is stored: at most
    `micro_scaled.MOST_TOKENS` in bf16 or fp32, on a GPU that multiplies pairs of bf16, as those do on which kernels can
    be launched dependently. Where `mxfp8_pieces` offers memory, `mxfp8_linear` is the faster one."""
    fits = 0 < x_TE.shape[0] <= micro_scaled.MOST_TOKENS and x_TE.dtype in (torch.bfloat16, torch.float32)
    return x_TE.is_cuda and isinstance(weight, MicroScaled) and fits and launches_dependently(x_TE.device)


def takes_ring(x_TE: Tensor, weight: Matrix) -> bool:
    """Whether `linear` multiplies these tokens, as they are, by this matrix in FP8 through the ring of `fp8_groups`,
    which is better than scaled fp16 (`takes_fp16_scaled`); it is for products that nothing precedes and follows."""
    return x_TE.is_cuda and fp8_groups_launch.takes_alone(x_TE.shape[0], weight)


def fits_pending_norm(x_TE: Tensor, weight: Matrix, *, wide: bool = False) -> bool:
    """Whether a pending norm is better than one that a kernel makes, before or behind a product of these tokens with a
    matrix in FP8: on Hopper, where `fp8_whole` takes it, or behind the norm `fp8_groups`, with `wide` rows."""
    if not isinstance(weight, BlockScaled) or not 0 < x_TE.shape[0] <= fp8_launch.MOST_TOKENS:
        return False
    if not x_TE.is_cuda:
        return x_TE.dtype != torch.float64 and not any(size % ROWS for size in weight.shape)
    tokens = x_TE.shape[0]
    taken = fp8_launch.whole(tokens, weight, normed=True) or (wide and fp8_groups_launch.takes_normed(tokens, weight))
    return taken and launch.streamable(x_TE, weight)


def linear(
    x_TE: Tensor | Fp16Scaled, weight_FE: Matrix, out_TF: Tensor, *, invariant: bool = False, dependent: bool = False
) -> None:
    """out = x · weight^T, summed in fp32, on a CPU of fp64 in fp64, and rounded once to the dtype of `out_TF`.

    A plain `weight_FE` has the dtype of `x_TE`; FP8 weights are for at most MOST_STREAMED tokens, MXFP8 weights where
    `takes_mxfp8` says so. `out_TF` has the dtype of `x_TE`, or fp32. The last dimension of each is contiguous, rows may
    be strided. `out_TF` overlaps neither input. `invariant`: a token's result is bitwise the same in any call.
    `dependent`: programmatic dependent launch where there is a kernel of ours, see `launch`. `x_TE` is in scaled fp16
    where `takes_fp16_scaled` says so.
    """
    if isinstance(x_TE, Fp16Scaled):
        fp8_launch.fp8_linear(x_TE, _blocks(x_TE, weight_FE), out_TF, dependent=dependent)
    elif isinstance(weight_FE, MicroScaled) and takes_mxfp8(x_TE, weight_FE):
        if invariant:
            raise ValueError("products with MXFP8 weights as they are stored differ by the number of tokens")
        micro_scaled.launch_micro_scaled(x_TE, weight_FE, out_TF, dependent=dependent)
    elif not isinstance(weight_FE, Tensor):
        _check_few(x_TE, weight_FE)
        if isinstance(weight_FE, BlockScaled) and fp8_even_launch.even(x_TE.shape[0], weight_FE):
            fp8_even_launch.fp8_even(x_TE, weight_FE, out_TF, dependent=dependent)
        elif isinstance(weight_FE, BlockScaled) and fp8_launch.whole(x_TE.shape[0], weight_FE):
            fp8_launch.fp8_whole(x_TE, weight_FE, out_TF, dependent=dependent)
        elif isinstance(weight_FE, BlockScaled) and takes_ring(x_TE, weight_FE):
            one_group = x_TE.unsqueeze(1), weight_FE, out_TF.unsqueeze(1)
            tiling = fp8_groups_launch.ALONE if x_TE.shape[0] == 1 else fp8_groups_launch.FEW_ALONE
            fp8_groups_launch.fp8_groups(*one_group, tiling=tiling, dependent=dependent)
        elif x_TE.is_cuda:
            launch.stream_linear(x_TE, weight_FE, out_TF, dependent=dependent)
        else:
            compute = torch.promote_types(x_TE.dtype, torch.float32)
            out_TF.copy_(x_TE.to(compute) @ weight_FE.float().to(compute).t())
    elif x_TE.is_cuda and invariant:
        one_head = x_TE.unsqueeze(1), weight_FE.unsqueeze(0), out_TF.unsqueeze(1)
        # Narrow tiles were compared bit for bit with wide ones on Hopper alone.
        launch.tiled(*one_head, invariant=True, few=is_hopper(x_TE.device), dependent=dependent)
    elif invariant:
        reference.invariant_linear(x_TE, weight_FE, out_TF)
    elif x_TE.is_cuda and x_TE.shape[0] and launch.served(x_TE, weight_FE):
        launch.stream_linear(x_TE, weight_FE, out_TF, dependent=dependent)
    elif out_TF.dtype == x_TE.dtype:
        torch.mm(x_TE, weight_FE.t(), out=out_TF)
    elif x_TE.is_cuda:
        torch.mm(x_TE, weight_FE.t(), out_dtype=out_TF.dtype, out=out_TF)
    else:
        torch.mm(x_TE.to(out_TF.dtype), weight_FE.t().to(out_TF.dtype), out=out_TF)


def grouped_linear(
    x_TE: Tensor, weight_FE: Tensor, out_TGF: Tensor, *, invariant: bool = True, dependent: bool = False
) -> None:
    """out[t, g] = x[t] · weight^T over the g-th of G equal groups of neighbouring input features: parts of a sum.

    As `linear`. With `invariant` a part is bitwise the same in any call, also in one for fewer of the groups.
    ValueError when the features are no multiple of G.
    """
    groups, features = out_TGF.shape[1], x_TE.shape[1]
    if features % groups:
        raise ValueError(f"{features} features do not make {groups} equal groups")
    x_TGE = x_TE.view(x_TE.shape[0], groups, features // groups)
    weight_GFE = weight_FE.view(weight_FE.shape[0], groups, features // groups).transpose(0, 1)
    if x_TE.is_cuda:
        launch.tiled(x_TGE, weight_GFE, out_TGF, invariant=invariant, dependent=dependent)
    else:
        reference.invariant_groups(x_TGE, weight_GFE, out_TGF)


def group_linear(x_TGE: Tensor, weight_FE: Matrix, out_TGU: Tensor, *, dependent: bool = False) -> None:
    """out[t, g] = weight[g] · x[t, g], with weight[g] the g-th of G equal groups of neighbouring rows (F = G U): one
    launch for any number of tokens. Sums are in fp32, on a CPU of fp64 in fp64, and rounded once. Of many tokens cuBLAS
    multiplies plain weights about three times as fast as this does `BlockScaled` ones.

    `x_TGE`: the last dimension is contiguous, the others may be strided (heads of a group side by side:
    `x_THD.view(T, G, -1)`). A plain `weight_FE` has its dtype; `BlockScaled` is multiplied as it is stored, where the
    groups are whole blocks of rows. `out_TGU` has the dtype of `x_TGE`, or fp32. `dependent`: as of `linear`.
    ValueError for a matrix that is stored otherwise, or whose rows are no such groups. Source: DeepSeek-V4 (2026),
    section 2.3.1.
    """
    tokens, groups, features = x_TGE.shape
    rows = out_TGU.shape[2]
    if out_TGU.shape[:2] != (tokens, groups) or tuple(weight_FE.shape) != (groups * rows, features):
        raise ValueError(
            f"a matrix {tuple(weight_FE.shape)} does not make {tuple(out_TGU.shape)} of {tuple(x_TGE.shape)}"
        )
    if x_TGE.stride(2) != 1 or out_TGU.stride(2) != 1:
        raise ValueError("the features of a token and group lie side by side")
    compute = torch.promote_types(x_TGE.dtype, torch.float32)
    if isinstance(weight_FE, Tensor):
        weight_GUE = weight_FE.view(groups, rows, features)
        if not x_TGE.is_cuda:
            out_TGU.copy_(torch.einsum("tge,gue->tgu", x_TGE.to(compute), weight_GUE.to(compute)))
        elif tokens and launch.streamable(x_TGE, weight_GUE):
            launch.stream_heads(x_TGE, weight_GUE, out_TGU, dependent=dependent)
        elif out_TGU.dtype == x_TGE.dtype:
            torch.bmm(x_TGE.transpose(0, 1), weight_GUE.transpose(1, 2), out=out_TGU.transpose(0, 1))
        else:
            launch.tiled(x_TGE, weight_GUE, out_TGU, invariant=False)
        return
    if not isinstance(weight_FE, BlockScaled) or (groups > 1 and rows % weight_FE.rows):
        raise ValueError(f"{groups} groups of {rows} rows: dequantize the matrix, it is in no blocks of whole groups")
    device = x_TGE.device
    if x_TGE.is_cuda and tokens and launches_dependently(device) and launch.streamable(x_TGE, weight_FE):
        if fp8_groups_launch.takes_groups(groups, weight_FE):
            fp8_groups_launch.fp8_groups(x_TGE, weight_FE, out_TGU, dependent=dependent)
        else:
            launch.stream_heads(x_TGE, weight_FE, out_TGU, dependent=dependent)
    elif x_TGE.is_cuda:
        launch_group_linear(x_TGE, weight_FE, out_TGU)
    else:
        weight_GUE = weight_FE.float().to(compute).view(groups, rows, features)
        out_TGU.copy_(torch.einsum("tge,gue->tgu", x_TGE.to(compute), weight_GUE))


def parts_of(tokens: int, weight_FE: Tensor) -> int:
    """Parts that `part_linear` leaves of products of so many tokens with this matrix; 0 where it does not serve them:
    on other devices than Hopper GPUs, for tokens that `stream` serves or more than 64, and for sizes of which a program
    would need more memory than a multiprocessor has for one."""
    if not is_hopper(weight_FE.device) or not MOST_STREAMED < tokens <= parts.MOST_TOKENS:
        return 0
    cut = _cut(weight_FE) if parts.divisible(weight_FE) else None
    return 0 if cut is None else cut.parts


def part_linear(x_TE: Tensor, weight_FE: Tensor, out_TPF: Tensor, *, dependent: bool = False) -> None:
    """Parts of the sums of x · weight^T in fp32, each over some neighbouring input features: the kernel behind adds
    them up in their order. A token's result does not depend on the other tokens.

    At most 64 tokens and P as `parts_of` says; bf16, in rows of whole 16-byte pieces, else ValueError. Weights are read
    before the kernel before has ended; this one lets its successor start after its own wait only.
    """
    cut = _cut(weight_FE)
    if cut is None or out_TPF.shape[1] != cut.parts or x_TE.shape[0] > parts.MOST_TOKENS:
        raise ValueError(f"no {out_TPF.shape[1]} parts of {x_TE.shape[0]} tokens times {tuple(weight_FE.shape)}")
    if not parts.divisible(x_TE) or not parts.divisible(weight_FE):
        raise ValueError("tokens and weights must be bf16 in whole 16-byte pieces")
    if x_TE.is_cuda:
        parts.part_linear(x_TE, weight_FE, out_TPF, cut, dependent=dependent)
    else:
        reference.part_linear(x_TE, weight_FE, out_TPF, cut.group)


def _cut(weight_FE: Tensor) -> Cut | None:
    rows, features = weight_FE.shape
    return Cut.of(rows, features, multiprocessors(weight_FE.device))


def normed_linear(
    x: PendingNorm,
    weight_FE: Matrix,
    out_TF: Tensor,
    *,
    norm_A: Tensor | None = None,
    next: PendingNorm | None = None,
    scale_T: Tensor | None = None,
    wide: bool = False,
    dependent: bool = False,
) -> None:
    """out = norm(x) · weight^T. With `next`, the first A columns of out become a pending norm of weight `norm_A`, over
    `out_TF` itself: `next.x_TE` is `out_TF[:, :A]`. `scale_T` (fp32): what that norm of each token is multiplied by.
    `wide`: no norm follows, and of rows so many that programs have to wait for others each may take several times 16,
    where there is a kernel for that.

    This and the functions below: at most MOST_STREAMED tokens; on a GPU tokens in bf16 and weights in bf16 or FP8, in
    rows of whole 16-byte pieces. Sums are in fp32 and in the same order for every number of tokens. On a CPU any
    floating dtype.
    """
    _check_few(x.x_TE, weight_FE)
    if next is not None and next.x_TE.data_ptr() != out_TF.data_ptr():
        raise ValueError("the next norm lies over the first columns of the output")
    if wide and next is not None:
        raise ValueError("programs of more than 16 rows leave no norm pending")
    if scale_T is not None and next is None:
        raise ValueError("factors of the tokens are for the next norm, and there is none")
    if wide and isinstance(weight_FE, BlockScaled) and _in_wide_programs(x.x_TE.shape[0], weight_FE):
        one_group = x.x_TE.unsqueeze(1), weight_FE, out_TF.unsqueeze(1)
        fp8_groups_launch.fp8_groups(*one_group, pending=x, dependent=dependent)
    elif isinstance(weight_FE, BlockScaled) and fp8_launch.whole(x.x_TE.shape[0], weight_FE, normed=True):
        fp8_launch.fp8_whole(x, weight_FE, out_TF, norm=norm_A, next=next, scale_T=scale_T, dependent=dependent)
    elif x.x_TE.is_cuda:
        launch.stream_linear(
            x.x_TE, weight_FE, out_TF, pending=x, norm=norm_A, next=next, scale_T=scale_T, dependent=dependent
        )
    else:
        reference.normed_linear(x, weight_FE, out_TF, norm_A, next, scale_T)


def linear_to_norm(
    x_TE: Tensor,
    weight_FE: Matrix,
    out_TF: Tensor,
    norm_A: Tensor,
    next: PendingNorm,
    *,
    dependent: bool = False,
) -> None:
    """`normed_linear` with a `next` norm, of tokens before which there is none, where `fits_pending_norm` says so."""
    _check_few(x_TE, weight_FE)
    if next.x_TE.data_ptr() != out_TF.data_ptr():
        raise ValueError("the next norm lies over the first columns of the output")
    if not isinstance(weight_FE, BlockScaled):
        raise ValueError("a norm is left to the next product behind one with a matrix in FP8 alone")
    if x_TE.is_cuda:
        fp8_launch.fp8_whole(x_TE, weight_FE, out_TF, norm=norm_A, next=next, dependent=dependent)
    else:
        reference.linear_to_norm(x_TE, weight_FE, out_TF, norm_A, next)


def linear_to_residual(
    x_TE: Tensor | Fp16Scaled,
    weight_FE: Matrix,
    residual_TF: Tensor,
    norm_F: Tensor,
    out: PendingNorm,
    *,
    dependent: bool = False,
) -> None:
    """residual (fp32) += x · weight^T, in place and not rounded before; `out` = its pending norm of weight `norm_F`.
    `x_TE` is in scaled fp16 where `takes_fp16_scaled` says so."""
    if isinstance(x_TE, Fp16Scaled):
        weight = _blocks(x_TE, weight_FE)
        fp8_launch.fp8_linear(
            x_TE, weight, out.x_TE, residual_TF=residual_TF, norm=norm_F, next=out, dependent=dependent
        )
        return
    _check_few(x_TE, weight_FE)
    if isinstance(weight_FE, BlockScaled) and fp8_even_launch.even(x_TE.shape[0], weight_FE):
        into = out.x_TE, residual_TF, norm_F, out.square_TP
        fp8_even_launch.fp8_even(x_TE, weight_FE, *into, dependent=dependent)
    elif isinstance(weight_FE, BlockScaled) and fp8_launch.whole(x_TE.shape[0], weight_FE):
        fp8_launch.fp8_whole(
            x_TE, weight_FE, out.x_TE, residual_TF=residual_TF, norm=norm_F, next=out, dependent=dependent
        )
    elif x_TE.is_cuda:
        launch.stream_linear(
            x_TE, weight_FE, out.x_TE, residual_TF=residual_TF, norm=norm_F, next=out, dependent=dependent
        )
    else:
        reference.linear_to_residual(x_TE, weight_FE, residual_TF, norm_F, out)


def gated_linear(
    x: PendingNorm, weight_FE: Matrix, out_TI: Tensor, *, early: bool = True, dependent: bool = False
) -> None:
    """out = silu(gate) * up of gate, up = norm(x) · weight^T, rounded once. `early`: a dependent launch lets its
    successor start at once; otherwise, with plain weights alone, when all that precedes this launch has ended, so that
    those behind may read it before they wait."""
    _check_few(x.x_TE, weight_FE)
    if not early and not isinstance(weight_FE, Tensor):
        raise ValueError("only products with plain weights let their successor start later")
    if isinstance(weight_FE, BlockScaled) and fp8_launch.kept(x.x_TE.shape[0], weight_FE):
        fp8_launch.fp8_gate_up(x, weight_FE, out_TI, dependent=dependent)
    elif x.x_TE.is_cuda:
        launch.stream_gate_up(x, weight_FE, out_TI, early=early, dependent=dependent)
    else:
        reference.gated_linear(x, weight_FE, out_TI)


def _blocks(x: Fp16Scaled, weight: Matrix) -> BlockScaled:
    """The weight, as what rows in scaled fp16 are multiplied with."""
    if not isinstance(weight, BlockScaled) or not fp8_launch.fetched(x.fp16_TF.shape[0], weight):
        raise ValueError(f"{x.fp16_TF.shape[0]} halved rows are not for this matrix: {tuple(weight.shape)}")
    return weight


def _check_few(x_TE: Tensor, weight_FE: Matrix) -> None:
    if not 0 < x_TE.shape[0] <= MOST_STREAMED:
        raise ValueError(f"{x_TE.shape[0]} tokens; these products are for 1 to {MOST_STREAMED}")
    if x_TE.is_cuda and not launch.streamable(x_TE, weight_FE):
        data = weight_FE if isinstance(weight_FE, Tensor) else weight_FE.data
        raise ValueError(
            f"{x_TE.dtype} rows {tuple(x_TE.stride())} and {data.dtype} weight rows {tuple(data.stride())} are not "
            "bf16, and bf16 or FP8, in whole 16-byte pieces"
        )
    if x_TE.is_cuda and torch.version.cuda is None:
        raise ValueError("these products need CUDA")


def _in_wide_programs(tokens: int, weight: BlockScaled) -> bool:
    """Whether programs of several times 16 rows finish the norm of so many tokens: where smaller ones do not all stand
    at once."""
    return not fp8_launch.whole(tokens, weight) and fp8_groups_launch.takes_normed(tokens, weight)
