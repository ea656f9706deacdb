"""A.X K1 (SK Telecom, 2026): DeepSeek V3 whose mixtures of experts end with a norm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from workers.families.deepseek import DeepseekV3, refuse_grouped_keys
from workers.families.glm import dense_layers
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields

if TYPE_CHECKING:
    from workers.models.feed_forward import FeedForward
    from workers.weights.source import WeightSource

_DEFAULTS: Final[dict[str, Any]] = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 1,
    "rms_norm_eps": 1e-6,
}
"""Defaults of fields that a config.json may omit: those of transformers."""


class AXK1(DeepseekV3):
    """The sum of a token's experts goes through a norm, `post_mlp_layernorm`, before it is added to the residual
    stream. Dense layers store such a norm, too, and do not use it (transformers, `AXK1PreTrainedModel`).

    A router may have no bias. Groups are ranked by the sum of their two best scores all the same (`AXK1TopkRouter`), as
    with a bias of zeros.
    """

    drafts = False

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_grouped_keys(fields)
        given = {name: value for name, value in fields.values.items() if value is not None}
        if given.get("q_lora_rank") is None:
            raise ConfigError(
                f"config.json: {fields.prefix}q_lora_rank = None is not supported for model_type "
                f"{fields.text('model_type')!r}, whose queries have a latent; give a q_lora_rank of at least 2"
            )
        # Where it differs from V3's it says that the router has no bias, which the files say themselves.
        given.pop("topk_method", None)
        # Nobody has published the layer, and whether it has the norm is not known: it is left on the disk.
        undrafted = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0}
        dense = {"first_k_dense_replace": dense_layers(fields)}
        config = super().read(Fields({**_DEFAULTS, **given, **undrafted, **dense}, fields.prefix))
        assert config.routing is not None
        return replace(config, routing=replace(config.routing, normed=True))

    @override
    def ignored(self, config: ModelConfig) -> list[str]:
        unused = [rf"^model\.layers\.{layer}\.post_mlp_layernorm\." for layer in range(config.num_dense_layers)]
        return [*super().ignored(config), *unused]

    @override
    def feed_forward(self, source: WeightSource, config: ModelConfig, index: int) -> FeedForward:
        import torch

        from workers.models.feed_forward import MixtureOfExperts

        if config.is_dense(index):
            return super().feed_forward(source, config, index)
        assert config.routing is not None
        prefix, bias_X = f"model.layers.{index}.", None
        if not source.has(f"{prefix}mlp.gate.e_score_correction_bias"):
            bias_X = source.zeros(config.routing.experts, dtype=torch.float32)
        norm_E = source.load(f"{prefix}post_mlp_layernorm.weight", config.hidden_size)
        return MixtureOfExperts(source, f"{prefix}mlp.", config, bias_X=bias_X, norm_E=norm_E)
