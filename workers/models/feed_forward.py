"""The feed-forward part of a layer: a dense SwiGLU network, or routed experts and shared ones.

Every rank holds an equal share of each network's intermediate features, and the output is summed over ranks and added
to the residual stream, whose norm the next layer reads (`DecoderLayer.finish`). In plain torch: `deepseek.gated` and
`deepseek.experts`.

Shape legend: T tokens, E hidden features, I intermediate features of this rank, F = 2 I (gate, then up), X experts,
K experts per token (both with the shared ones, where those are stored or chosen), R rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workers.models.config import ConfigError, ModelConfig
from workers.models.layer_ops import Gated, Mixture
from workers.weights.formats.format import Format
from workers.weights.part import Part, Shard
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


class DenseFeedForward:
    """down · (silu(gate · x) * (up · x))."""

    def __init__(self, source: WeightSource, prefix: str, hidden: int, intermediate: int) -> None:
        gate, up = (
            Part(f"{prefix}{name}_proj.weight", intermediate, hidden, shard=Shard(0, "experts"))
            for name in ("gate", "up")
        )
        self.gate_up_FE = source.matrix(gate, up)
        self.down_EI = source.matrix(Part(f"{prefix}down_proj.weight", hidden, intermediate, shard=Shard(1, "experts")))


class MixtureOfExperts:
    """Routed experts, and shared experts that see every token (DeepSeekMoE, 2024).

    The shared experts are one network in the checkpoint, n_shared_experts times as wide as an expert. Its intermediate
    features fall apart into that many units of an expert's width, whose results add up to the network's: so they are
    kept as experts behind the routed ones, which every token chooses with weight 1, and computed in the same launches.
    Only where the routed experts alone are stored quantized, or what they alone multiply is clamped, are the shared
    ones a network of their own, unless the sum of both goes through a norm.
    """

    def __init__(
        self,
        source: WeightSource,
        prefix: str,
        config: ModelConfig,
        *,
        bias_X: Tensor | None = None,
        norm_E: Tensor | None = None,
    ) -> None:
        """`bias_X`: the router's, fp32, where the checkpoint does not have it. `norm_E`: see `Mixture`. ConfigError for
        experts in a format whose kernels do not clamp, where they would have to."""
        routing, hidden = config.routing, config.hidden_size
        assert routing is not None  # a layer without experts is none of these
        experts, units = routing.experts, routing.shared_experts
        # The router's scores decide discretely: nothing is rounded whatever the model's dtype.
        gate = f"{prefix}gate.weight"
        router_XE = Weight(source.load(gate, experts, hidden, dtype=source.lossless(gate)))
        bias = f"{prefix}gate.e_score_correction_bias"
        if bias_X is None and routing.bias:
            bias_X = source.load(bias, experts, dtype=torch.float32)
        networks = [_Network(f"{prefix}experts.{expert}.", config) for expert in range(experts)]
        shared = [_Network(f"{prefix}shared_experts.", config, unit, units) for unit in range(units)]
        apart: Gated | None = None
        if norm_E is not None and routing.limit:
            raise ConfigError("experts that are clamped, and whose sum goes through a norm, are not supported")
        if units and norm_E is None and (routing.limit or _apart(source, networks, shared)):
            width = units * config.moe_intermediate_size
            dense = DenseFeedForward(source, f"{prefix}shared_experts.", hidden, width)
            apart = Gated(dense.gate_up_FE, dense.down_EI)
            routing = replace(routing, shared_experts=0)
        else:
            networks += shared
        gate_up_XFE = source.experts([network.gate_up for network in networks])
        down_XEI = source.experts([network.down for network in networks])
        self.mixture = Mixture(routing, router_XE, bias_X, gate_up_XFE, down_XEI, apart, norm_E)


class _Network:
    """Tensors of one expert, or of one unit of the shared experts."""

    def __init__(self, name: str, config: ModelConfig, unit: int = 0, units: int = 1) -> None:
        hidden, width = config.hidden_size, units * config.moe_intermediate_size
        self.gate_up = [
            Part(f"{name}{half}_proj.weight", width, hidden, shard=Shard(0, "experts"), unit=unit, units=units)
            for half in ("gate", "up")
        ]
        self.down = [Part(f"{name}down_proj.weight", hidden, width, shard=Shard(1, "experts"), unit=unit, units=units)]


def _apart(source: WeightSource, routed: list[_Network], shared: list[_Network]) -> bool:
    """Whether the routed experts stay quantized only if the shared ones are not kept behind them."""

    def formats(networks: list[_Network]) -> list[Format]:
        stacks = [network.gate_up for network in networks], [network.down for network in networks]
        return [source.layout(stack).format for stack in stacks]

    return formats(routed) != formats(routed + shared)


FeedForward = DenseFeedForward | MixtureOfExperts


def feed_forward(source: WeightSource, prefix: str, config: ModelConfig, layer: int) -> FeedForward:
    """The feed-forward part of layer `layer`."""
    if config.is_dense(layer):
        return DenseFeedForward(source, prefix, config.hidden_size, config.intermediate_size)
    return MixtureOfExperts(source, prefix, config)
