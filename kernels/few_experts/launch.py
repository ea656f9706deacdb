"""Launches the experts of a few tokens. Allocates nothing and waits for nothing, so it may be captured.

`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe where
every kernel before waits for its own predecessor, and the four kernels follow one another directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from kernels.few_experts import choice as choice_kernel
from kernels.few_experts import fp8_launch, kernel, stream
from kernels.few_experts.records import Choices, Sum
from kernels.fp16_scaled import Fp16Scaled
from kernels.gluon.stored import stored
from kernels.gluon.tiles import ROWS
from kernels.linear.fp8_even_launch import even, fp8_even
from kernels.linear.fp8_launch import kept
from kernels.linear.launch import (
    RESIDENT_BYTES,
    Streaming,
    options,
    pieces,
    ring_of,
    stream_linear,
    streamable,
)
from kernels.linear.records import Size, Units
from kernels.matrix import BlockScaled, Matrix
from kernels.pending_norm import PendingNorm
from kernels.runtime.hopper import multiprocessors

if TYPE_CHECKING:
    from kernels.few_experts import ChosenExperts
    from kernels.routing_rule import RoutingRule

MOST_PLAIN = 4
"""Most tokens whose router logits are summed on plain cores although tensor cores could."""
MOST_EXPERTS = 512
"""Most experts, groups filled up to powers of two, that one token may choose from."""


def router(x: PendingNorm, weight_XE: Tensor, logit_TX: Tensor, *, dependent: bool = False) -> None:
    tokens, features = x.x_TE.shape
    experts = weight_XE.shape[0]
    if not weight_XE.is_contiguous() or weight_XE.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError("router weights are contiguous fp32 or bf16")
    if tokens > MOST_PLAIN and streamable(x.x_TE, weight_XE):
        stream_linear(x.x_TE, weight_XE, logit_TX, pending=x, dependent=dependent)
        return
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
        GROUP=4 // rows,
        ROWS=rows,
        DEPENDENT=dependent,
        num_warps=min(max(block // 1024, 1), 8),
        **options(dependent),
    )


def _blocks(experts: int, groups: int) -> tuple[int, int]:
    """Groups, and experts of a group, filled up to powers of two and to the lanes of a warp."""
    group_block = triton.next_power_of_2(groups)
    return group_block, max(triton.next_power_of_2(experts // groups), 32 // group_block)


def choosable(experts: int, groups: int) -> bool:
    """Whether `choose` serves so many experts in so many groups."""
    group_block, member_block = _blocks(experts, groups)
    return group_block <= 32 and group_block * member_block <= MOST_EXPERTS


def choose(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    length_R: Tensor,
    choice: ChosenExperts,
    rule: RoutingRule,
    *,
    dependent: bool = False,
) -> None:
    (tokens, experts), chosen = logit_TX.shape, choice.weight_TK.shape[1]
    if not (logit_TX.is_contiguous() and length_R.is_contiguous()) or tokens % length_R.shape[0]:
        raise ValueError("logits and lengths are contiguous, and rows have equally many tokens")
    if rule.closed_at_zero:
        raise ValueError("experts of other groups cannot count as 0 here: choose with kernels.moe.route")
    groups = rule.groups
    if not choosable(experts, groups):
        raise ValueError(f"{experts} experts in {groups} groups do not fit a warp")
    group_block, member_block = _blocks(experts, groups)
    block = triton.next_power_of_2(tokens)
    warps = min(block, 16)
    choice_kernel.choose[(1,)](
        logit_TX,
        logit_TX if bias_X is None else bias_X,
        length_R,
        choice.place_TX,
        choice.weight_TK,
        choice.slot_S,
        tokens,
        (1 << 16) // (tokens // length_R.shape[0]) + 1,
        choice.slots,
        rule.scale,
        EXPERTS=experts,
        GROUPS=groups,
        GROUP_BLOCK=group_block,
        MEMBER_BLOCK=member_block,
        TOP_GROUPS=rule.top_groups,
        CHOSEN=chosen,
        TOKENS=block,
        WARPS=warps,
        SOFTMAX=rule.scoring == "softmax",
        BIASED=bias_X is not None,
        NORMALIZE=rule.normalize,
        DEPENDENT=dependent,
        num_warps=warps,
        **options(dependent),
    )


def gate_up(
    x: PendingNorm, choice: ChosenExperts, weight_XFE: Matrix, act_YI: Tensor, *, dependent: bool = False
) -> None:
    """Launch the first half of `kernels.few_experts.experts`. `act_YI`: [T * (K + shared), I]."""
    tokens, features = x.x_TE.shape
    intermediate = act_YI.shape[1]
    shared, (data, scales, how) = _shared(choice, weight_XFE, act_YI), stored(weight_XFE)
    if isinstance(weight_XFE, BlockScaled) and kept(tokens, weight_XFE):
        fp8_launch.gate_up(x, choice, shared, weight_XFE, act_YI, dependent=dependent)
        return
    cut = Streaming.of(features)
    programs = min((shared + choice.slots) * triton.cdiv(intermediate, ROWS // 2), multiprocessors(x.x_TE.device))
    stream.gate_up[(programs,)](
        x.x_TE,
        x.square_TP,
        data,
        scales,
        choice.slot_S,
        choice.place_TX,
        choice.weight_TK,
        act_YI,
        tokens,
        choice.slots,
        x.eps,
        STORED=how,
        SIZE=Size(intermediate, features),
        CHOICES=Choices(choice.experts, shared, choice.weight_TK.shape[1]),
        X_STRIDE=x.x_TE.stride(0),
        NORM=pieces(x),
        RESIDENT=cut.token_bytes(tokens) <= RESIDENT_BYTES,
        **ring_of(cut, tokens, 6 if tokens <= 8 else 5, dependent),
    )


def down(
    act_YI: Tensor | Fp16Scaled,
    choice: ChosenExperts,
    weight_XEI: Matrix,
    out_TE: Tensor,
    residual_TE: Tensor | None = None,
    norm_E: Tensor | None = None,
    square_TP: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Launch the second half of `kernels.few_experts.experts`, of activations that are in scaled fp16 where
    `takes_fp16_scaled` says so."""
    tokens, features = out_TE.shape
    if isinstance(act_YI, Fp16Scaled):
        assert isinstance(weight_XEI, BlockScaled)
        into = out_TE, residual_TE, norm_E, square_TP
        shared = _shared(choice, weight_XEI, act_YI.fp16_TF)
        fp8_launch.down(act_YI, choice, shared, weight_XEI, *into, dependent=dependent)
        return
    intermediate = act_YI.shape[1]
    shared, (data, scales, how) = _shared(choice, weight_XEI, act_YI), stored(weight_XEI)
    if isinstance(weight_XEI, BlockScaled) and even(tokens, weight_XEI):
        who = Units(True, choice.experts, shared, choice.weight_TK.shape[1])
        units = choice.slot_S, choice.place_TX, choice.slots, who
        fp8_even(act_YI, weight_XEI, out_TE, residual_TE, norm_E, square_TP, units, dependent=dependent)
        return
    stream.down[(triton.cdiv(features, ROWS),)](
        act_YI,
        data,
        scales,
        choice.slot_S,
        choice.place_TX,
        out_TE if residual_TE is None else residual_TE,
        out_TE if norm_E is None else norm_E,
        out_TE,
        out_TE if square_TP is None else square_TP,
        tokens,
        choice.slots,
        STORED=how,
        SIZE=Size(features, intermediate),
        CHOICES=Choices(choice.experts, shared, choice.weight_TK.shape[1]),
        SUM=Sum(
            residual_TE is not None,
            0 if residual_TE is None else residual_TE.stride(0),
            out_TE.stride(0),
            1 if square_TP is None else square_TP.shape[1],
        ),
        **ring_of(Streaming.of(intermediate), tokens, 6 if tokens <= 8 else 4, dependent),
    )


def _shared(choice: ChosenExperts, weight: Matrix, act_YI: Tensor) -> int:
    """Return the number of shared experts; ValueError if the tensors do not fit together."""
    (tokens, chosen), shared = choice.weight_TK.shape, weight.shape[0] - choice.experts
    if shared < 0 or act_YI.shape[0] != tokens * (chosen + shared):
        raise ValueError(
            f"weights of {weight.shape[0]} experts and activations of {act_YI.shape[0]} (token, expert) pairs do not "
            f"fit {tokens} tokens that choose {chosen} of {choice.experts}"
        )
    data = weight if isinstance(weight, Tensor) else weight.data
    if not data.is_contiguous() or not act_YI.is_contiguous():
        raise ValueError("the experts' weights and activations are contiguous")
    return shared
