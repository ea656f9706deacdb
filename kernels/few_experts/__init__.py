"""The mixture of experts for a few tokens, from the pending norm before it to the residual after it: four launches,
for FP8 weights on Hopper five.

Every chosen expert's weights are streamed once for all its tokens, as are those of shared experts, which all have.

Shape legend: T tokens, R rows, E features, X experts (in weights the shared ones behind the others), K experts that a
token chooses, S = min(X, T K) slots, Y = T K choices, F = 2 I, I intermediate features of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.few_experts import launch, reference
from kernels.few_experts.launch import choosable
from kernels.fp16_scaled import Fp16Scaled, to_fp16_scaled
from kernels.linear import takes_fp16_scaled
from kernels.matrix import Matrix
from kernels.pending_norm import PendingNorm
from kernels.routing_rule import RoutingRule

__all__ = ["ChosenExperts", "choosable", "choose", "experts", "router"]


@dataclass(frozen=True)
class ChosenExperts:
    """Experts that the tokens chose."""

    place_TX: Tensor
    """int32: where an expert stands among a token's choices, -1 if nowhere."""
    weight_TK: Tensor
    """fp32 weights, best first."""
    slot_S: Tensor
    """int32 [S + 1]: the experts anyone chose, ascending, then -1; last, how many they are."""

    @property
    def experts(self) -> int:
        """Experts one can choose from."""
        return self.place_TX.shape[1]

    @property
    def slots(self) -> int:
        """The most experts that can be chosen."""
        return self.slot_S.shape[0] - 1

    @staticmethod
    def empty(tokens: int, experts: int, chosen: int, empty: Callable[..., Tensor]) -> ChosenExperts:
        """Memory for one, from `empty(*shape, dtype=...)`."""
        return ChosenExperts(
            empty(tokens, experts, dtype=torch.int32),
            empty(tokens, chosen, dtype=torch.float32),
            empty(min(experts, tokens * chosen) + 1, dtype=torch.int32),
        )


def router(x: PendingNorm, weight_XE: Tensor, logit_TX: Tensor, *, dependent: bool = False) -> None:
    """logit = norm(x) · weight^T, sums and logits in fp32; weights in fp32 or bf16."""
    if x.x_TE.is_cuda:
        launch.router(x, weight_XE, logit_TX, dependent=dependent)
    else:
        reference.router(x, weight_XE, logit_TX)


def choose(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    length_R: Tensor,
    choice: ChosenExperts,
    rule: RoutingRule,
    *,
    dependent: bool = False,
) -> None:
    """Let every token choose its experts, as `kernels.moe.route` does, and list who was chosen.

    Token t belongs to row t // (T // R); the tokens of rows of `length_R` (int32) 0 are padding and choose none.
    ValueError where a warp cannot hold a token's experts: X, the groups and their members filled up to powers of two,
    is at most 512, in at most 32 groups; and for a scoring that it does not know.
    """
    if rule.scoring == "sqrt_softplus":
        raise ValueError(
            f"experts of the small-batch path are not chosen by {rule.scoring}; `kernels.moe.route` does that"
        )
    if logit_TX.is_cuda:
        launch.choose(logit_TX, bias_X, length_R, choice, rule, dependent=dependent)
    else:
        reference.choose(logit_TX, bias_X, length_R, choice, rule)


def experts(
    x: PendingNorm,
    choice: ChosenExperts,
    gate_up_XFE: Matrix,
    down_XEI: Matrix,
    residual_TE: Tensor | None,
    norm_E: Tensor | None,
    out: Tensor | PendingNorm,
    empty: Callable[..., Tensor],
    *,
    dependent: bool = False,
) -> None:
    """residual (fp32) += sum over shared experts of expert(norm(x)) + sum over choices of weight * expert(norm(x)), and
    `out` = its pending norm of weight `norm_E`; without a residual, `out` = that sum.

    An expert is down · (silu(gate · x) * (up · x)); gate rows come before up rows. The weights are those of the experts
    one can choose from, then of the shared ones. `empty(*shape, dtype=...)` gives memory for the activations.
    """
    if not x.x_TE.is_cuda:
        reference.experts(x, choice, gate_up_XFE, down_XEI, residual_TE, norm_E, out)
        return
    tokens, chosen = choice.weight_TK.shape
    stored, _, intermediate = down_XEI.shape
    act_YI = empty(tokens * (chosen + stored - choice.experts), intermediate, dtype=x.x_TE.dtype)
    launch.gate_up(x, choice, gate_up_XFE, act_YI, dependent=dependent)
    act: Tensor | Fp16Scaled = act_YI
    if takes_fp16_scaled(tokens, down_XEI):
        act = Fp16Scaled.empty(act_YI, empty)
        to_fp16_scaled(act_YI, act, dependent=dependent)
    if isinstance(out, PendingNorm):
        launch.down(act, choice, down_XEI, out.x_TE, residual_TE, norm_E, out.square_TP, dependent=dependent)
    else:
        launch.down(act, choice, down_XEI, out, dependent=dependent)
