"""Reference of `kernels.moe` in plain torch. Two ways to compute the experts, which must agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import deterministic_math
from kernels.linear import grouped_linear, linear
from kernels.matrix import Matrix
from kernels.moe.activation import clamped
from kernels.routing_rule import RoutingRule
from kernels.routing_table import GivenExperts


def route(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    id_TK: Tensor,
    weight_TK: Tensor,
    rule: RoutingRule,
    shared: int = 0,
    live_R: Tensor | None = None,
    given: GivenExperts | None = None,
) -> None:
    if logit_TX.dim() == 3:
        logit_TX = logit_TX.sum(1)
    tokens, experts = logit_TX.shape
    count = id_TK.shape[1] - shared
    if rule.scoring == "softmax":
        power_TX = deterministic_math.exp(logit_TX - logit_TX.amax(-1, keepdim=True))
        score_TX = power_TX / power_TX.sum(-1, keepdim=True)
    elif rule.scoring == "sqrt_softplus":
        score_TX = deterministic_math.softplus(logit_TX).sqrt()
    else:
        score_TX = deterministic_math.sigmoid(logit_TX)
    choice_TX = score_TX if bias_X is None else score_TX + bias_X
    if rule.groups > 1:
        member_TGX = choice_TX.view(choice_TX.shape[0], rule.groups, -1)
        group_TG = member_TGX.amax(-1) if bias_X is None else member_TGX.topk(2, dim=-1).values.sum(-1)
        closed_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, _best(group_TG, rule.top_groups), False)
        closed = 0.0 if rule.closed_at_zero else -torch.inf
        choice_TX = member_TGX.masked_fill(closed_TG.unsqueeze(-1), closed).flatten(1)
    chosen_TK = _best(choice_TX, count) if given is None else given.expert_YK[given.row_T].long()
    there_TK = (chosen_TK >= 0) & (chosen_TK < experts)
    chosen_weight_TK = score_TX.gather(1, chosen_TK.where(there_TK, 0)).where(there_TK, 0.0)
    chosen_TK = chosen_TK.where(there_TK, -1)
    if rule.normalize:
        chosen_weight_TK = chosen_weight_TK / (chosen_weight_TK.sum(-1, keepdim=True) + 1e-20)
    if given is not None:  # an expert that is named twice
        same_TKK = chosen_TK.unsqueeze(2) == chosen_TK.unsqueeze(1)
        chosen_weight_TK = (same_TKK * chosen_weight_TK.unsqueeze(1)).sum(2)
        again_TK = same_TKK.tril(-1).any(2)
        chosen_TK, chosen_weight_TK = chosen_TK.masked_fill(again_TK, -1), chosen_weight_TK.masked_fill(again_TK, 0.0)
    id_TK[:, :count] = chosen_TK
    weight_TK[:, :count] = chosen_weight_TK * rule.scale
    id_TK[:, count:] = torch.arange(experts, experts + shared, device=id_TK.device)
    weight_TK[:, count:] = 1.0
    if live_R is not None and tokens:
        padded_T = (live_R <= 0).repeat_interleave(tokens // live_R.shape[0])
        id_TK.masked_fill_(padded_T.unsqueeze(-1), -1)
        weight_TK.masked_fill_(padded_T.unsqueeze(-1), 0.0)


def _best(score_TX: Tensor, count: int) -> Tensor:
    """Ids of the `count` best, best first, ties to the lowest id (topk leaves the order of ties open)."""
    return torch.sort(score_TX, dim=-1, descending=True, stable=True).indices[:, :count]


def experts_gathered(
    x_TE: Tensor,
    id_TK: Tensor,
    weight_TK: Tensor,
    gate_up_XFE: Tensor,
    down_XEI: Tensor,
    out_TE: Tensor,
    limit: float = 0.0,
    before_TE: Tensor | None = None,
) -> None:
    """Copy the weights each (token, expert) pair needs and multiply in one batch: no host value, memory per pair.
    `before_TE`: see `kernels.moe.experts`."""
    tokens, chosen = id_TK.shape
    id_Y = id_TK.flatten()  # Y: (token, expert) pairs
    wanted_Y = _wanted(id_Y, gate_up_XFE.shape[0])
    id_Y = id_Y.where(wanted_Y, 0)
    x_YE1 = x_TE.repeat_interleave(chosen, dim=0).unsqueeze(-1)
    gate_YI1, up_YI1 = torch.bmm(gate_up_XFE[id_Y], x_YE1).chunk(2, dim=1)
    gate_YI1, up_YI1 = clamped(gate_YI1, up_YI1, limit)
    y_YE = torch.bmm(down_XEI[id_Y], F.silu(gate_YI1) * up_YI1).squeeze(-1)
    y_YE = y_YE.to(torch.promote_types(y_YE.dtype, torch.float32)) * weight_TK.view(-1, 1)
    y_YE = y_YE.masked_fill(~wanted_Y.unsqueeze(-1), 0.0)
    sum_TE = y_YE.view(tokens, chosen, -1).sum(1)
    out_TE.copy_(sum_TE if before_TE is None else sum_TE + before_TE)


def experts_grouped(
    x_TE: Tensor,
    id_TK: Tensor,
    weight_TK: Tensor,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    out_TE: Tensor,
    limit: float = 0.0,
    before_TE: Tensor | None = None,
) -> None:
    """Sort the pairs by expert and run every wanted expert once over its tokens. `before_TE`: see
    `kernels.moe.experts`."""
    chosen = id_TK.shape[1]
    sorted_Y, order_Y = id_TK.flatten().sort(stable=True)
    ids, counts = torch.unique_consecutive(sorted_Y, return_counts=True)
    token_Y = order_Y.div(chosen, rounding_mode="floor")
    weight_Y1 = weight_TK.flatten()[order_Y].unsqueeze(-1)
    sum_TE = torch.zeros_like(x_TE, dtype=torch.promote_types(x_TE.dtype, torch.float32))
    if before_TE is not None:
        sum_TE += before_TE
    begin = 0
    for expert, count in zip(ids.tolist(), counts.tolist(), strict=True):
        part = slice(begin, begin + count)
        begin += count
        if not 0 <= expert < gate_up_XFE.shape[0]:
            continue
        gate_YI, up_YI = _product(x_TE[token_Y[part]], gate_up_XFE, expert).chunk(2, dim=-1)
        if limit:
            gate_YI, up_YI = clamped(gate_YI, up_YI, limit)
        y_YE = _product((F.silu(gate_YI) * up_YI).to(x_TE.dtype), down_XEI, expert)
        sum_TE.index_add_(0, token_Y[part], y_YE * weight_Y1[part])
    out_TE.copy_(sum_TE)


def _product(x_YE: Tensor, weight_XFE: Matrix, expert: int) -> Tensor:
    """Multiply by an expert's matrix: plain weights in their dtype, others in fp32 (fp64 in fp64)."""
    if isinstance(weight_XFE, Tensor):
        return F.linear(x_YE, weight_XFE[expert])
    compute = torch.promote_types(x_YE.dtype, torch.float32)
    return F.linear(x_YE.to(compute), weight_XFE[expert].float().to(compute))


