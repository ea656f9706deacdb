"""The general path: every product in the way that is fastest for their number, norms between them.

Shape legend: T tokens, R tokens and padding, E hidden features, F output features, I intermediate features of this
rank, X experts, K experts per token (both with the shared ones, where those are stored or chosen), P parts of a sum, A
features of a norm, G groups of features that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor
from typing_extensions import override

from kernels import moe
from kernels.dequantize import dequantize
from kernels.fp16_scaled import Fp16Scaled, to_fp16_scaled
from kernels.linear import (
    fits_pending_norm,
    fits_w8a8,
    grouped_linear,
    linear,
    linear_to_norm,
    mxfp8_linear,
    mxfp8_pieces,
    normed_linear,
    part_linear,
    parts_of,
    supports_w8a8,
    takes_fp8,
    takes_fp16_scaled,
    takes_mxfp8,
    takes_ring,
    w8a8_pieces,
)
from kernels.matrix import BlockScaled, Matrix, MicroScaled
from kernels.pending_norm import PIECE as PENDING
from kernels.pending_norm import PendingNorm
from kernels.quantize import GROUP, silu_mul_quantize
from kernels.residual_streams import add_to_streams
from kernels.rms_norm import AddNorm, add_rms_norm, enter_rms_norm, rms_norm
from kernels.rounded_norm import rounded_norm, w8a8_add_norm, w8a8_latent
from kernels.runtime.dependent import launches_dependently
from kernels.sigmoid_mul import sigmoid_mul
from kernels.silu_mul import silu_mul
from workers.memory.scratch import Scratch
from workers.models.layer_ops import Gated, LayerOps, Mixture, NormGate
from workers.models.w8a8 import (
    MIN_TOKENS_W8A8,
    MIN_TOKENS_W8A8_EXPERTS,
    MOST_ROUNDED_BEFORE,
    RoundedRows,
    allocate_fp8,
    gathered,
    in_fp8,
    linear_of_fp8,
    round_rows,
)
from workers.parallel.group import Group
from workers.weights.weight import Formats, Weight

MOST_DEPENDENT: Final = 512
"""Most tokens whose kernels of ours are launched dependently."""
MIN_TOKENS_PARTS: Final = 9
"""Fewest tokens whose router's sums are spread; the weights of fewer are streamed. Of 16 cuBLAS's two kernels
take 7.3 us where this one takes 3.9 (256 x 7168 weights on one H200, `bench/share.py --layers 8 --timeline`)."""
ROUTER_PARTS: Final = 16
"""Parts of the sums of few tokens' router logits."""

Rows: TypeAlias = Tensor | RoundedRows
"""A norm as this path keeps it, [T, E]."""


def tensor_of(x: Rows) -> Tensor:
    """The norm in the model's dtype."""
    return x.x_TE if isinstance(x, RoundedRows) else x


