"""A family that nobody publishes, as somebody would add one: fields and tensors with names of their own, and a
feed-forward part that its checkpoints store in one piece."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernels.routing_rule import RoutingRule
from workers.families.family import Family
from workers.models.config import ModelConfig, Rope, Routing
from workers.models.fields import Fields
from workers.weights.part import Part, Shard

if TYPE_CHECKING:
    from workers.models.feed_forward import FeedForward
    from workers.weights.source import WeightSource

NAMES = {
    r"^model\.embed_tokens\.": "tokens.",
    r"^model\.layers\.(\d+)\.self_attn\.": r"blocks.\1.mla.",
    r"^model\.layers\.(\d+)\.input_layernorm\.": r"blocks.\1.norm1.",
    r"^model\.layers\.(\d+)\.post_attention_layernorm\.": r"blocks.\1.norm2.",
    r"^model\.layers\.(\d+)\.": r"blocks.\1.",
    r"^model\.norm\.": "norm.",
    r"^lm_head\.": "logits.",
}


class Toy(Family):
    """Dense layers alone; the gate and the up projection are one matrix, `w13`."""

    def read(self, fields: Fields) -> ModelConfig:
        vocab_size, depth = fields.count("vocabulary"), fields.count("depth")
        return ModelConfig(
            model_type=fields.text("model_type"),
            vocab_size=vocab_size,
            hidden_size=fields.count("width"),
            intermediate_size=fields.count("inner_width"),
            moe_intermediate_size=fields.count("inner_width"),
            num_layers=depth,
            num_dense_layers=depth,
            draft_layers=0,
            num_heads=fields.count("heads"),
            q_lora_rank=None,
            kv_lora_rank=fields.count("latent"),
            qk_nope_head_dim=fields.count("head"),
            qk_rope_head_dim=fields.count("roped"),
            v_head_dim=fields.count("value"),
            routing=Routing(1, 1, 0, bias=False, rule=RoutingRule("softmax", 1, 1, False, 1.0)),
            rope=Rope(fields.number("theta"), interleaved=True),
            rms_norm_eps=fields.number("eps"),
            max_positions=fields.count("context"),
            tied_embeddings=False,
            eos_ids=fields.token_ids("end", vocab_size),
        )

    def tensor(self, name: str) -> str:
        for pattern, ours in NAMES.items():
            name, found = re.subn(pattern, ours, name)
            if found:
                break
        return name

    def feed_forward(self, source: WeightSource, config: ModelConfig, index: int) -> FeedForward:
        from workers.models.feed_forward import DenseFeedForward

        class Fused(DenseFeedForward):
            def __init__(self) -> None:
                prefix, hidden = f"model.layers.{index}.", config.hidden_size
                width = config.intermediate_size
                halves = (
                    Part(f"{prefix}w13", 2 * width, hidden, shard=Shard(0, "experts"), unit=unit, units=2)
                    for unit in range(2)
                )
                self.gate_up_FE = source.matrix(*halves)
                self.down_EI = source.matrix(Part(f"{prefix}w2", hidden, width, shard=Shard(1, "experts")))

        return Fused()
