"""A.X K2 (SK Telecom, 2026): the sparse attention of DeepSeek V3.2, whose output has a gate, and norms with gates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from kernels.routing_rule import RoutingRule
from workers.families.deepseek import refuse_grouped_keys, refuse_others
from workers.families.glm import dense_layers
from workers.families.sparse import DeepseekV32
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

    from workers.models.layer import DecoderLayer
    from workers.models.layer_ops import NormGate
    from workers.weights.source import WeightSource


_SERVED: Final[dict[str, object]] = {"attention_output_gate": True, "attn_gate_fused": True, "gated_norm": True}
"""Switches by which an A.X K2 would have no gates, or gates with a matrix of their own (vLLM, and its makers' code)."""


class AXK2(DeepseekV32):
    """The first norm of every layer has a gate, and so has the second one of layers with experts; the last norm of the
    model has none. Groups of experts are optional.

    A norm with a gate is stored as `norm`, `W_down` and `W_up`, and `q_b_proj` makes a head's query and behind it the
    gate of its output (transformers, `AXK2GatedRMSNorm` and `AXK2Attention`).
    """

    drafts = False
    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "index_n_heads": 16,
    }

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_grouped_keys(fields)
        refuse_others(fields, _SERVED)
        given = {name: value for name, value in fields.values.items() if value is not None}
        if ("n_group" in given) != ("topk_group" in given):
            raise ConfigError(
                f"config.json: {fields.prefix}n_group = {given.get('n_group')!r} and topk_group = "
                f"{given.get('topk_group')!r}: give both, or neither where experts have no groups"
            )
        if (ours := given.get("num_local_experts")) is not None and given.setdefault("n_routed_experts", ours) != ours:
            raise ConfigError(
                f"config.json: {fields.prefix}num_local_experts = {ours!r} and n_routed_experts = "
                f"{given['n_routed_experts']!r} mean the same and must be equal"
            )
        # transformers leaves the layer on the disk, too.
        undrafted = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
        dense = {"first_k_dense_replace": dense_layers(fields)}
        config = super().read(Fields({**given, **undrafted, **dense}, fields.prefix))
        return replace(config, output_gate="query", norm_gate_rank=fields.count("gated_norm_rank", 16))

    @override
    def rule(self, fields: Fields) -> RoutingRule:
        rule = super().rule(fields)
        return replace(rule, closed_at_zero=rule.groups > 1)

    @override
    def layer(
        self, source: WeightSource, config: ModelConfig, index: int, *, invariant: bool, fp8_cache: bool
    ) -> DecoderLayer:
        from workers.models.layer import DecoderLayer

        prefix = f"model.layers.{index}."
        attention_norm_E, attention_gate = _norm(source, f"{prefix}input_layernorm.", config, gated=True)
        attention = self.attention(source, config, index, invariant=invariant, fp8_cache=fp8_cache)
        second = f"{prefix}post_attention_layernorm."
        feed_forward_norm_E, feed_forward_gate = _norm(source, second, config, gated=not config.is_dense(index))
        return DecoderLayer(
            config.rms_norm_eps,
            attention_norm_E=attention_norm_E,
            attention=attention,
            feed_forward_norm_E=feed_forward_norm_E,
            feed_forward=source.once(f"{prefix}mlp.", lambda own: self.feed_forward(own, config, index)),
            attention_gate=attention_gate,
            feed_forward_gate=feed_forward_gate,
        )


def _norm(source: WeightSource, prefix: str, config: ModelConfig, *, gated: bool) -> tuple[Tensor, NormGate | None]:
    """The weight of a norm, and its gate where it is `gated`."""
    from workers.models.layer_ops import NormGate
    from workers.weights.weight import Weight

    hidden, rank = config.hidden_size, config.norm_gate_rank
    if not gated:
        return source.load(f"{prefix}weight", hidden), None
    # So small that they are kept plain, however they are stored.
    down_RE = Weight(source.load(f"{prefix}W_down.weight", rank, hidden))
    up_ER = Weight(source.load(f"{prefix}W_up.weight", hidden, rank))
    return source.load(f"{prefix}norm.weight", hidden), NormGate(down_RE, up_ER)
