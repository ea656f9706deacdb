"""DeepSeek V3.2 (2025) and GLM-5 (2026): the architecture of DeepSeek V3, whose queries attend to the tokens that an
indexer chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Final

from typing_extensions import override

from workers.families.deepseek import DeepseekV3
from workers.families.glm import dense_layers
from workers.models.config import ConfigError, Indexing, ModelConfig
from workers.models.fields import Fields

_LAYER_TYPES: Final = ("indexed_attention", "deepseek_sparse_attention", "sparse_attention", "sparse")
"""Names for these layers' attention: of versions of transformers, and of other engines (vLLM, llama.cpp)."""


class DeepseekV32(DeepseekV3):
    """Every layer has an indexer, the one that drafts included, whose roped features are in halves."""

    sparse = True
    indexer_interleaved = False
    """See `Indexing`. The fields `rope_interleave` and `indexer_rope_interleave` may confirm what the family knows."""
    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "index_n_heads": 64,
    }
    """Defaults of fields that a config.json may omit: those of transformers."""

    @override
    def read(self, fields: Fields) -> ModelConfig:
        given = {name: value for name, value in fields.values.items() if value is not None}
        if given.get("q_lora_rank") is None:
            raise ConfigError(
                f"config.json: {fields.prefix}q_lora_rank = None is not supported for model_type "
                f"{fields.text('model_type')!r}: its indexer reads the query's latent; give a q_lora_rank of at least 2"
            )
        for name, known in ("rope_interleave", True), ("indexer_rope_interleave", self.indexer_interleaved):
            if fields.flag(name, known) != known:
                raise fields.unsupported(f"{name} ({fields.text('model_type')})", not known, (known,))
        kinds = given.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} - {*_LAYER_TYPES}):
            raise fields.unsupported("layer_types", kinds, _LAYER_TYPES)
        filled = Fields({**self.defaults, **given, "first_k_dense_replace": dense_layers(fields, 3)}, fields.prefix)
        config = super().read(filled)
        indexing = Indexing(
            heads=filled.count("index_n_heads"),
            features=filled.count("index_head_dim", 128),
            top_k=filled.count("index_topk", 2048),
            interleaved=self.indexer_interleaved,
            shared=self.shared(filled),
            shared_by_drafts=filled.flag("index_share_for_mtp_iteration", False),
        )
        if indexing.features % 16 or indexing.features < config.qk_rope_head_dim:
            raise ConfigError(
                f"config.json: {fields.prefix}index_head_dim = {indexing.features} must be a multiple of 16 and at "
                f"least qk_rope_head_dim = {config.qk_rope_head_dim}"
            )
        return replace(config, indexing=indexing)

    def shared(self, fields: Fields) -> tuple[bool, ...]:
        """Which layers attend to what the layer before them has selected: none."""
        return (False,) * fields.count("num_hidden_layers")


class GlmMoeDsa(DeepseekV32):
    """Family of GLM's sparse models. Some layers, "shared" ones, attend to what the last "full" layer before them has
    chosen. The indexers' roped features are in pairs."""

    indexer_interleaved = True
    defaults: ClassVar[dict[str, Any]] = {
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 32,
    }

    @override
    def shared(self, fields: Fields) -> tuple[bool, ...]:
        """Which layers share, as `indexer_types` lists it, as a pattern has it, or every so many layers one is full."""
        layers = fields.count("num_hidden_layers")
        name = "indexer_types" if fields.values.get("indexer_types") is not None else "index_topk_pattern"
        if (kinds := fields.values.get(name)) is None:
            every = fields.count("index_topk_freq", 1, least=0) or 1
            offset = fields.count("index_skip_topk_offset", 2, least=0)
            kinds = ["shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(layers)]
        if isinstance(kinds, str):
            kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
        if not isinstance(kinds, list) or len(kinds) < layers or {*map(str, kinds)} - {"full", "shared"}:
            raise ConfigError(
                f"config.json: {fields.prefix}{name} must say 'full' or 'shared' of each of the {layers} layers, not "
                f"{kinds!r}"
            )
        if kinds[0] != "full":
            raise ConfigError(
                f"config.json: {fields.prefix}{name} = {fields.values.get(name)!r} makes the first layer a shared one, "
                "which has no full layer before it"
            )
        return tuple(kind == "shared" for kind in kinds[:layers])
