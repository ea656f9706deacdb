"""Hy4 (Tencent, 2026): the sparse attention of DeepSeek V3.2 with sinks and a gate of its output, experts whose
activations are clamped, and several residual streams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from workers.families.deepseek import refuse_others
from workers.families.glm import dense_layers
from workers.families.sparse import GlmMoeDsa
from workers.models.config import ConfigError, ModelConfig, ResidualStreams
from workers.models.fields import Fields, all_ids
from workers.quantization import unsupported_quantization

if TYPE_CHECKING:
    from workers.models.layer import DecoderLayer
    from workers.weights.source import WeightSource

_TEXT_TYPES = ("hy_v4_vl_text", "hy_v4")
"""Types of the text part of a model that sees; both mean the same."""
_SERVED: Final[dict[str, object]] = {
    "enable_ihc": True,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "use_dsa": True,
    "use_mla": True,
}
"""Switches by which a Hy4 would lack something of its layers, or have it otherwise (vLLM)."""


class HYV4(GlmMoeDsa):
    """Every fourth layer has an indexer, whose roped features are the last ones; the others attend to what it has
    selected. The layer that drafts has an indexer, too, and one residual stream; it is called `mtp_layers.0` in the
    files, and shown behind the others (`workers.weights.published`).

    Roped features are in pairs, the indexer's, too, and norms of latents have the epsilon of all others (vLLM, and
    transformers' `HYV4VLTextModel`; transformers' `HYV4Model` rotates halves), and so have those of index keys
    (transformers).
    """

    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 16,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 2,
        "num_nextn_predict_layers": 1,
    }

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_others(fields, _SERVED)
        # `num_key_value_heads` is not read: the published files say 8, and every head has keys of its own.
        given = {name: value for name, value in fields.values.items() if value is not None}
        if (ours := given.get("num_local_experts")) is not None and given.setdefault("n_routed_experts", ours) != ours:
            raise ConfigError(
                f"config.json: {fields.prefix}num_local_experts = {ours!r} and n_routed_experts = "
                f"{given['n_routed_experts']!r} mean the same and must be equal"
            )
        if given.get("index_share_for_mtp_iteration"):
            raise fields.unsupported("index_share_for_mtp_iteration", True, (None, False))
        if (limit := fields.number("swiglu_limit", 10.0)) <= 0:
            # transformers says that it then clamps nothing, and makes everything 0.
            raise fields.unsupported("swiglu_limit", limit, (10.0,))
        dense = {"first_k_dense_replace": dense_layers(fields)}
        config = super().read(Fields({**given, **dense}, fields.prefix))
        assert config.routing is not None
        assert config.indexing is not None
        eps = config.rms_norm_eps
        return replace(
            config,
            routing=replace(config.routing, limit=limit),
            indexing=replace(config.indexing, roped_last=True, wide=True, key_norm_eps=eps),
            output_gate="input",
            sinks=True,
            streams=ResidualStreams(
                fields.count("hc_mult", 4),
                magnitude=fields.number("hc_magnitude", 2.0),
                eps=fields.number("hc_eps", 1e-6),
            ),
            latent_norm_eps=eps,
            wide_head=fields.flag("enable_lm_head_fp32", True),
        )

    @override
    def layer(
        self, source: WeightSource, config: ModelConfig, index: int, *, invariant: bool, fp8_cache: bool
    ) -> DecoderLayer:
        from workers.models.layer import DecoderLayer
        from workers.models.streams import load_streams

        if index == config.num_layers:  # of the layer that drafts there is one stream
            return super().layer(source, config, index, invariant=invariant, fp8_cache=fp8_cache)
        prefix, hidden = f"model.layers.{index}.", config.hidden_size
        attention_streams, feed_forward_streams = (
            load_streams(source, f"{prefix}hc_{part}_layer.hc_pre.hc_", config, added=True) for part in ("attn", "mlp")
        )
        return DecoderLayer(
            config.rms_norm_eps,
            attention_norm_E=source.load(f"{prefix}input_layernorm.weight", hidden),
            attention=self.attention(source, config, index, invariant=invariant, fp8_cache=fp8_cache),
            feed_forward_norm_E=source.load(f"{prefix}post_attention_layernorm.weight", hidden),
            feed_forward=source.once(f"{prefix}mlp.", lambda own: self.feed_forward(own, config, index)),
            attention_streams=attention_streams,
            feed_forward_streams=feed_forward_streams,
        )


class HYV4VL(HYV4):
    """A model that sees, whose text part is a Hy4: the fields of that are in `text_config`. Positions of text are the
    same along all axes of its rope."""

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
        if (kind := text.text("model_type", _TEXT_TYPES[0])) not in _TEXT_TYPES:
            raise text.unsupported("model_type", kind, _TEXT_TYPES)
        text.values["model_type"] = kind
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := text.values.get(name), dict):
                text.values[name] = {key: _of_text(key, value) for key, value in rope.items()}
        return replace(super().read(text), model_type=fields.text("model_type"))

    @override
    def ignored(self, config: ModelConfig) -> list[str]:
        return [*super().ignored(config), r"^(vit|model\.(vit|vision_tower))\."]


def _of_text(key: str, value: object) -> object:
    """A field of the rope as it is for text, of which `mrope` is plain: sections of features take the positions of
    axes, and these are the same there."""
    return "default" if key in ("rope_type", "type") and value == "mrope" else value
