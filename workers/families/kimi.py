"""Kimi K2.5 and its successors (2026): a Kimi K2 that sees. Its text part is served; what sees is left on the disk."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from typing_extensions import override

from workers.families.deepseek import DeepseekV3
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields, all_ids
from workers.quantization import unsupported_quantization

_TEXT_TYPES: Final = ("kimi_k2", "deepseek_v3")
"""Types of the text model; both mean the same."""


class KimiK25(DeepseekV3):
    """The fields of the text part are in `text_config`."""

    @override
    def read(self, fields: Fields) -> ModelConfig:
        if said := unsupported_quantization(fields.values):
            raise ConfigError(f"config.json: {said}")
        given = fields.values.get("text_config")
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: text_config must be an object, not {given!r}")
        # What stands outside counts for the whole model; end ids of a generation_config.json are put there, too.
        tied = fields.values.get("tie_word_embeddings")
        ends = all_ids(given.get("eos_token_id"), fields.values.get("eos_token_id"))
        text = Fields({**given, **({} if tied is None else {"tie_word_embeddings": tied})}, "text_config.")
        text.values["eos_token_id"] = ends
        if (kind := text.text("model_type", _TEXT_TYPES[0])) not in _TEXT_TYPES:
            raise text.unsupported("model_type", kind, _TEXT_TYPES)
        text.values["model_type"] = kind
        return replace(super().read(text), model_type=fields.text("model_type"))

    @override
    def ignored(self, config: ModelConfig) -> list[str]:
        return [*super().ignored(config), r"^(model\.)?(vision_tower|mm_projector|multi_modal_projector)\."]
