"""The general path: every product in the way that is fastest for their number, norms between them.

Shape legend: T tokens, R tokens and padding, E hidden features, F output features, I intermediate features of this
rank, X experts, K experts per token (both with the shared ones, where those are stored or chosen), P parts of a sum, A
features of a norm, G groups of features that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from kernels import moe
from kernels.dequantize import dequantize
from kernels.linear import (
    MOST_STREAMED,
    PIECE,
    fits_w8a8,
    grouped_linear,
    linear,
    padded_scales,
    part_linear,
    parts_of,
    supports_w8a8,
    w8a8_linear,
    w8a8_pieces,
)
from kernels.matrix import BlockScaled, Matrix
from kernels.quantize import GROUP, quantize, silu_mul_quantize
from kernels.residual_streams import add_to_streams
from kernels.rms_norm import AddNorm, add_rms_norm, rms_norm
from kernels.runtime.dependent import launches_dependently
from kernels.sigmoid_mul import sigmoid_mul
from kernels.silu_mul import silu_mul
from workers.memory.scratch import Scratch
from workers.models.layer_ops import Gated, LayerOps, Mixture, NormGate
from workers.parallel.group import Group
from workers.weights.formats import PLAIN
from workers.weights.weight import Weight

MOST_DEPENDENT: Final = 512
"""Most tokens whose kernels of ours are launched dependently."""
ROUTER_PARTS: Final = 16
"""Parts of the sums of few tokens' router logits."""
MIN_TOKENS_W8A8: Final = 9
"""Fewest tokens that are rounded to FP8 for products with FP8 weights, where that is allowed: the fewest behind the
small-batch path (`workers.weights.formats.fp8_blocks.MOST_FP8`), so that no number of tokens between has kernels of its
own. Of 12 tokens to dequantize first takes 1.5 to 4 times as long (`bench/fp8_linear.py` on one H200)."""
MIN_TOKENS_W8A8_EXPERTS: Final = 9
"""The same for products with experts. Of 32 tokens of DeepSeek-V3 experts that widen their weights take 1.05 times as
long, of 384 1.6 times, of 2048 three times (`bench/moe.py --model v3+shared --format fp8` on one H200)."""


