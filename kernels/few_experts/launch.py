"""Launches the experts of a few tokens. Allocates nothing and waits for nothing, so it may be captured.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe where
every kernel before waits for its own predecessor, and the four kernels follow one another directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from kernels.few_experts import kernel, stream
from kernels.linear.launch import Streaming, columns, cut_up, options, pieces
from kernels.linear.stream import ROWS
from kernels.pending_norm.pieces import PendingNorm

if TYPE_CHECKING:
    from kernels.few_experts import Choice, Routing


def router(x: PendingNorm, weight_XE: Tensor, logit_TX: Tensor, *, dependent: bool = False) -> None:
    """See `kernels.few_experts.router`."""
    tokens, features = x.x_TE.shape
    experts = weight_XE.shape[0]
    if not weight_XE.is_contiguous() or weight_XE.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("router weights are contiguous fp32 or bf16")
    rows = 1 if experts <= 128 else 2
    count = x.square_TP.shape[1]
    block = triton.next_power_of_2(features)
    kernel.router[(triton.cdiv(experts, rows),)](
        x.x_TE,
        x.square_TP,
        weight_XE,
        logit_TX,
        tokens,
        x.eps,
        X_STRIDE=x.x_TE.stride(0),
        EXPERTS=experts,
        FEATURES=features,
        BLOCK=block,
        PIECES=count,
        PIECE_BLOCK=triton.next_power_of_2(count),
        TOKENS=triton.next_power_of_2(tokens),
        ROWS=rows,
        DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 8),
        **options(dependent),
    )


def choose(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    length_R: Tensor,
    choice: Choice,
    routing: Routing,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.few_experts.choose`."""
    (tokens, experts), chosen = logit_TX.shape, choice.weight_TK.shape[1]
    if not (logit_TX.is_contiguous() and length_R.is_contiguous()) or tokens % length_R.shape[0]:
        raise ValueError("logits and lengths are contiguous, and rows have equally many tokens")
    groups = routing.groups
    group_block, member_block = triton.next_power_of_2(groups), triton.next_power_of_2(experts // groups)
    block = triton.next_power_of_2(tokens)
    kernel.choose[(1,)](
        logit_TX,
        logit_TX if bias_X is None else bias_X,
        length_R,
        choice.place_TX,
        choice.weight_TK,
        choice.slot_S,
        tokens,
        tokens // length_R.shape[0],
        choice.slots,
        routing.scale,
        EXPERTS=experts,
        GROUPS=groups,
        GROUP_BLOCK=group_block,
        MEMBER_BLOCK=member_block,
        TOP_GROUPS=routing.top_groups,
        CHOSEN=chosen,
        SLOT_BLOCK=triton.next_power_of_2(min(experts, block * chosen)),
        TOKENS=block,
        SOFTMAX=routing.scoring == "softmax",
        BIASED=bias_X is not None,
        NORMALIZE=routing.normalize,
        DEPENDENT=dependent,
        num_warps=min(max(block * group_block * member_block // 256, 1), 8),
        **options(dependent),
    )


def gate_up(
    x: PendingNorm,
    choice: Choice,
    weight_XFE: Tensor,
    shared_act_TSI: Tensor,
    act_YI: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.few_experts.experts`: the first half."""
    tokens, features = x.x_TE.shape
    intermediate = act_YI.shape[1]
    shared = _shared(choice, weight_XFE, shared_act_TSI)
    programs = (shared + choice.slots) * triton.cdiv(intermediate, ROWS // 2)
    constants = pieces(x)
    del constants["SCALED"]
    stream.gate_up[(programs,)](
        x.x_TE,
        x.square_TP,
        weight_XFE[choice.experts :] if shared else weight_XFE,
        weight_XFE,
        choice.slot_S,
        choice.place_TX,
        choice.weight_TK,
        shared_act_TSI if shared else act_YI,
        act_YI,
        tokens,
        x.eps,
        SHARED=shared * intermediate,
        I=intermediate,
        K=features,
        EXPERTS=choice.experts,
        CHOSEN=choice.weight_TK.shape[1],
        X_STRIDE=x.x_TE.stride(0),
        **constants,
        **cut_up(Streaming.of(features), tokens, dependent),
    )


def down(
    shared_act_TSI: Tensor,
    act_YI: Tensor,
    choice: Choice,
    weight_XEI: Tensor,
    out_TE: Tensor,
    residual_TE: Tensor | None = None,
    norm_E: Tensor | None = None,
    square_TP: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """See `kernels.few_experts.experts`: the second half."""
    tokens, features = out_TE.shape
    intermediate = act_YI.shape[1]
    shared = _shared(choice, weight_XEI, shared_act_TSI)
    cut = Streaming.of(intermediate)
    if cut.chunks > 4:
        cut = Streaming(16, cut.width, -(-intermediate // (16 * cut.width)))
    ahead = max(1, 6 // cut.chunks) if cut.chunks > 1 else 4
    stream.down[(triton.cdiv(features, ROWS),)](
        shared_act_TSI if shared else act_YI,
        act_YI,
        weight_XEI[choice.experts :] if shared else weight_XEI,
        weight_XEI,
        choice.slot_S,
        choice.place_TX,
        out_TE if residual_TE is None else residual_TE,
        out_TE if norm_E is None else norm_E,
        out_TE,
        out_TE if square_TP is None else square_TP,
        tokens,
        choice.slots,
        E=features,
        SHARED=shared * intermediate,
        I=intermediate,
        EXPERTS=choice.experts,
        CHOSEN=choice.weight_TK.shape[1],
        RESIDUAL=residual_TE is not None,
        RESIDUAL_STRIDE=0 if residual_TE is None else residual_TE.stride(0),
        OUT_STRIDE=out_TE.stride(0),
        PIECES=1 if square_TP is None else square_TP.shape[1],
        TOKENS=columns(tokens),
        WIDTH=cut.width,
        AHEAD=ahead,
        WARPS=cut.warps,
        DEPENDENT=dependent,
        num_warps=cut.warps,
        **options(dependent),
    )


def _shared(choice: Choice, weight: Tensor, shared_act_TSI: Tensor) -> int:
    """How many experts are shared."""
    shared = weight.shape[0] - choice.experts
    if not weight.is_contiguous() or not shared_act_TSI.is_contiguous() or shared_act_TSI.shape[1] != shared:
        raise ValueError(
            f"weights of {weight.shape[0]} experts and activations of {shared_act_TSI.shape[1]} shared ones must be "
            f"contiguous, and fit a choice from {choice.experts}"
        )
    return shared
