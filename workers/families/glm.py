"""GLM-4.7-Flash (2026): the architecture of DeepSeek V3 in other sizes."""

from __future__ import annotations

from typing_extensions import override

from workers.families.deepseek import DeepseekV3
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields


class Glm4MoeLite(DeepseekV3):
    """`mlp_layer_types` may say which layers are dense; some fields have other defaults."""

    @override
    def read(self, fields: Fields) -> ModelConfig:
        defaults = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_shared_experts": 1}
        given = {name: value for name, value in fields.values.items() if value is not None}
        dense = dense_layers(fields)
        return super().read(Fields({**defaults, **given, "first_k_dense_replace": dense}, fields.prefix))


def dense_layers(fields: Fields, default: int = 1) -> int:
    """Return the number of leading layers that are dense; `default` where the config does not say."""
    layers = fields.count("num_hidden_layers")
    if (kinds := fields.values.get("mlp_layer_types")) is None:
        return min(layers, fields.count("first_k_dense_replace", default, least=0))
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(
            f"config.json: {fields.prefix}mlp_layer_types must have {layers} entries, 'dense' for the first layers and "
            f"'sparse' for all others, not {kinds!r}"
        )
    return dense