def plain(weight_FE: Weight, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """The matrix in `dtype` for products that read no other format: itself, or in memory of `scratch`."""
    matrix = weight_FE.matrix
    if isinstance(matrix, Tensor):
        return matrix
    out_FE = scratch.empty(*matrix.shape, dtype=dtype)
    dequantize(matrix, out_FE)
    return out_FE


def dependent(x_TE: Tensor) -> bool:
    """Whether kernels of ours are launched dependently for these tokens: behind many tokens' a launch costs nothing."""
    return x_TE.shape[0] <= MOST_DEPENDENT and launches_dependently(x_TE.device)


def _widened(x_TE: Tensor, weight_FE: Weight, scratch: Scratch) -> Tensor:
    """`x_TE` in the dtype of a plain weight, which is its own or fp32."""
    if x_TE.dtype == weight_FE.plain.dtype:
        return x_TE
    return scratch.empty(*x_TE.shape, dtype=torch.float32).copy_(x_TE)


class GeneralOps(LayerOps[Tensor]):
    """Token-wise work of any pass. A norm is a tensor [T, E] in the model's dtype, as is the residual stream."""

    def __init__(self, group: Group, *, quantize_activations: bool = False) -> None:
        """`quantize_activations`: whether activations in bf16 may be rounded to FP8 where they are multiplied with such
        weights."""
        self.group, self.quantize_activations = group, quantize_activations

    @override
    def allocate_residual(self, tokens: int, hidden: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, hidden, dtype=dtype)

    @override
    def allocate_normed(self, tokens: int, hidden: int, dtype: torch.dtype, eps: float, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, hidden, dtype=dtype)

    @override
    def enter(self, rows_YE: Tensor, id_T: Tensor | None, norm: AddNorm, out: Tensor) -> None:
        norm.residual_TE.zero_()
        if norm.memory is not None:
            norm.memory.open_TS.fill_(1.0)
        if id_T is not None:
            torch.index_select(rows_YE, 0, id_T, out=out)
        self.add_norm(rows_YE if id_T is None else out, norm, out)

    @override
    def linear(self, x: Tensor, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        if out_TF.dim() == 3:  # of `parts`
            part_linear(x, weight_FE.plain, out_TF, dependent=dependent(x))
            return
        with scratch.scope():
            weight = weight_FE.matrix
            if self._quantizes_for(weight, out_TF) and x.dtype == torch.bfloat16:
                self._w8a8_linear(quantize, x, weight, out_TF, scratch)
            else:
                # A matrix that is dequantized in the launch before must not be read early.
                early = isinstance(weight, Tensor) and dependent(x)
                linear(x, plain(weight_FE, x.dtype, scratch), out_TF, dependent=early)

    @override
    def narrow_linear(self, x: Tensor, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """See `LayerOps`; the weight may be in fp32 in a model that is not."""
        self.wide_linear(x, weight_FE, out_TF, scratch)

    def wide_linear(self, x: Tensor, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """`linear` with a plain weight, which may be in fp32 in a model that is not; out in fp32."""
        self.linear(_widened(x, weight_FE, scratch), weight_FE, out_TF, scratch)

    def _quantizes_for(self, weight: Matrix, out_TF: Tensor) -> TypeGuard[BlockScaled]:
        """Whether a product with a matrix takes activations in FP8."""
        return (
            self.quantize_activations
            and isinstance(weight, BlockScaled)
            and out_TF.shape[0] >= MIN_TOKENS_W8A8
            and out_TF.dtype == torch.bfloat16
            and out_TF.is_contiguous()
            and supports_w8a8(out_TF.device)
            and fits_w8a8(weight)
        )

    @staticmethod
    def _w8a8_linear(
        rounding: Callable[..., None], x: Tensor, weight_FE: BlockScaled, out_TF: Tensor, scratch: Scratch
    ) -> None:
        """out = what `rounding` makes of `x` · weight^T. Rows behind the last token hold whatever is there."""
        (tokens, outputs), features = out_TF.shape, weight_FE.shape[1]
        rows = -(-tokens // PIECE) * PIECE
        number_RE = scratch.empty(rows, features, dtype=torch.float8_e4m3fn)
        scale_RG = scratch.empty(features // GROUP, rows, dtype=torch.float32).t()
        rounding(x, number_RE[:tokens], scale_RG[:tokens], dependent=dependent(x))
        pieces = w8a8_pieces(tokens, weight_FE)
        if pieces is not None:
            piece_PBT = scratch.empty(*pieces, dtype=torch.float32)
            w8a8_linear(number_RE, scale_RG, weight_FE, out_TF, pieces=piece_PBT, dependent=dependent(x))
            return
        sizes = padded_scales(weight_FE)
        padded = None if sizes is None else scratch.empty(*sizes, dtype=torch.float32)
        out_RF = out_TF if rows == tokens else scratch.empty(rows, outputs, dtype=out_TF.dtype)
        w8a8_linear(number_RE, scale_RG, weight_FE, out_RF, padded)
        if rows > tokens:
            out_TF.copy_(out_RF[:tokens])

    @override
    def latent_linear(
        self,
        x: Tensor,
        weight_FE: Weight,
        norm_A: Tensor,
        eps: float,
        out_TF: Tensor,
        scratch: Scratch,
        scale_T: Tensor | None = None,
    ) -> Tensor:
        self.linear(x, weight_FE, out_TF, scratch)
        out_TA = scratch.empty(x.shape[0], norm_A.shape[0], dtype=x.dtype)
        rms_norm(out_TF[:, : norm_A.shape[0]], norm_A, out_TA, eps=eps, scale_T=scale_T, dependent=dependent(x))
        return out_TA

    @override
    def gate(self, x: Tensor, gate: NormGate, scratch: Scratch) -> None:
        with scratch.scope():
            low_TR = scratch.empty(x.shape[0], gate.down_RE.shape[0], dtype=x.dtype)
            self.linear(x, gate.down_RE, low_TR, scratch)
            low_T1R, x_T1E = low_TR.unsqueeze(1), x.unsqueeze(1)
            sigmoid_mul(low_T1R, low_T1R, low_T1R, dependent=dependent(x))  # SiLU
            gate_TE = scratch.empty(*x.shape, dtype=x.dtype)
            self.linear(low_TR, gate.up_ER, gate_TE, scratch)
            sigmoid_mul(x_T1E, gate_TE.unsqueeze(1), x_T1E, dependent=dependent(x))

    @override
    def beside(self, normed: Tensor, x_TA: Tensor, scratch: Scratch) -> Tensor:
        (tokens, features), out_dtype = normed.shape, normed.dtype
        both_TF = scratch.empty(tokens, 2 * features, dtype=out_dtype)
        return torch.cat([normed, x_TA], 1, out=both_TF)

    @override
    def gated(self, x: Tensor, gate_up_FE: Weight, scratch: Scratch) -> Tensor:
        tokens, features = x.shape[0], gate_up_FE.shape[0]
        gate_up_TF = scratch.empty(tokens, features, dtype=x.dtype)
        self.linear(x, gate_up_FE, gate_up_TF, scratch)
        act_TI = scratch.empty(tokens, features // 2, dtype=x.dtype)
        silu_mul(gate_up_TF, act_TI, dependent=dependent(x))
        return act_TI

    @override
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: Tensor, scratch: Scratch) -> None:
        part_TE = self.group.part(out)
        self.linear(x_TF, weight_EF, part_TE, scratch)
        self.group.all_reduce(part_TE, out)
        self.add_norm(out, norm, out)

    @override
    def add_gated(
        self, x: Tensor, gate_up_FE: Weight, down_EI: Weight, norm: AddNorm, out: Tensor, scratch: Scratch
    ) -> None:
        """Add a gated feed-forward part. Where `down` takes activations in FP8, the gate rounds them at once."""
        part_TE, down = self.group.part(out), down_EI.matrix
        if x.dtype != torch.bfloat16 or not self._quantizes_for(down, part_TE):
            super().add_gated(x, gate_up_FE, down_EI, norm, out, scratch)
            return
        with scratch.scope():
            gate_up_TF = scratch.empty(x.shape[0], gate_up_FE.shape[0], dtype=x.dtype)
            self.linear(x, gate_up_FE, gate_up_TF, scratch)
            self._w8a8_linear(silu_mul_quantize, gate_up_TF, down, part_TE, scratch)
        self.group.all_reduce(part_TE, out)
        self.add_norm(out, norm, out)

    def add_norm(self, x_TE: Tensor, norm: AddNorm, out_TE: Tensor) -> None:
        """residual += x, out = rms_norm(residual), of a sum over ranks or parts of a sum [T, P, E]; `out_TE` may be
        `x_TE`. Where there are several residual streams see `add_to_streams`; of a sum alone."""
        if norm.memory is not None:
            into = norm.residual_TE, norm.memory, norm.gates, norm.weight_E, out_TE
            add_to_streams(x_TE, *into, eps=norm.eps)
            return
        # Behind a collective of others it is a plain launch.
        early = dependent(x_TE) and (self.group.summed.size == 1 or self.group.sums_by_kernel(x_TE))
        add_rms_norm(x_TE, norm.residual_TE, norm.weight_E, out_TE, eps=norm.eps, dependent=early)

    @override
    def add_experts(
        self, x: Tensor, mixture: Mixture, norm: AddNorm, out: Tensor, scratch: Scratch, live_R: Tensor | None
    ) -> None:
        own_TE = None if mixture.shared is None else self.shared_experts(x, mixture.shared, norm, out, scratch)
        id_TK, weight_TK = self.route(x, mixture, scratch, live_R)
        self.experts(x, id_TK, weight_TK, mixture, norm, out, scratch, own_TE)

    def shared_experts(self, x: Tensor, shared: Gated, norm: AddNorm, out: Tensor, scratch: Scratch) -> Tensor | None:
        """Add the output of shared experts that are a network of their own. With one rank it is then in the residual,
        and the result is None. With several the result is this rank's part, which is summed over ranks together with
        the other experts'."""
        if self.group.summed.size == 1:  # the norm of the sum so far is written over
            self.add_gated(x, shared.gate_up_FE, shared.down_EI, norm.sum_alone, out, scratch)
            return None
        own_TE = scratch.empty(*out.shape, dtype=out.dtype)
        with scratch.scope():
            self.linear(self.gated(x, shared.gate_up_FE, scratch), shared.down_EI, own_TE, scratch)
        return own_TE

    def route(
        self, x_TE: Tensor, mixture: Mixture, scratch: Scratch, live_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `chosen`."""
        early = dependent(x_TE)
        logits = self.router(_widened(x_TE, mixture.router_XE, scratch), mixture.router_XE, scratch)
        return self.chosen(logits, mixture, scratch, live_R, dependent=early)

    def router(self, x_TE: Tensor, weight_XE: Weight, scratch: Scratch) -> Tensor:
        """Router logits in fp32, [T, X], or parts of them [T, P, X]; the same on every rank."""
        (tokens, hidden), experts = x_TE.shape, weight_XE.shape[0]
        if (
            MOST_STREAMED < tokens <= MOST_DEPENDENT
            and x_TE.is_cuda
            and x_TE.dtype.itemsize == 2
            and hidden % (16 * ROUTER_PARTS) == 0
        ):
            # So few outputs are the work of a few multiprocessors, unless they share the sums.
            part_TPX = scratch.empty(tokens, ROUTER_PARTS, experts, dtype=torch.float32)
            grouped_linear(x_TE, weight_XE.plain, part_TPX, invariant=False, dependent=dependent(x_TE))
            return part_TPX
        logit_TX = scratch.empty(tokens, experts, dtype=torch.float32)
        self.linear(x_TE, weight_XE, logit_TX, scratch)
        return logit_TX

    def experts(
        self,
        x_TE: Tensor,
        id_TK: Tensor,
        weight_TK: Tensor,
        mixture: Mixture,
        norm: AddNorm,
        out_TE: Tensor,
        scratch: Scratch,
        own_TE: Tensor | None = None,
    ) -> None:
        """residual += the weighted sum of a token's experts and, of several ranks, `own_TE`, summed over ranks, or its
        norm where the mixture has one; out = rms_norm(residual)."""
        part_TE, workspace = self.group.part(out_TE), None
        gate_up_XFE, down_XEI = mixture.gate_up_XFE.matrix, mixture.down_XEI.matrix
        shared = mixture.routing.shared_experts
        if x_TE.is_cuda:
            shape = moe.experts_shape(x_TE, id_TK, down_XEI, shared=shared)
            workspace = scratch.empty(moe.workspace_bytes(shape), dtype=torch.uint8)
        alone = self.group.summed.size == 1 and mixture.norm_E is None and norm.memory is None
        moe.experts(
            x_TE,
            id_TK,
            weight_TK,
            gate_up_XFE,
            down_XEI,
            part_TE,
            shared=shared,
            add_norm=norm if alone else None,
            workspace=workspace,
            quantize_activations=self.quantize_activations and x_TE.shape[0] >= MIN_TOKENS_W8A8_EXPERTS,
            limit=mixture.routing.limit,
            # Few tokens' kernels are so short that the gaps between them count; they stand side by side.
            dependent=launches_dependently(x_TE.device),
        )
        if not alone:
            if own_TE is not None:
                part_TE += own_TE
            self.group.all_reduce(part_TE, out_TE)
            self.add_experts_sum(out_TE, mixture, norm)

    def add_experts_sum(self, out_TE: Tensor, mixture: Mixture, norm: AddNorm) -> None:
        """residual += `out_TE`, or its norm where the mixture has one; `out_TE` = rms_norm(residual)."""
        if mixture.norm_E is not None:  # launched plainly, whatever has summed
            rms_norm(out_TE, mixture.norm_E, out_TE, eps=norm.eps)
        self.add_norm(out_TE, norm, out_TE)

    @override
    def last(self, normed: Tensor, out_TE: Tensor) -> Tensor:
        return out_TE

    @override
    def leave(self, norm: AddNorm, last: Tensor, out_TE: Tensor) -> None:
        """Leave the result, which is there already."""


class DecodeOps(GeneralOps):
    """Token-wise work of passes of decode rows alone. Some products of their tokens leave parts of sums for the kernel
    behind to add up: cuBLAS's kernels, which start late and read nothing early, take longer than that costs."""

    decode_alone = True

    @override
    def parts(self, tokens: int, weight_FE: Weight) -> int:
        """A sum over ranks needs whole sums."""
        if self.group.summed.size > 1 or weight_FE.format is not PLAIN:
            return 0
        return parts_of(tokens, weight_FE.plain)

    @override
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: Tensor, scratch: Scratch) -> None:
        tokens, hidden = out.shape
        parts = self.parts(tokens, weight_EF)
        if not parts or norm.memory is not None:
            super().add(x_TF, weight_EF, norm, out, scratch)
            return
        with scratch.scope():
            part_TPE = scratch.empty(tokens, parts, hidden, dtype=torch.float32)
            self.linear(x_TF, weight_EF, part_TPE, scratch)
            self.add_norm(part_TPE, norm, out)