def plain(weight_FE: Weight, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """The matrix in `dtype` for products that read no other format: itself, or in memory of `scratch`."""
    matrix = weight_FE.matrix
    if isinstance(matrix, Tensor):
        return matrix
    out_FE = scratch.empty(*matrix.shape, dtype=dtype)
    dequantize(matrix, out_FE)
    return out_FE


def few_rows(x_TF: Tensor, weight: Matrix, scratch: Scratch, *, dependent: bool) -> Tensor | Fp16Scaled:
    """Few tokens as products with this matrix, as it is stored, take them."""
    if not takes_fp16_scaled(x_TF.shape[0], weight):
        return x_TF
    rows = Fp16Scaled.empty(x_TF, scratch.empty)
    to_fp16_scaled(x_TF, rows, dependent=dependent)
    return rows


def dependent(x_TE: Tensor) -> bool:
    """Whether kernels of ours are launched dependently for these tokens: behind many tokens' a launch costs nothing."""
    return x_TE.shape[0] <= MOST_DEPENDENT and launches_dependently(x_TE.device)


def _widened(x_TE: Tensor, scratch: Scratch) -> Tensor:
    """`x_TE` in fp32, as some plain weights are in models that are not."""
    return scratch.empty(*x_TE.shape, dtype=torch.float32).copy_(x_TE)


def choose_experts(
    ops: LayerOps[Any],
    logit_TX: Tensor,
    mixture: Mixture,
    scratch: Scratch,
    live_R: Tensor | None,
    given: moe.GivenExperts | None = None,
    *,
    dependent: bool,
) -> tuple[Tensor, Tensor]:
    """Expert ids int64 and weights fp32, both [T, K], from router logits or parts of them; the same on every rank.
    Shared experts behind the others come last. Padding has -1 and 0. `given`: see `moe.route`."""
    routing, tokens = mixture.routing, logit_TX.shape[0]
    columns, own = routing.experts_per_token + routing.shared_experts, routing.experts_per_token
    id_TK = scratch.empty(tokens, columns, dtype=torch.int64)
    weight_TK = scratch.empty(tokens, columns, dtype=torch.float32)
    moe.route(
        logit_TX,
        mixture.bias_X,
        id_TK,
        weight_TK,
        routing.rule,
        shared=routing.shared_experts,
        live_R=live_R,
        given=given,
        dependent=dependent,
    )
    if ops.choices is not None:
        ops.choices.settle(id_TK[:, :own], weight_TK[:, :own])
    return id_TK, weight_TK


class GeneralOps(LayerOps[Rows]):
    """Token-wise work of any pass. A norm is a tensor [T, E] in the model's dtype, as is the residual stream; where
    products read it in FP8, it is kept so, too. Few tokens are multiplied by matrices in FP8 as these are stored, by
    the small-batch path's kernels: of passes that cannot take that path as a whole."""

    def __init__(self, group: Group, *, quantize_activations: bool = False, formats: Formats | None = None) -> None:
        """`quantize_activations`: whether activations in bf16 may be rounded to FP8 where they are multiplied with such
        weights. `formats`: those of the model's matrices; where such weights are among them, norms are rounded as they
        are made."""
        self.group, self.quantize_activations, self._formats = group, quantize_activations, formats or Formats()
        self._alone = group.mesh.heads.size == group.mesh.experts.size == 1
        """Whether there is nothing to sum over ranks."""

    @override
    def allocate_residual(self, tokens: int, hidden: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, hidden, dtype=dtype)

    @override
    def allocate_normed(self, tokens: int, hidden: int, dtype: torch.dtype, eps: float, scratch: Scratch) -> Rows:
        x_TE = scratch.empty(tokens, hidden, dtype=dtype)
        if tokens < MIN_TOKENS_W8A8 or hidden % GROUP or dtype != torch.bfloat16 or not self.quantize_activations:
            return x_TE
        if not any(format.w8a8 for format in self._formats.all) or not supports_w8a8(x_TE.device):
            return x_TE
        fp8 = allocate_fp8(tokens, hidden, scratch)
        if tokens <= MOST_ROUNDED_BEFORE:
            fp8 = replace(fp8, by_token_TG=scratch.empty(tokens, hidden // GROUP, dtype=torch.float32))
        return RoundedRows(x_TE, fp8)

    @override
    def enter(self, rows_YE: Tensor, id_T: Tensor | None, norm: AddNorm, out: Rows) -> None:
        out_TE = tensor_of(out)
        if norm.memory is None:
            into = norm.residual_TE, norm.weight_E, out_TE
            enter_rms_norm(rows_YE, id_T, *into, eps=norm.eps, dependent=dependent(out_TE))
            if isinstance(out, RoundedRows):
                round_rows(out, dependent=dependent(out.x_TE))
            return
        norm.residual_TE.zero_()
        norm.memory.open_TS.fill_(1.0)
        if norm.memory.mix_TSS is not None:
            norm.memory.mix_TSS.zero_()  # what it mixes is 0
        if id_T is not None:
            torch.index_select(rows_YE, 0, id_T, out=out_TE)
        self.add_norm(rows_YE if id_T is None else out_TE, norm, out)

    @override
    def linear(self, x: Rows, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        x_TE = tensor_of(x)
        if out_TF.dim() == 3:  # of `parts`
            part_linear(x_TE, weight_FE.plain, out_TF, dependent=dependent(x_TE))
            return
        weight = weight_FE.matrix
        if isinstance(weight, Tensor):
            linear(x_TE, weight, out_TF, dependent=dependent(x_TE))
            return
        with scratch.scope():
            if takes_fp8(x_TE, weight):
                early = dependent(out_TF)
                rows = x_TE if takes_ring(x_TE, weight) else few_rows(x_TE, weight, scratch, dependent=early)
                linear(rows, weight, out_TF, dependent=early)
            elif takes_mxfp8(x_TE, weight):
                self._mxfp8_linear(x_TE, weight, out_TF, scratch)
            elif self._quantizes_for(weight, out_TF) and x_TE.dtype == torch.bfloat16:
                early = dependent(out_TF)
                linear_of_fp8(in_fp8(x, scratch, dependent=early), weight, out_TF, scratch, dependent=early)
            else:  # not dependent: what is dequantized in the launch before must not be read early
                linear(x_TE, plain(weight_FE, x_TE.dtype, scratch), out_TF)

    @override
    def narrow_linear(self, x: Rows, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """Multiply by a weight of few outputs, which may be in fp32 in a model that is not."""
        self.wide_linear(tensor_of(x), weight_FE, out_TF, scratch)

    def wide_linear(self, x: Tensor, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """`linear` with a plain weight, which may be in fp32 in a model that is not; out in fp32."""
        wide_TE = x if x.dtype == weight_FE.data.dtype else _widened(x, scratch)
        self.linear(wide_TE, weight_FE, out_TF, scratch)

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
    def _mxfp8_linear(x_TE: Tensor, weight_FE: Matrix, out_TF: Tensor, scratch: Scratch) -> None:
        """out = x · weight^T of few tokens, with a matrix in MXFP8 as it is stored."""
        pieces, early = mxfp8_pieces(x_TE, weight_FE, out_TF), dependent(out_TF)
        if pieces is None or not isinstance(weight_FE, MicroScaled):
            linear(x_TE, weight_FE, out_TF, dependent=early)
            return
        piece_PTB = scratch.empty(*pieces, dtype=torch.float32)
        mxfp8_linear(x_TE, weight_FE, out_TF, piece_PTB, dependent=early)

    @override
    def latent_linear(
        self,
        x: Rows,
        weight_FE: Weight,
        norm_A: Tensor,
        eps: float,
        out_TF: Tensor,
        scratch: Scratch,
        scale_T: Tensor | None = None,
    ) -> Rows:
        (tokens, _), features, weight = out_TF.shape, norm_A.shape[0], weight_FE.matrix
        out, early = self.allocate_normed(tokens, features, out_TF.dtype, eps, scratch), dependent(out_TF)
        if isinstance(out, RoundedRows):  # no experts read a latent
            out = replace(out, fp8=replace(out.fp8, by_token_TG=None))
        if isinstance(out, RoundedRows) and self._quantizes_for(weight, out_TF):
            pieces = w8a8_pieces(tokens, weight)
            if pieces is not None:
                with scratch.scope():
                    fp8 = in_fp8(x, scratch, dependent=early)
                    piece_PTB = scratch.empty(*pieces, dtype=torch.float32)
                    w8a8_latent(
                        fp8,
                        weight,
                        out_TF,
                        norm_A,
                        out.x_TE,
                        out.fp8,
                        pieces=piece_PTB,
                        eps=eps,
                        scale_T=scale_T,
                        dependent=early,
                    )
                return out
        self.linear(x, weight_FE, out_TF, scratch)
        if isinstance(out, RoundedRows):
            into = out_TF[:, :features], norm_A, out.x_TE, out.fp8
            rounded_norm(*into, eps=eps, scale_T=scale_T, dependent=early)
        else:
            rms_norm(out_TF[:, :features], norm_A, out, eps=eps, scale_T=scale_T, dependent=early)
        return out

    def through_latent(
        self,
        x: Rows,
        weight_FE: Weight,
        norm_A: Tensor,
        eps: float,
        latent_TF: Tensor,
        asked: Sequence[tuple[Weight, Tensor]],
        scratch: Scratch,
    ) -> None:
        """latent = x · weight^T, and for each weight [N, A] and output [T, N] that is `asked` the product with the norm
        of weight `norm_A` of its first A columns, which are arbitrary behind that. Few tokens' norm is pending
        (`kernels.pending_norm`) in passes of decode rows alone: no launch makes it."""
        tokens, features = len(latent_TF), len(norm_A)
        first, matrices = weight_FE.matrix, [weight.matrix for weight, _ in asked]
        if (
            self.decode_alone
            and isinstance(x, Tensor)
            and fits_pending_norm(x, first)
            and all(fits_pending_norm(latent_TF[:, :features], each, wide=True) for each in matrices)
        ):
            early, square_TP = dependent(x), scratch.empty(tokens, features // PENDING, dtype=torch.float32)
            latent = PendingNorm(latent_TF[:, :features], square_TP, eps)
            linear_to_norm(x, first, latent_TF, norm_A, latent, dependent=early)
            for matrix, (_, out_TN) in zip(matrices, asked, strict=True):
                normed_linear(latent, matrix, out_TN, wide=True, dependent=early)
            return
        normed = self.latent_linear(x, weight_FE, norm_A, eps, latent_TF, scratch)
        for weight, out_TN in asked:
            self.linear(normed, weight, out_TN, scratch)

    @override
    def gate(self, x: Rows, gate: NormGate, scratch: Scratch) -> None:
        x_TE = tensor_of(x)
        with scratch.scope():
            low_TR = scratch.empty(x_TE.shape[0], gate.down_RE.shape[0], dtype=x_TE.dtype)
            self.linear(x_TE, gate.down_RE, low_TR, scratch)
            low_T1R, x_T1E = low_TR.unsqueeze(1), x_TE.unsqueeze(1)
            sigmoid_mul(low_T1R, low_T1R, low_T1R, dependent=dependent(x_TE))  # SiLU
            gate_TE = scratch.empty(*x_TE.shape, dtype=x_TE.dtype)
            self.linear(low_TR, gate.up_ER, gate_TE, scratch)
            sigmoid_mul(x_T1E, gate_TE.unsqueeze(1), x_T1E, dependent=dependent(x_TE))
        if isinstance(x, RoundedRows):
            round_rows(x, dependent=dependent(x.x_TE))

    @override
    def beside(self, normed: Rows, x_TA: Tensor, scratch: Scratch) -> Tensor:
        normed_TA = tensor_of(normed)
        (tokens, features), out_dtype = normed_TA.shape, normed_TA.dtype
        both_TF = scratch.empty(tokens, 2 * features, dtype=out_dtype)
        return torch.cat([normed_TA, x_TA], 1, out=both_TF)

    @override
    def gated(self, x: Rows, gate_up_FE: Weight, scratch: Scratch, limit: float = 0.0) -> Tensor:
        """silu(gate) * up of the product with a matrix of both; `limit`: see `kernels.silu_mul`."""
        x_TE = tensor_of(x)
        tokens, features = x_TE.shape[0], gate_up_FE.shape[0]
        gate_up_TF = scratch.empty(tokens, features, dtype=x_TE.dtype)
        self.linear(x, gate_up_FE, gate_up_TF, scratch)
        act_TI = scratch.empty(tokens, features // 2, dtype=x_TE.dtype)
        silu_mul(gate_up_TF, act_TI, limit=limit, dependent=dependent(x_TE))
        return act_TI

    @override
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: Rows, scratch: Scratch) -> None:
        out_TE = tensor_of(out)
        tokens, hidden = out_TE.shape
        if self.decode_alone and norm.memory is None and (parts := self.parts(tokens, weight_EF)):
            with scratch.scope():
                part_TPE = scratch.empty(tokens, parts, hidden, dtype=torch.float32)
                self.linear(x_TF, weight_EF, part_TPE, scratch)
                self.add_norm(part_TPE, norm, out)
            return
        if self._adds_rounded(x_TF, weight_EF.matrix, norm, out, scratch):
            return
        part_TE = out_TE if self._alone else self.group.part(out_TE)
        self.linear(x_TF, weight_EF, part_TE, scratch)
        if not self._alone:
            self.group.all_reduce(part_TE, out_TE)
        self.add_norm(out_TE, norm, out)

    def _adds_rounded(self, x_TF: Tensor, weight: Matrix, norm: AddNorm, out: Rows, scratch: Scratch) -> bool:
        """Whether the kernel that adds up a product's pieces has also added them to the residual, and made and rounded
        the norm."""
        if not self._alone or norm.memory is not None or not isinstance(out, RoundedRows):
            return False
        if x_TF.dtype != torch.bfloat16 or not self._quantizes_for(weight, out.x_TE) or takes_fp8(x_TF, weight):
            return False
        pieces = w8a8_pieces(x_TF.shape[0], weight)
        if pieces is None:
            return False
        with scratch.scope():
            early = dependent(x_TF)
            fp8 = in_fp8(x_TF, scratch, dependent=early)
            piece_PTB = scratch.empty(*pieces, dtype=torch.float32)
            into = norm.residual_TE, norm.weight_E, out.x_TE, out.fp8
            w8a8_add_norm(fp8, weight, *into, pieces=piece_PTB, eps=norm.eps, dependent=early)
        return True

    @override
    def add_gated(
        self, x: Rows, gate_up_FE: Weight, down_EI: Weight, norm: AddNorm, out: Rows, scratch: Scratch
    ) -> None:
        """Add a gated feed-forward part. Where `down` takes activations in FP8, the gate rounds them at once."""
        x_TE, out_TE, down = tensor_of(x), tensor_of(out), down_EI.matrix
        part_TE = out_TE if self._alone else self.group.part(out_TE)
        if x_TE.dtype != torch.bfloat16 or not self._quantizes_for(down, part_TE):
            self.add(self.gated(x, gate_up_FE, scratch), down_EI, norm, out, scratch)
            return
        with scratch.scope():
            gate_up_TF = scratch.empty(x_TE.shape[0], gate_up_FE.shape[0], dtype=x_TE.dtype)
            self.linear(x, gate_up_FE, gate_up_TF, scratch)
            early = dependent(x_TE)
            rows = in_fp8(gate_up_TF, scratch, silu_mul_quantize, dependent=early)
            linear_of_fp8(rows, down, part_TE, scratch, dependent=early)
        if not self._alone:
            self.group.all_reduce(part_TE, out_TE)
        self.add_norm(out_TE, norm, out)

    def add_norm(self, x_TE: Tensor, norm: AddNorm, out: Rows) -> None:
        """residual += x, out = rms_norm(residual), of a sum over ranks or parts of a sum [T, P, E]; `out` may be
        `x_TE`. Where there are several residual streams see `add_to_streams`; of a sum alone."""
        out_TE = tensor_of(out)
        # Behind a collective of others it is a plain launch.
        early = dependent(x_TE) and (self._alone or self.group.sums_by_kernel(x_TE))
        if norm.memory is not None:
            into = norm.residual_TE, norm.memory, norm.gates, norm.weight_E, out_TE
            add_to_streams(x_TE, *into, eps=norm.eps, invariant=self.invariant, dependent=early)
            if isinstance(out, RoundedRows):
                round_rows(out, dependent=dependent(out.x_TE))
            return
        if isinstance(out, RoundedRows) and x_TE.dim() == 2:
            residual_TE = norm.residual_TE
            rounded_norm(x_TE, norm.weight_E, out_TE, out.fp8, eps=norm.eps, residual_TE=residual_TE, dependent=early)
            return
        add_rms_norm(x_TE, norm.residual_TE, norm.weight_E, out_TE, eps=norm.eps, dependent=early)
        if isinstance(out, RoundedRows):
            round_rows(out, dependent=dependent(out.x_TE))

    @override
    def add_experts(
        self,
        x: Rows,
        mixture: Mixture,
        norm: AddNorm,
        out: Rows,
        scratch: Scratch,
        live_R: Tensor | None,
        given: moe.GivenExperts | None = None,
    ) -> None:
        """Add the output of experts. `given`: the experts that tokens have, where these are not to be chosen."""
        own_TE = None
        if mixture.shared is not None:
            limit = mixture.routing.limit if mixture.routing.shared_limit else 0.0
            own_TE = self.shared_experts(x, mixture.shared, norm, out, scratch, limit)
        id_TK, weight_TK = self.route(tensor_of(x), mixture, scratch, live_R, given)
        self.experts(x, id_TK, weight_TK, mixture, norm, out, scratch, own_TE)

    def shared_experts(
        self, x: Rows, shared: Gated, norm: AddNorm, out: Rows, scratch: Scratch, limit: float = 0.0
    ) -> Tensor | None:
        """Add the output of shared experts that are a network of their own, clamped where `limit` is above 0. With one
        rank it is then in the residual, and the result is None. With several the result is this rank's part, which is
        summed over ranks together with the other experts'; so it is where residual streams are mixed, once for both, or
        something is clamped."""
        mixed = norm.memory is not None and norm.memory.mix_TSS is not None
        if self._alone and not mixed and not limit:  # the norm of the sum so far is written over
            self.add_gated(x, shared.gate_up_FE, shared.down_EI, norm.sum_alone, out, scratch)
            return None
        out_TE = tensor_of(out)
        own_TE = scratch.empty(*out_TE.shape, dtype=out_TE.dtype)
        with scratch.scope():
            self.linear(self.gated(x, shared.gate_up_FE, scratch, limit), shared.down_EI, own_TE, scratch)
        return own_TE

    def route(
        self,
        x_TE: Tensor,
        mixture: Mixture,
        scratch: Scratch,
        live_R: Tensor | None = None,
        given: moe.GivenExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose every token's experts, and their weights (`choose_experts`)."""
        early, router_XE = dependent(x_TE), mixture.router_XE
        wide_TE = x_TE if x_TE.dtype == router_XE.data.dtype else _widened(x_TE, scratch)
        logits = self.router(wide_TE, router_XE, scratch)
        return choose_experts(self, logits, mixture, scratch, live_R, given, dependent=early)

    def router(self, x_TE: Tensor, weight_XE: Weight, scratch: Scratch) -> Tensor:
        """Router logits in fp32, [T, X], or parts of them [T, P, X]; the same on every rank."""
        (tokens, hidden), experts = x_TE.shape, weight_XE.shape[0]
        if (
            MIN_TOKENS_PARTS <= tokens <= MOST_DEPENDENT
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
        x: Rows,
        id_TK: Tensor,
        weight_TK: Tensor,
        mixture: Mixture,
        norm: AddNorm,
        out: Rows,
        scratch: Scratch,
        own_TE: Tensor | None = None,
    ) -> None:
        """residual += `own_TE` and the weighted sum of a token's experts, summed over ranks, or its norm where the
        mixture has one; out = rms_norm(residual)."""
        x_TE, out_TE, workspace = tensor_of(x), tensor_of(out), None
        part_TE = out_TE if self._alone else self.group.part(out_TE)
        gate_up_XFE, down_XEI = mixture.gate_up_XFE.matrix, mixture.down_XEI.matrix
        shared = mixture.routing.shared_experts
        if x_TE.is_cuda:
            shape = moe.experts_shape(x_TE, id_TK, down_XEI, shared=shared)
            workspace = scratch.empty(moe.workspace_bytes(shape), dtype=torch.uint8)
        alone = self._alone and mixture.norm_E is None and norm.memory is None and own_TE is None
        moe.experts(
            x_TE,
            id_TK,
            weight_TK,
            gate_up_XFE,
            down_XEI,
            part_TE,
            shared=shared,
            add_norm=norm if alone else None,
            before_TE=own_TE,
            workspace=workspace,
            quantize_activations=self.quantize_activations and x_TE.shape[0] >= MIN_TOKENS_W8A8_EXPERTS,
            rounded=gathered(x) if isinstance(x, RoundedRows) else None,
            limit=mixture.routing.limit,
            round_to=out.fp8 if alone and isinstance(out, RoundedRows) else None,
            # Few tokens' kernels are so short that the gaps between them count; they stand side by side.
            dependent=launches_dependently(x_TE.device),
        )
        if alone:
            return
        if not self._alone:
            self.group.all_reduce(part_TE, out_TE)
        self.add_experts_sum(out, mixture, norm)

    def add_experts_sum(self, out: Rows, mixture: Mixture, norm: AddNorm) -> None:
        """residual += what `out` has, or its norm where the mixture has one; `out` = rms_norm(residual)."""
        out_TE = tensor_of(out)
        if mixture.norm_E is not None:  # launched plainly, whatever has summed
            rms_norm(out_TE, mixture.norm_E, out_TE, eps=norm.eps)
        self.add_norm(out_TE, norm, out)

    @override
    def last(self, normed: Rows, out_TE: Tensor) -> Rows:
        return out_TE

    @override
    def leave(self, norm: AddNorm, last: Rows, out_TE: Tensor) -> None:
        """Leave the result, which is there already."""


class DecodeOps(GeneralOps):
    """Token-wise work of passes of decode rows alone. Some products of their tokens leave parts of sums for the kernel
    behind to add up: cuBLAS's kernels, which start late and read nothing early, take longer than that costs."""

    decode_alone = True

    @override
    def parts(self, tokens: int, weight_FE: Weight) -> int:
        """A sum over ranks needs whole sums."""
        matrix = weight_FE.matrix
        return parts_of(tokens, matrix) if self._alone and isinstance(matrix, Tensor) else 0
