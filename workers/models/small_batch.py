"""The small-batch path: as few, and as early, kernels as there can be.

What it computes is what the general path does; what differs is where kernels begin and end. Norms are pending
between kernels (`kernels.pending_norm`), the residual stream is fp32, every weight matrix is streamed once by kernels
that begin with it before their predecessor has finished (programmatic dependent launch). Between ranks, sums go through
all-reduces, and the kernel after one is launched plainly.

Shape legend: T tokens, E hidden features, F output features, I intermediate features of this rank, X experts, A
features of a norm, Y rows of a table.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from typing_extensions import override

from kernels import few_experts, moe, pending_norm
from kernels.few_experts import ChosenExperts
from kernels.linear import gated_linear, linear, linear_to_residual, normed_linear
from kernels.pending_norm import PIECE, PendingNorm
from kernels.rms_norm import AddNorm, rms_norm
from workers.memory.scratch import Scratch
from workers.models.config import ModelConfig
from workers.models.general import choose_experts, few_rows
from workers.models.layer_ops import LayerOps, Mixture, NormGate
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.weight import Weight


@cache
def unsupported(config: ModelConfig, mesh: Mesh) -> str:
    """Return why a model of this shape cannot take this path on a GPU; empty if it can."""
    heads, experts = config.num_heads // mesh.heads.size, config.moe_intermediate_size // mesh.experts.size
    rank_features = {
        "hidden_size": config.hidden_size,
        "kv_lora_rank + qk_rope_head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
        "q_lora_rank": config.q_lora_rank or PIECE,
        "query features": heads * config.qk_head_dim,
        "value features": heads * config.v_head_dim,
        "intermediate_size": config.intermediate_size // mesh.experts.size,
        "moe_intermediate_size": experts,
    }
    for name, features in rank_features.items():
        if features % PIECE:
            return f"{name} on a rank is {features}, no multiple of {PIECE}"
    for name, features in {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}.items():
        if features < 16 or features & (features - 1):
            return f"{name} = {features} is no power of two of at least 16"
    if experts > 4096:
        return f"moe_intermediate_size on a rank is {experts}, more than 4096"
    if config.norm_gate_rank:
        return "norms have gates"
    if config.streams is not None:
        return "there are several residual streams"
    if config.output_gate != "none":
        return "attention's output has a gate"
    routing = config.routing
    if routing is not None and routing.normed:
        return "the sum of a token's experts has a norm of its own"
    if routing is not None and routing.limit:
        return "what experts multiply is clamped"
    if routing is not None and not few_experts.choosable(routing.experts, routing.rule.groups):
        return f"{routing.experts} experts in {routing.rule.groups} groups are more than a warp chooses from"
    return ""


class SmallBatchOps(LayerOps[PendingNorm]):
    """Token-wise work of passes of at most `kernels.linear.MOST_STREAMED` tokens of decode rows alone; on a GPU in
    bf16."""

    decode_alone = True

    def __init__(self, group: Group, *, dependent: bool) -> None:
        """`dependent`: programmatic dependent launch, which the device must be able to do."""
        self.group, self._dependent = group, dependent

    @override
    def allocate_residual(self, tokens: int, hidden: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Memory in fp32, whatever `dtype`."""
        return scratch.empty(tokens, hidden, dtype=torch.float32)

    @override
    def allocate_normed(
        self, tokens: int, hidden: int, dtype: torch.dtype, eps: float, scratch: Scratch
    ) -> PendingNorm:
        return PendingNorm.empty(tokens, hidden, eps, dtype, scratch.empty)

    @override
    def enter(self, rows_YE: Tensor, id_T: Tensor | None, norm: AddNorm, out: PendingNorm) -> None:
        pending_norm.enter(rows_YE, id_T, norm.residual_TE, norm.weight_E, out, dependent=self._dependent)

    @override
    def linear(self, x: PendingNorm, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        normed_linear(x, weight_FE.matrix, out_TF, dependent=self._dependent)

    @override
    def narrow_linear(self, x: PendingNorm, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """Multiply as router logits are made, by a program for every row or two."""
        few_experts.router(x, weight_FE.plain, out_TF, dependent=self._dependent)

    @override
    def latent_linear(
        self,
        x: PendingNorm,
        weight_FE: Weight,
        norm_A: Tensor,
        eps: float,
        out_TF: Tensor,
        scratch: Scratch,
        scale_T: Tensor | None = None,
    ) -> PendingNorm:
        tokens, features = out_TF.shape[0], norm_A.shape[0]
        square_TP = scratch.empty(tokens, features // PIECE, dtype=torch.float32)
        latent = PendingNorm(out_TF[:, :features], square_TP, eps)
        normed_linear(
            x, weight_FE.matrix, out_TF, norm_A=norm_A, next=latent, scale_T=scale_T, dependent=self._dependent
        )
        return latent

    @override
    def gate(self, x: PendingNorm, gate: NormGate, scratch: Scratch) -> None:
        """NotImplementedError: see `unsupported`."""
        raise NotImplementedError("norms with gates do not take the small-batch path")

    @override
    def beside(self, normed: PendingNorm, x_TA: Tensor, scratch: Scratch) -> PendingNorm:
        """NotImplementedError: see `unsupported`."""
        raise NotImplementedError("queries that come with gates do not take the small-batch path")

    @override
    def gated(self, x: PendingNorm, gate_up_FE: Weight, scratch: Scratch) -> Tensor:
        act_TI = scratch.empty(x.x_TE.shape[0], gate_up_FE.shape[0] // 2, dtype=x.x_TE.dtype)
        gated_linear(x, gate_up_FE.matrix, act_TI, dependent=self._dependent)
        return act_TI

    @override
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: PendingNorm, scratch: Scratch) -> None:
        rows = few_rows(x_TF, weight_EF.matrix, scratch, dependent=self._dependent)
        if self.group.summed.size == 1:
            into = norm.residual_TE, norm.weight_E, out
            linear_to_residual(rows, weight_EF.matrix, *into, dependent=self._dependent)
            return
        sum_TE, part_TE = self._sum(out, scratch)
        linear(rows, weight_EF.matrix, part_TE, dependent=self._dependent)
        self._reduce(part_TE, sum_TE, norm, out)

    @override
    def add_experts(
        self, x: PendingNorm, mixture: Mixture, norm: AddNorm, out: PendingNorm, scratch: Scratch, live_R: Tensor | None
    ) -> None:
        assert live_R is not None  # of decode rows alone some may be padding
        routing, tokens, dependent = mixture.routing, x.x_TE.shape[0], self._dependent
        if mixture.gate_up_XFE.format.experts_alone:
            self._add_pending_experts(x, mixture, norm, out, scratch, live_R)
            return
        if mixture.shared is not None:  # the norm of the sum so far is written over
            self.add_gated(x, mixture.shared.gate_up_FE, mixture.shared.down_EI, norm, out, scratch)
        logit_TX = self._router(x, mixture, scratch)
        choice = ChosenExperts.empty(tokens, routing.experts, routing.experts_per_token, scratch.empty)
        few_experts.choose(logit_TX, mixture.bias_X, live_R, choice, routing.rule, dependent=dependent)
        if self.choices is not None:
            self.choices.note(choice.place_TX, choice.weight_TK)
        weights, memory = (mixture.gate_up_XFE.matrix, mixture.down_XEI.matrix), scratch.empty
        if self.group.summed.size == 1:
            into = norm.residual_TE, norm.weight_E
            few_experts.experts(x, choice, *weights, *into, out, memory, dependent=dependent)
            return
        sum_TE, part_TE = self._sum(out, scratch)
        few_experts.experts(x, choice, *weights, None, norm.weight_E, part_TE, memory, dependent=dependent)
        self._reduce(part_TE, sum_TE, norm, out)

    def _add_pending_experts(
        self, x: PendingNorm, mixture: Mixture, norm: AddNorm, out: PendingNorm, scratch: Scratch, live_R: Tensor
    ) -> None:
        """`add_experts` of a mixture that `moe.PendingExperts` multiplies, as in INT4. The shared experts, which need
        no choice, stand behind it: so it is there before the others' kernels start."""
        dependent, shared = self._dependent, mixture.shared
        logit_TX = self._router(x, mixture, scratch)
        id_TK, weight_TK = choose_experts(self, logit_TX, mixture, scratch, live_R, dependent=dependent)
        weights = mixture.gate_up_XFE.matrix, mixture.down_XEI.matrix
        shape = moe.experts_shape(x.x_TE, id_TK, weights[1], shared=mixture.routing.shared_experts)
        experts = moe.PendingExperts.of(x, id_TK, weight_TK, *weights, shape, scratch.empty, dependent=dependent)
        experts.sort()
        settled = shared is not None and isinstance(shared.gate_up_FE.matrix, Tensor)
        if shared is not None:
            act_TI = scratch.empty(x.x_TE.shape[0], shared.gate_up_FE.shape[0] // 2, dtype=x.x_TE.dtype)
            gated_linear(x, shared.gate_up_FE.matrix, act_TI, early=not settled, dependent=dependent)
            down = shared.down_EI.matrix
            rows = few_rows(act_TI, down, scratch, dependent=dependent)
        if self.group.summed.size == 1:
            if shared is not None:  # the norm of the sum so far is written over
                linear_to_residual(rows, down, norm.residual_TE, norm.weight_E, out, dependent=dependent)
            experts.add(norm.residual_TE, norm.weight_E, out, settled=settled)
            return
        (sum_TE, part_TE), before_TE = self._sum(out, scratch), None
        if shared is not None:
            before_TE = scratch.empty(*sum_TE.shape, dtype=torch.float32)
            linear(rows, down, before_TE, dependent=dependent)
        experts.add(before_TE, norm.weight_E, part_TE, settled=settled)
        self._reduce(part_TE, sum_TE, norm, out)

    def _router(self, x: PendingNorm, mixture: Mixture, scratch: Scratch) -> Tensor:
        """Router logits in fp32, [T, X]."""
        logit_TX = scratch.empty(x.x_TE.shape[0], mixture.routing.experts, dtype=torch.float32)
        few_experts.router(x, mixture.router_XE.plain, logit_TX, dependent=self._dependent)
        return logit_TX

    @override
    def last(self, normed: PendingNorm, out_TE: Tensor) -> PendingNorm:
        return normed

    @override
    def leave(self, norm: AddNorm, last: PendingNorm, out_TE: Tensor) -> None:
        rms_norm(norm.residual_TE, norm.weight_E, out_TE, eps=norm.eps, dependent=self._dependent)

    def _sum(self, out: PendingNorm, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Memory for a sum over ranks, and for this rank's part of it."""
        sum_TE = scratch.empty(*out.x_TE.shape, dtype=out.x_TE.dtype)
        return sum_TE, self.group.part(sum_TE)

    def _reduce(self, part_TE: Tensor, sum_TE: Tensor, norm: AddNorm, out: PendingNorm) -> None:
        if self.group.sums_by_kernel(sum_TE):
            self.group.add_sum(part_TE, norm.residual_TE, norm.weight_E, out)
            return
        self.group.all_reduce(part_TE, sum_TE)
        # Launched plainly: the all-reduce is not ours.
        pending_norm.add(sum_TE, norm.residual_TE, norm.weight_E, out)
