"""References of `kernels.few_experts` in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import pending_norm
from kernels.matrix import Matrix
from kernels.moe import reference as moe
from kernels.pending_norm import PendingNorm

if TYPE_CHECKING:
    from kernels.few_experts import ChosenExperts
    from kernels.routing_rule import RoutingRule


def router(x: PendingNorm, weight_XE: Tensor, logit_TX: Tensor) -> None:
    torch.mm(pending_norm.normed(x), weight_XE.t().float(), out=logit_TX)


def choose(logit_TX: Tensor, bias_X: Tensor | None, length_R: Tensor, choice: ChosenExperts, rule: RoutingRule) -> None:
    tokens, chosen = choice.weight_TK.shape
    id_TK = torch.empty(tokens, chosen, dtype=torch.int64)
    moe.route(logit_TX, bias_X, id_TK, choice.weight_TK, rule)
    live_T = (length_R > 0).repeat_interleave(tokens // length_R.shape[0])
    rank_TK = torch.arange(chosen, dtype=torch.int32).expand(tokens, chosen)
    choice.place_TX.fill_(-1).scatter_(1, id_TK, torch.where(live_T.unsqueeze(1), rank_TK, -1))
    wanted_W = (choice.place_TX >= 0).any(0).nonzero().squeeze(1)
    choice.slot_S.fill_(-1)
    choice.slot_S[: len(wanted_W)] = wanted_W
    choice.slot_S[choice.slots] = len(wanted_W)


def experts(
    x: PendingNorm,
    choice: ChosenExperts,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    residual_TE: Tensor | None,
    norm_E: Tensor | None,
    out: Tensor | PendingNorm,
) -> None:
    dtype = x.x_TE.dtype
    x_TE = pending_norm.normed(x)
    sum_TE = torch.zeros_like(x_TE)
    for expert in range(choice.experts, gate_up_XFE.shape[0]):
        gate_up_FE, down_EI = gate_up_XFE[expert], down_XEI[expert]
        gate_TI, up_TI = (x_TE @ gate_up_FE.float().t()).chunk(2, dim=-1)
        sum_TE += (F.silu(gate_TI) * up_TI).to(dtype).float() @ down_EI.float().t()
    for expert in choice.slot_S[: int(choice.slot_S[choice.slots])].tolist():
        token_Y = (choice.place_TX[:, expert] >= 0).nonzero().squeeze(1)
        weight_Y = choice.weight_TK[token_Y, choice.place_TX[token_Y, expert].long()]
        gate_YI, up_YI = (x_TE[token_Y] @ gate_up_XFE[expert].float().t()).chunk(2, dim=-1)
        act_YI = (F.silu(gate_YI) * up_YI * weight_Y.unsqueeze(1)).to(dtype)
        sum_TE[token_Y] += act_YI.float() @ down_XEI[expert].float().t()
    if isinstance(out, PendingNorm):
        assert residual_TE is not None
        assert norm_E is not None
        residual_TE.add_(sum_TE)
        pending_norm.write(residual_TE, norm_E, out)
    else:
        out.copy_(sum_TE)
