"""The feed-forward part of a layer: a dense SwiGLU network, or routed experts and shared ones.

Every rank holds an equal share of each network's intermediate features, and the output is summed over ranks and added
to the residual stream, whose norm the next layer reads.

Shape legend: T tokens, E hidden features, I intermediate features of this rank, F = 2 I (gate, then up), X experts,
K experts per token (both with the shared ones, where those are stored or chosen), R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import moe
from kernels.dependent import launches_dependently
from kernels.moe import AddNorm
from kernels.silu_mul import silu_mul
from workers.memory.scratch import Scratch
from workers.models.config import ModelConfig
from workers.models.products import MOST_DEPENDENT, Mixture, Products
from workers.weights.source import WeightSource


class DenseFeedForward:
    """down · (silu(gate · x) * (up · x))."""

    def __init__(self, source: WeightSource, products: Products, prefix: str, hidden: int, intermediate: int) -> None:
        self.products = products
        share = intermediate // source.group.size
        self.gate_up_FE = source.weight(2 * share, hidden)
        source.fill(self.gate_up_FE[:share], f"{prefix}gate_proj.weight", shard=0)
        source.fill(self.gate_up_FE[share:], f"{prefix}up_proj.weight", shard=0)
        self.down_EI = source.weight(hidden, share)
        source.fill(self.down_EI, f"{prefix}down_proj.weight", shard=1)

    def __call__(
        self, x_TE: Tensor, norm: AddNorm, out_TE: Tensor, scratch: Scratch, live_R: Tensor | None = None
    ) -> None:
        """residual += this network's output, out = rms_norm(residual). `out_TE` shares no memory with `x_TE`."""
        tokens, dtype = x_TE.shape[0], x_TE.dtype
        gate_up_TF = scratch.empty(tokens, self.gate_up_FE.shape[0], dtype=dtype)
        self.products.linear(x_TE, self.gate_up_FE, gate_up_TF)
        act_TI = scratch.empty(tokens, self.down_EI.shape[1], dtype=dtype)
        silu_mul(gate_up_TF, act_TI)
        self.products.summed(act_TI, self.down_EI, out_TE, scratch)
        self.products.add_norm(out_TE, norm, out_TE)


class MixtureOfExperts:
    """Routed experts, and shared experts that see every token (DeepSeekMoE, 2024).

    The shared experts are one network in the checkpoint, n_shared_experts times as wide as an expert. Its intermediate
    features fall apart into that many units of an expert's width, whose results add up to the network's: so they are
    kept as experts behind the routed ones, which every token chooses with weight 1, and computed in the same launches.
    """

    def __init__(self, source: WeightSource, products: Products, prefix: str, config: ModelConfig) -> None:
        self.products = products
        self.routing = routing = config.routing
        hidden, share = config.hidden_size, config.moe_intermediate_size // source.group.size
        # The router's scores decide discretely: nothing is rounded whatever the model's dtype.
        gate = f"{prefix}gate.weight"
        self.router_XE = source.load_weight(gate, routing.experts, hidden, dtype=source.lossless(gate))
        self.bias_X = (
            source.load(f"{prefix}gate.e_score_correction_bias", routing.experts, dtype=torch.float32)
            if routing.bias
            else None
        )
        experts, units = routing.experts, routing.shared_experts
        self.gate_up_XFE = source.weight(experts + units, 2 * share, hidden)
        self.down_XEI = source.weight(experts + units, hidden, share)
        for expert in range(experts):
            self._fill(source, expert, f"{prefix}experts.{expert}.")
        for unit in range(units):
            self._fill(source, experts + unit, f"{prefix}shared_experts.", unit=unit, units=units)

    def _fill(self, source: WeightSource, expert: int, name: str, **part: int) -> None:
        gate_up_FE, down_EI = self.gate_up_XFE[expert], self.down_XEI[expert]
        half = gate_up_FE.shape[0] // 2
        gate_IE, up_IE = gate_up_FE[:half], gate_up_FE[half:]
        source.fill(gate_IE, f"{name}gate_proj.weight", shard=0, **part)
        source.fill(up_IE, f"{name}up_proj.weight", shard=0, **part)
        source.fill(down_EI, f"{name}down_proj.weight", shard=1, **part)

    def __call__(
        self, x_TE: Tensor, norm: AddNorm, out_TE: Tensor, scratch: Scratch, live_R: Tensor | None = None
    ) -> None:
        """As `DenseFeedForward`. `live_R` (integers, None: all are live): token t belongs to row t // (T // R), and the
        tokens of rows with 0 are padding, for which no expert computes."""
        id_TK, weight_TK = self.route(x_TE, scratch, live_R)
        mixture = Mixture(id_TK, weight_TK, self.gate_up_XFE, self.down_XEI, self.routing.shared_experts)
        self.products.experts(x_TE, mixture, norm, out_TE, scratch)

    def route(self, x_TE: Tensor, scratch: Scratch, live_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Expert ids int64 and weights fp32, both [T, K]; the same on every rank. The shared experts come last. Padding
        has -1 and 0."""
        routing, tokens = self.routing, x_TE.shape[0]
        columns = routing.experts_per_token + routing.shared_experts
        if x_TE.dtype != self.router_XE.plain.dtype:
            wide_TE = scratch.empty(*x_TE.shape, dtype=torch.float32)
            x_TE = wide_TE.copy_(x_TE)
        logit_TX = self.products.router(x_TE, self.router_XE, scratch)
        id_TK = scratch.empty(tokens, columns, dtype=torch.int64)
        weight_TK = scratch.empty(tokens, columns, dtype=torch.float32)
        moe.route(
            logit_TX,
            self.bias_X,
            id_TK,
            weight_TK,
            routing.rule,
            shared=routing.shared_experts,
            live_R=live_R,
            dependent=tokens <= MOST_DEPENDENT and launches_dependently(x_TE.device),
        )
        return id_TK, weight_TK


FeedForward = DenseFeedForward | MixtureOfExperts


def feed_forward(source: WeightSource, products: Products, prefix: str, config: ModelConfig, layer: int) -> FeedForward:
    """The feed-forward part of layer `layer`."""
    if config.is_dense(layer):
        return DenseFeedForward(source, products, prefix, config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(source, products, prefix, config)
