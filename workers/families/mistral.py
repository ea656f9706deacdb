"""Mistral Small 4 (2026) and Mistral Large 3 (2025): the architecture of DeepSeek V3 with softmax routing, whose
queries are scaled by their position. Their text part is served; what sees is left on the disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from typing_extensions import override

from kernels.routing_rule import RoutingRule
from workers.families.deepseek import DeepseekV3, refuse_grouped_keys, refuse_others
from workers.models.config import ConfigError, ModelConfig, QueryScaling, Rope, Routing
from workers.models.fields import Fields, all_ids, read_rope, rope_values
from workers.quantization import unsupported_quantization

_DEFAULTS: Final[dict[str, Any]] = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
"""Defaults of fields that a config.json may omit: those of transformers."""
_SERVED: Final[dict[str, object]] = {"use_biases": False, "causal": True}
"""Switches of a params.json."""
_READ_APART: Final = ("rope_parameters", "rope_scaling", "partial_rotary_factor")
_BY_POSITION: Final = ("llama_4_scaling_beta", "llama_4_original_positions")
_SEES: Final = r"^(model\.)?(vision_tower|multi_modal_projector|vision_encoder|vision_language_adapter|patch_merger)\."


class Mistral4(DeepseekV3):
    """No bias of the router, no layer that drafts, one group of experts.

    YaRN's corrections of the softmax scale and of cosines are left out unless the rope has `apply_scale: true`. The
    makers' params.json says that, and vLLM and SGLang read it there; their config.json has no word for it, but an
    `mscale` and an `mscale_all_dim` of 1, which leave cosines as they are, and for which transformers corrects the
    softmax scale all the same.
    """

    bias = False
    drafts = False

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_grouped_keys(fields)
        refuse_others(fields, _SERVED)
        kind = fields.text("model_type")
        given = {name: value for name, value in fields.values.items() if value is not None}
        if given.get("q_lora_rank") is None:
            raise ConfigError(
                f"config.json: {fields.prefix}q_lora_rank = None is not supported for model_type {kind!r}, whose "
                "queries have a latent; give a q_lora_rank of at least 2"
            )
        for name in ("num_nextn_predict_layers", "num_mtp_layers", "sliding_window"):
            if given.get(name):
                raise fields.unsupported(f"{name} ({kind})", given[name], (None, 0))
        for name in ("n_group", "topk_group"):
            if (groups := fields.count(name, 1)) != 1:
                raise fields.unsupported(f"{name} ({kind})", groups, (1,))
        if (ours := given.get("num_local_experts")) is not None and given.setdefault("n_routed_experts", ours) != ours:
            raise ConfigError(
                f"config.json: {fields.prefix}num_local_experts = {ours!r} and n_routed_experts = "
                f"{given['n_routed_experts']!r} mean the same and must be equal"
            )
        if given.get("moe.use_load_balancing_bias"):
            raise fields.unsupported("moe.use_load_balancing_bias", True, (False,))
        if (norm := given.get("moe.renorm_strategy", "WEIGHTS")) != "WEIGHTS":
            raise fields.unsupported("moe.renorm_strategy", norm, ("WEIGHTS",))
        if (score := fields.text("scoring_func", "softmax")) != "softmax":
            raise fields.unsupported(f"scoring_func ({kind})", score, ("softmax",))
        rope, scaling = self._positions(Fields(given, fields.prefix))
        config = super().read(Fields({**_DEFAULTS, **given, **dict.fromkeys(_READ_APART)}, fields.prefix))
        return replace(config, rope=rope, query_scaling=scaling)

    def _positions(self, fields: Fields) -> tuple[Rope, QueryScaling | None]:
        """The rope, and how queries are scaled."""
        where, given = rope_values(fields)
        if (given.get("rope_type") or given.get("type")) not in ("yarn", "default"):
            known = ({"rope_type": "yarn"}, {"rope_type": "default"})
            raise fields.unsupported(f"{where} (mistral4)", given or None, known)
        rope = Fields(given, f"{fields.prefix}{where}.")
        roped = fields.count("qk_rope_head_dim")
        part = roped / (fields.count("qk_nope_head_dim") + roped)
        for place in fields, rope:
            if (asked := place.number("partial_rotary_factor", part)) != part:  # says the same once more
                raise place.unsupported("partial_rotary_factor", asked, (part,))
        named = {"partial_rotary_factor", "apply_scale", *_BY_POSITION}
        plain = {name: value for name, value in given.items() if name not in named}
        others = {**fields.values, "rope_parameters": plain, "rope_scaling": None}
        read = read_rope(Fields(others, fields.prefix), interleaved=self.interleaved(fields))
        yarn = read.yarn
        if yarn is None:
            return read, self._scaling(fields, rope, None)
        if rope.flag("apply_scale", False):
            yarn = replace(yarn, mscale=rope.number("mscale", 1.0), mscale_all_dim=rope.number("mscale_all_dim", 1.0))
        else:
            factor = 1.0 if yarn.attention_factor is None else yarn.attention_factor
            yarn = replace(yarn, attention_factor=factor, mscale=0.0, mscale_all_dim=0.0)
        return replace(read, yarn=yarn), self._scaling(fields, rope, yarn.original_positions)

    def _scaling(self, fields: Fields, rope: Fields, original: int | None) -> QueryScaling | None:
        """How queries are scaled; `original`: the positions of yarn, where that is the rope."""
        beta = rope.number("llama_4_scaling_beta", 0.0)
        if not beta:
            return None
        if original is None and fields.values.get("llama_4_original_positions") is None:
            original = rope.count("original_max_position_embeddings")
        return QueryScaling(beta, fields.count("llama_4_original_positions", original))

    @override
    def routing(self, fields: Fields) -> Routing | None:
        """None where there are said to be 0: a params.json without experts."""
        return None if fields.values.get("n_routed_experts") == 0 else super().routing(fields)

    @override
    def rule(self, fields: Fields) -> RoutingRule:
        return RoutingRule(
            scoring="softmax",
            groups=1,
            top_groups=1,
            normalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        )

    @override
    def ignored(self, config: ModelConfig) -> list[str]:
        return [*super().ignored(config), _SEES, r"^pre_mm_projector_norm\."]


class Mistral3(Mistral4):
    """A model that sees, whose text part is a `mistral4`: the fields of that are in `text_config`."""

    @override
    def read(self, fields: Fields) -> ModelConfig:
        if said := unsupported_quantization(fields.values):
            raise ConfigError(f"config.json: {said}")
        given = fields.values.get("text_config")
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: text_config must be an object, not {given!r}")
        tied = fields.values.get("tie_word_embeddings")
        ends = all_ids(given.get("eos_token_id"), fields.values.get("eos_token_id"))
        text = Fields({**given, **({} if tied is None else {"tie_word_embeddings": tied})}, "text_config.")
        text.values["eos_token_id"] = ends
        if (kind := text.text("model_type")) != "mistral4":
            raise text.unsupported("model_type", kind, ("mistral4",))
        return replace(super().read(text), model_type=fields.text("model_type"))
