"""DeepSeek V2 (2024) and V3 (2024), and those who publish models of the same architecture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from kernels.routing_rule import RoutingRule
from workers.families.family import Family
from workers.models.config import ConfigError, ModelConfig, Routing
from workers.models.fields import Fields, read_rope
from workers.quantization import unsupported_quantization

_LAYER_TYPE: Final = "full_attention"
"""Name of these layers' attention in transformers, where a config.json has a name for it."""


class _Deepseek(Family):
    """Common base of DeepSeek V2 and V3."""

    @override
    def read(self, fields: Fields) -> ModelConfig:
        _refuse_unsupported(fields)
        if not self.sparse and fields.values.get("index_topk") is not None:
            raise fields.unsupported(f"index_topk ({fields.text('model_type')})", fields.values["index_topk"], (None,))
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported("partial_rotary_factor", fields.values["partial_rotary_factor"], (1.0,))
        kinds = fields.values.get("layer_types")
        listed = isinstance(kinds, list) and all(kind == _LAYER_TYPE for kind in kinds)
        if not self.sparse and kinds is not None and not listed:
            raise fields.unsupported("layer_types", kinds, (_LAYER_TYPE,))
        for even in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank"):
            if fields.values.get(even) is not None and fields.count(even) % 2:
                raise ConfigError(f"config.json: {even} = {fields.values[even]} is not supported; it must be even")
        draft_layers = fields.count("num_nextn_predict_layers", fields.count("num_mtp_layers", 0, least=0), least=0)
        if draft_layers > 1:
            raise fields.unsupported("num_nextn_predict_layers", draft_layers, (0, 1))
        vocab_size, routing = fields.count("vocab_size"), self.routing(fields)
        layers = fields.count("num_hidden_layers")
        dense = min(fields.count("first_k_dense_replace", 0, least=0), layers)
        return ModelConfig(
            model_type=fields.text("model_type"),
            vocab_size=vocab_size,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            moe_intermediate_size=0 if routing is None else fields.count("moe_intermediate_size"),
            num_layers=layers,
            num_dense_layers=layers if routing is None else dense,
            draft_layers=draft_layers,
            num_heads=fields.count("num_attention_heads"),
            q_lora_rank=fields.count("q_lora_rank") if fields.values.get("q_lora_rank") is not None else None,
            kv_lora_rank=fields.count("kv_lora_rank"),
            qk_nope_head_dim=fields.count("qk_nope_head_dim"),
            qk_rope_head_dim=fields.count("qk_rope_head_dim"),
            v_head_dim=fields.count("v_head_dim"),
            routing=routing,
            rope=read_rope(fields, interleaved=self.interleaved(fields)),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            max_positions=fields.count("max_position_embeddings"),
            tied_embeddings=fields.flag("tie_word_embeddings", False),
            eos_ids=fields.token_ids("eos_token_id", vocab_size),
        )

    bias: bool
    """Whether the router has one."""
    sparse = False
    """Whether an indexer chooses the tokens that are attended to."""

    def routing(self, fields: Fields) -> Routing | None:
        """The experts there are; None where all layers are dense."""
        return Routing(
            experts=fields.count("n_routed_experts"),
            experts_per_token=fields.count("num_experts_per_tok"),
            shared_experts=fields.count("n_shared_experts", 0, least=0),
            bias=self.bias,
            rule=self.rule(fields),
        )

    @abstractmethod
    def rule(self, fields: Fields) -> RoutingRule:
        """Return the rule by which tokens choose experts."""

    @abstractmethod
    def interleaved(self, fields: Fields) -> bool:
        """Whether features that rope turns together lie side by side (`Rope.interleaved`)."""


class DeepseekV2(_Deepseek):
    """Softmax routing, greedy or limited to groups; rope in interleaved pairs; no layer that drafts."""

    bias = False

    @override
    def read(self, fields: Fields) -> ModelConfig:
        config = super().read(fields)
        if config.draft_layers:
            raise ConfigError(
                f"num_nextn_predict_layers = {config.draft_layers} is not supported for model_type "
                f"{config.model_type!r}"
            )
        return config

    @override
    def rule(self, fields: Fields) -> RoutingRule:
        grouped = _only(fields, "topk_method", "greedy", "group_limited_greedy") != "greedy"
        _only(fields, "scoring_func", "softmax")
        if fields.flag("norm_topk_prob", False):
            # The published code then drops routed_scaling_factor, others normalize and scale, others ignore the field.
            raise fields.unsupported("norm_topk_prob (deepseek_v2)", True, (False,))
        return RoutingRule(
            scoring="softmax",
            groups=fields.count("n_group", 1) if grouped else 1,
            top_groups=fields.count("topk_group", 1) if grouped else 1,
            normalize=False,
            scale=fields.number("routed_scaling_factor", 1.0),
        )

    @override
    def interleaved(self, fields: Fields) -> bool:
        """The published code knows nothing else."""
        return True


class DeepseekV3(_Deepseek):
    """Sigmoid routing with a bias, limited to groups; perhaps a layer that drafts."""

    bias = True

    @override
    def rule(self, fields: Fields) -> RoutingRule:
        _only(fields, "topk_method", "noaux_tc")
        _only(fields, "scoring_func", "sigmoid")
        return RoutingRule(
            scoring="sigmoid",
            groups=fields.count("n_group", 1),
            top_groups=fields.count("topk_group", 1),
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        )

    @override
    def interleaved(self, fields: Fields) -> bool:
        """transformers lets the config say otherwise."""
        return fields.flag("rope_interleave", True)


def refuse_grouped_keys(fields: Fields) -> None:
    """`ConfigError` where several heads are said to share a key: of latent attention every head has keys of its own."""
    heads = fields.count("num_attention_heads")
    if (keys := fields.count("num_key_value_heads", heads)) != heads:
        raise fields.unsupported("num_key_value_heads", keys, (heads,))


def refuse_others(fields: Fields, served: Mapping[str, object]) -> None:
    """`ConfigError` for the first of these switches of a family that has another value than the one that is served,
    which it also has where it is missing or null."""
    for name, known in served.items():
        value = fields.values.get(name)
        if value is not None and (value != known or type(value) is not type(known)):
            raise fields.unsupported(f"{name} ({fields.text('model_type')})", value, (known,))


def _only(fields: Fields, name: str, *supported: str) -> str:
    """The value of a field, of which the first supported one is the default."""
    value = fields.text(name, supported[0])
    if value not in supported:
        raise fields.unsupported(f"{name} ({fields.text('model_type')})", value, supported)
    return value


def _refuse_unsupported(fields: Fields) -> None:
    if said := unsupported_quantization(fields.values):
        raise ConfigError(f"config.json: {fields.prefix}{said}")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise fields.unsupported(name, True, (False,))
    # Queries that are scaled by their position, as Llama 4 has them.
    for name in ("llama_4_scaling", "attn_temperature_tuning"):
        if value := fields.values.get(name):
            raise fields.unsupported(name, value, (None,))
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise fields.unsupported("hidden_act", activation, ("silu",))
    if (every := fields.count("moe_layer_freq", 1)) != 1:
        raise fields.unsupported("moe_layer_freq", every, (1,))
