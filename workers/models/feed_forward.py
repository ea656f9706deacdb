"""The feed-forward part of a layer: a dense SwiGLU network, or routed experts and shared ones.

Every rank holds an equal share of each network's intermediate features, and the output is summed over ranks and added
to the residual stream, whose norm the next layer reads.

Shape legend: T tokens, E hidden features, I intermediate features of this rank, F = 2 I (gate, then up), X experts,
K experts per token (both with the shared ones, where those are stored or chosen), R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.moe import AddNorm
from workers.memory.scratch import Scratch
from workers.models.config import ModelConfig
from workers.models.token_wise import Mixture, N, TokenWise
from workers.weights.source import WeightSource


class DenseFeedForward:
    """down · (silu(gate · x) * (up · x))."""

    def __init__(self, source: WeightSource, prefix: str, hidden: int, intermediate: int) -> None:
        share = intermediate // source.group.size
        self.gate_up_FE = source.weight(2 * share, hidden)
        source.fill(self.gate_up_FE[:share], f"{prefix}gate_proj.weight", shard=0)
        source.fill(self.gate_up_FE[share:], f"{prefix}up_proj.weight", shard=0)
        self.down_EI = source.weight(hidden, share)
        source.fill(self.down_EI, f"{prefix}down_proj.weight", shard=1)

    def __call__(
        self, way: TokenWise[N], x: N, norm: AddNorm, out: N, scratch: Scratch, live_R: Tensor | None = None
    ) -> None:
        """residual += this network's output, `out` = its norm. `out` shares no memory with `x`. `live_R`: see
        `TokenWise.add_experts`."""
        way.add(way.gated(x, self.gate_up_FE, scratch), self.down_EI, norm, out, scratch)


class MixtureOfExperts:
    """Routed experts, and shared experts that see every token (DeepSeekMoE, 2024).

    The shared experts are one network in the checkpoint, n_shared_experts times as wide as an expert. Its intermediate
    features fall apart into that many units of an expert's width, whose results add up to the network's: so they are
    kept as experts behind the routed ones, which every token chooses with weight 1, and computed in the same launches.
    """

    def __init__(self, source: WeightSource, prefix: str, config: ModelConfig) -> None:
        routing = config.routing
        hidden, share = config.hidden_size, config.moe_intermediate_size // source.group.size
        experts, units = routing.experts, routing.shared_experts
        # The router's scores decide discretely: nothing is rounded whatever the model's dtype.
        gate = f"{prefix}gate.weight"
        router_XE = source.load_weight(gate, experts, hidden, dtype=source.lossless(gate))
        bias = f"{prefix}gate.e_score_correction_bias"
        bias_X = source.load(bias, experts, dtype=torch.float32) if routing.bias else None
        gate_up_XFE = source.weight(experts + units, 2 * share, hidden)
        down_XEI = source.weight(experts + units, hidden, share)
        self.mixture = Mixture(routing, router_XE, bias_X, gate_up_XFE, down_XEI)
        for expert in range(experts):
            self._fill(source, expert, f"{prefix}experts.{expert}.")
        for unit in range(units):
            self._fill(source, experts + unit, f"{prefix}shared_experts.", unit=unit, units=units)

    def _fill(self, source: WeightSource, expert: int, name: str, **part: int) -> None:
        gate_up_FE, down_EI = self.mixture.gate_up_XFE[expert], self.mixture.down_XEI[expert]
        half = gate_up_FE.shape[0] // 2
        gate_IE, up_IE = gate_up_FE[:half], gate_up_FE[half:]
        source.fill(gate_IE, f"{name}gate_proj.weight", shard=0, **part)
        source.fill(up_IE, f"{name}up_proj.weight", shard=0, **part)
        source.fill(down_EI, f"{name}down_proj.weight", shard=1, **part)

    def __call__(
        self, way: TokenWise[N], x: N, norm: AddNorm, out: N, scratch: Scratch, live_R: Tensor | None = None
    ) -> None:
        """As `DenseFeedForward`."""
        way.add_experts(x, self.mixture, norm, out, scratch, live_R)


FeedForward = DenseFeedForward | MixtureOfExperts


def feed_forward(source: WeightSource, prefix: str, config: ModelConfig, layer: int) -> FeedForward:
    """The feed-forward part of layer `layer`."""
    if config.is_dense(layer):
        return DenseFeedForward(source, prefix, config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(source, prefix, config)
