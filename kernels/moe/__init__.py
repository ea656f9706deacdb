"""Mixture of experts: which experts a token goes to, and what they compute.

Shape legend: T tokens, E features, X experts, K experts per token, F = 2 I, I intermediate features of one expert. Of
logits and their bias X is the routed experts; everything else counts shared ones as well.

Hopper's own kernels (`hopper`, `w8a8`, `w4a8`, `four_bit_grouped`, `group_sums`) need a private part of Gluon, of
Triton 3.6. Without it a line is logged, and Triton's tiles stand in for them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.matrix import Matrix
from kernels.moe import launch, reference, schedule
from kernels.moe.pending import PendingExperts
from kernels.moe.pending import takes as takes_pending
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape
from kernels.private_api import PrivateApi
from kernels.quantize import GROUP, Fp8Rows, quantize
from kernels.rms_norm import AddNorm, add_rms_norm
from kernels.routing_rule import RoutingRule
from kernels.routing_table import GivenExperts
from kernels.runtime.hopper import is_hopper, multiprocessors

__all__ = [
    "ExpertsShape",
    "GivenExperts",
    "PendingExperts",
    "add_experts",
    "experts",
    "experts_shape",
    "hopper_programs",
    "route",
    "takes_pending",
    "workspace_bytes",
]

_REINTERPRETED: Final = PrivateApi(
    "triton",
    ("triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",),
    "the experts of many tokens, and all with weights of four bits, go without Hopper's own kernels, which are faster "
    "by up to a tenth, with INT4 weights twice and with FP8 weights and rounded activations three times as fast",
)


def route(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    id_TK: Tensor,
    weight_TK: Tensor,
    rule: RoutingRule,
    *,
    shared: int = 0,
    live_R: Tensor | None = None,
    given: GivenExperts | None = None,
    dependent: bool = False,
) -> None:
    """Choose K experts for every token and the weights of their outputs.

    - `logit_TX`: fp32 router logits, or parts of them [T, P, X] that are added in their order. `bias_X`: fp32, may be
      None. `rule` says what becomes of them.
    - `id_TK` (int64) and `weight_TK` (fp32): the experts, best first, and their weights. Both are contiguous.
    - `shared`: the last so many of the K are not chosen: they are experts X, X + 1, ... with weight 1, the shared
      experts, which are stored behind the routed ones.
    - `live_R` (integers): token t belongs to row t // (T // R), and the tokens of rows with 0 are padding: their ids
      become -1, their weights 0.
    - `given`: the experts that the tokens have, without `shared`, if these are not to be chosen: then only their
      weights are computed, of a rule without groups. An expert that a token has several times counts as often: it
      stands where it is named first, with the sum of its weights. All others become -1, with weight 0, as do experts
      that there are not.
    - `dependent`: programmatic dependent launch, see `launch`.

    On a GPU X is at most 512, the number of chosen experts at most 16. Ids exist and differ whatever the logits hold.
    Ties go to the lowest id, of experts and of groups. ValueError for given experts of another number, or in groups.
    """
    if given is not None and (given.expert_YK.shape[1] != id_TK.shape[1] - shared or rule.groups > 1):
        raise ValueError(
            f"{given.expert_YK.shape[1]} given experts are no {id_TK.shape[1] - shared} of {rule.groups} group(s)"
        )
    if logit_TX.is_cuda:
        launch.route(logit_TX, bias_X, id_TK, weight_TK, rule, shared, live_R, given, dependent=dependent)
    else:
        reference.route(logit_TX, bias_X, id_TK, weight_TK, rule, shared, live_R, given)


def experts(
    x_TE: Tensor,
    id_TK: Tensor,
    weight_TK: Tensor,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    out_TE: Tensor,
    *,
    shared: int = 0,
    add_norm: AddNorm | None = None,
    before_TE: Tensor | None = None,
    workspace: Tensor | None = None,
    quantize_activations: bool = False,
    rounded: tuple[Tensor, Tensor] | None = None,
    limit: float = 0.0,
    round_to: Fp8Rows | None = None,
    dependent: bool = False,
) -> None:
    """out[t] = sum over k of weight[t, k] * down[id] · (silu(gate[id] · x[t]) * (up[id] · x[t])).

    - `gate_up_XFE` holds the I gate rows of an expert, then its I up rows. Rows of `x_TE` and `out_TE` may be strided,
      everything else is contiguous. On a GPU E and I are multiples of 16.
    - Weights are plain, in the dtype of `x_TE`, or in 8 or 4 bits (`kernels.matrix`), either matrix for itself. On a
      GPU those stay as they are stored until they are in registers. FP8 is then multiplied exactly, and sums within a
      block are scaled in fp32; INT4 and MXFP4 times their scale are rounded to the dtype, which rounds nothing of MXFP4
      in bf16. For few tokens on Hopper INT4, too, is multiplied exactly. Kernels there need scales of INT4 below 32,
      and of MXFP4 up to 2.
    - `id_TK` (int64): -1 marks a pair that is no work; a token of which all pairs are -1 gets 0, whatever its input
      holds. An id of X or more is the caller's error and treated the same. A token has no expert twice.
    - `weight_TK`: fp32. The sum over k is taken in fp32, in the order of k, and rounded once; on a GPU what is
      summed, of more than one token or with weights of four bits, has been rounded to the dtype before.
    - `shared`: the last so many of the X experts are the last of every token's K (see `route`), but for padding. It
      changes nothing but how the work is cut up.
    - `add_norm`: the sum, rounded as above, is added to a residual instead, and `out_TE` gets the residual's norm: as
      `kernels.rms_norm.add_rms_norm` of the sum. The residual shares no memory with anything else.
    - `before_TE`: without a norm, what the sum is added to in fp32, before it is rounded; of any floating dtype, and in
      memory of its own. Rows may be strided. ValueError for other sizes, or beside `add_norm`.
    - `workspace` (GPU): a uint8 tensor of `workspace_bytes` bytes that needs no initialisation; without one the call
      allocates it.
    - `quantize_activations`: whether a Hopper GPU may round the inputs of both products to FP8 where it multiplies many
      tokens in bf16 with FP8 weights in blocks of 128 x 128, or with MXFP4 weights that are FP8 times a power of two
      for each row (`MicroScaled4.least`): with a scale for each token, or pair, and 128 features, as `kernels.quantize`
      says. Sums of 128 products are then scaled and added up in fp32.
    - `rounded`: the numbers and scales that `kernels.quantize` has made of `x_TE`, if it has, both contiguous: then the
      call need not.
    - `limit`: where above 0 the activation is silu(min(gate, limit)) * clamp(up, -limit, limit).
    - `round_to`: with a norm alone, where that is rounded to FP8 besides, as `kernels.quantize.quantize` does it, by
      the launch that makes it; E is a multiple of 128. ValueError without a norm.
    - `dependent` (GPU): programmatic dependent launch, see `launch`.

    Source: DeepSeekMoE (Dai et al., 2024); grouped products over sorted tokens: MegaBlocks (Gale et al., 2022).
    """
    if before_TE is not None and (add_norm is not None or before_TE.shape != out_TE.shape or before_TE.stride(1) != 1):
        raise ValueError(
            f"a sum of {tuple(out_TE.shape)} is added to rows of as many features side by side, and has no norm behind "
            f"it then; {tuple(before_TE.shape)} was given {'without' if add_norm is None else 'with'} a norm"
        )
    if round_to is not None and (add_norm is None or out_TE.shape[1] % GROUP):
        raise ValueError(f"a norm of whole groups of {GROUP} features can be rounded; this is {tuple(out_TE.shape)}")
    if not x_TE.is_cuda:
        reference.experts_grouped(x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, out_TE, limit, before_TE)
        if add_norm is not None:
            add_rms_norm(out_TE, add_norm.residual_TE, add_norm.weight_E, out_TE, eps=add_norm.eps)
        if round_to is not None:
            quantize(out_TE, *round_to.of(len(out_TE)), by_token_TG=round_to.by_token_TG)
        return
    shape = experts_shape(x_TE, id_TK, down_XEI, shared=shared, quantize_activations=quantize_activations, limit=limit)
    tensors = x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, out_TE
    _launch(tensors, shape, workspace, dependent, add_norm, rounded, before_TE, round_to)


def add_experts(
    x_TE: Tensor,
    id_TK: Tensor,
    weight_TK: Tensor,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    sum_TGE: Tensor,
    *,
    workspace: Tensor | None = None,
    limit: float = 0.0,
    add: bool = True,
    dependent: bool = False,
) -> None:
    """sum[t, g] += what `experts` computes, of the g-th of G equal groups of neighbouring intermediate features.

    What is added is bitwise the same in any call, whatever other tokens it comes with, also in one for fewer of the
    groups, as long as those keep the blocks and groups of scaled weights whole; it is added expert by expert, in the
    order of k, without `add` to 0, whatever the sum holds. `sum_TGE` is fp32 and contiguous; the workspace is that of a
    shape with G groups. All else is as in `experts`.
    """
    if not x_TE.is_cuda:
        if not add:
            sum_TGE.zero_()
        reference.add_experts(x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, sum_TGE, limit)
        return
    shape = experts_shape(x_TE, id_TK, down_XEI, groups=sum_TGE.shape[1], limit=limit)
    tensors = x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, sum_TGE
    _launch(tensors, shape, workspace, dependent, before_TE=sum_TGE if add else None)


def _launch(
    tensors: tuple[Tensor, Tensor, Tensor, Matrix, Matrix, Tensor],
    shape: ExpertsShape,
    workspace: Tensor | None,
    dependent: bool = False,
    add_norm: AddNorm | None = None,
    rounded: tuple[Tensor, Tensor] | None = None,
    before_TE: Tensor | None = None,
    round_to: Fp8Rows | None = None,
) -> None:
    tiling = schedule.tiling(shape, (stored(tensors[3]), stored(tensors[4])))
    if workspace is None:
        device = tensors[0].device
        workspace = torch.empty(schedule.Workspace.bytes(shape, tiling), dtype=torch.uint8, device=device)
    scratch = schedule.Workspace.over(workspace, shape, tiling)
    behind = add_norm, rounded, before_TE, round_to
    launch.ExpertLaunches(*tensors, scratch, shape, tiling, dependent, *behind).run()


def experts_shape(
    x_TE: Tensor,
    id_TK: Tensor,
    down_XEI: Matrix,
    *,
    groups: int = 0,
    shared: int = 0,
    quantize_activations: bool = False,
    limit: float = 0.0,
) -> ExpertsShape:
    """The sizes of a call of `experts` with so many shared ones, or of `add_experts` with so many groups.
    `quantize_activations`, `limit`: see there; they need no more memory."""
    experts, hidden, intermediate = down_XEI.shape
    tokens, chosen, dtype = x_TE.shape[0], id_TK.shape[1], x_TE.dtype
    aligned = x_TE.data_ptr() % 16 == 0 and x_TE.stride(0) % 8 == 0
    hopper = hopper_programs(x_TE.device) if aligned else 0
    return ExpertsShape(
        tokens, chosen, experts, hidden, intermediate, dtype, groups, shared, hopper, quantize_activations, limit
    )


def hopper_programs(device: torch.device) -> int:
    """`ExpertsShape.hopper` of a GPU, for tokens in aligned rows."""
    return multiprocessors(device) if is_hopper(device) and _REINTERPRETED.there() else 0


def workspace_bytes(shape: ExpertsShape) -> int:
    """Bytes of workspace that a call needs on a GPU, however its weights are stored."""
    return schedule.Workspace.bytes(shape, schedule.tiling(shape))
