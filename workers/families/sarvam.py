"""Sarvam-105B (Sarvam AI, 2026): the architecture of DeepSeek V3, whose fields have names of their own."""

from __future__ import annotations

from typing import Any, Final

from typing_extensions import override

from workers.families.deepseek import DeepseekV3, refuse_grouped_keys
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields, rope_values

_DEFAULTS: Final[dict[str, Any]] = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
}
"""Defaults of fields that a config.json may omit. Without groups of experts there is one, as the model was trained
(vLLM, pull request 56034, by its makers)."""
_NAMES: Final = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


class SarvamMla(DeepseekV3):
    """No layer that drafts. `head_dim`, `q_head_dim` and `use_qk_norm` mean nothing."""

    drafts = False

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_grouped_keys(fields)
        kind = fields.text("model_type")
        given = {name: value for name, value in fields.values.items() if value is not None}
        for ours, theirs in _NAMES.items():
            if ours in given and given.setdefault(theirs, given[ours]) != given[ours]:
                raise ConfigError(
                    f"config.json: {fields.prefix}{ours} = {given[ours]!r} and {theirs} = {given[theirs]!r} mean the "
                    "same and must be equal"
                )
        for name in ("num_nextn_predict_layers", "num_mtp_layers"):
            if given.get(name):
                raise fields.unsupported(f"{name} ({kind})", given[name], (None, 0))
        if not fields.flag("moe_router_enable_expert_bias", True):
            raise fields.unsupported("moe_router_enable_expert_bias", False, (True,))
        if (score := fields.text("score_function", "sigmoid")) != "sigmoid":
            raise fields.unsupported("score_function", score, ("sigmoid",))
        width = fields.count("moe_intermediate_size")
        if (shared := fields.count("moe_shared_expert_intermediate_size", width)) != width:
            raise fields.unsupported("moe_shared_expert_intermediate_size", shared, (width,))
        name, rope = rope_values(fields)
        if not rope:
            # The published code then takes yarn with a factor of 40, other implementations plain rope.
            name, known = "rope_scaling", ({"type": "deepseek_yarn"}, {"rope_type": "default"})
            raise fields.unsupported(f"{name} ({kind})", None, known)
        names = {key: "yarn" for key in ("type", "rope_type") if rope.get(key) == "deepseek_yarn"}
        one = {"rope_parameters": None, "rope_scaling": None, name: {**rope, **names}}
        return super().read(Fields({**_DEFAULTS, **given, **one}, fields.prefix))