def _matrix(weight_XFE: Matrix, expert: int, dtype: torch.dtype) -> Tensor:
    """An expert's matrix, in no fewer bits than it has."""
    return weight_XFE[expert] if isinstance(weight_XFE, Tensor) else weight_XFE[expert].float().to(dtype)


def add_experts(
    x_TE: Tensor,
    id_TK: Tensor,
    weight_TK: Tensor,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    sum_TGE: Tensor,
    limit: float = 0.0,
) -> None:
    compute = torch.promote_types(x_TE.dtype, torch.float32)
    part_TKGE = torch.zeros(*id_TK.shape, *sum_TGE.shape[1:], dtype=compute)
    for expert in torch.unique(id_TK).tolist():
        if not 0 <= expert < gate_up_XFE.shape[0]:
            continue
        token_Y, column_Y = (id_TK == expert).nonzero(as_tuple=True)
        gate_up_YF = torch.empty(len(token_Y), gate_up_XFE.shape[1], dtype=compute)
        gate_up_FE, down_EI = (_matrix(weight, expert, compute) for weight in (gate_up_XFE, down_XEI))
        linear(x_TE[token_Y].to(compute), gate_up_FE.to(compute), gate_up_YF, invariant=True)
        gate_YI, up_YI = gate_up_YF.chunk(2, dim=-1)
        gate_YI, up_YI = clamped(gate_YI, up_YI, limit)
        part_YGE = torch.empty(len(token_Y), *sum_TGE.shape[1:], dtype=compute)
        grouped_linear((deterministic_math.silu(gate_YI) * up_YI).to(x_TE.dtype), down_EI, part_YGE)
        part_TKGE[token_Y, column_Y] = part_YGE * weight_TK[token_Y, column_Y, None, None]
    for part_TGE in part_TKGE.unbind(1):
        sum_TGE += part_TGE


def _wanted(id_Y: Tensor, experts: int) -> Tensor:
    return (id_Y >= 0) & (id_Y < experts)
