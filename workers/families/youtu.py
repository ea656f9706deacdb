"""Youtu-LLM (Tencent, 2025): the attention of DeepSeek V3 in a small model whose layers are all dense."""

from __future__ import annotations

from typing_extensions import override

from workers.families.deepseek import DeepseekV3, refuse_grouped_keys
from workers.models.config import ModelConfig, Routing
from workers.models.fields import Fields


class Youtu(DeepseekV3):
    """No experts, no layer that drafts; the output head is the embedding unless the config says otherwise."""

    drafts = False

    @override
    def read(self, fields: Fields) -> ModelConfig:
        refuse_grouped_keys(fields)
        for name in ("n_routed_experts", "num_nextn_predict_layers", "num_mtp_layers"):
            if value := fields.values.get(name):
                raise fields.unsupported(f"{name} ({fields.text('model_type')})", value, (None, 0))
        given = {name: value for name, value in fields.values.items() if value is not None}
        return super().read(Fields({"tie_word_embeddings": True, **given}, fields.prefix))

    @override
    def routing(self, fields: Fields) -> Routing | None:
        return None
