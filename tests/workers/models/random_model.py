"""Models with random weights of the test's shape, without a checkpoint, and one decode step for them."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.fp8_entries import encoded
from workers.cache.paged import PagedCache
from workers.cache.spec import Int8IndexSpec
from workers.families.registry import FAMILIES, parse_config
from workers.models.batch import Batch, DecodeBatch
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import BatchLayout
from workers.weights.formats import INT4_GROUPS, PLAIN
from workers.weights.formats.format import Format
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight

V2_LITE_HEADS: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "max_position_embeddings": 4096,
}
"""The attention of DeepSeek-V2-Lite, everything else small."""


class RandomWeights(WeightSource):
    """normal(0, 0.05) rounded to bf16, norms around 1: the same numbers in every dtype and on every device."""

    int4_experts = False
    """Routed experts are in INT4, of numbers and scales that have the same deviation."""

    def stored_format(self, name: str) -> Format:
        return INT4_GROUPS if self.int4_experts and ".experts." in name else PLAIN

    def fill_matrix(self, into: Weight, part: Part) -> None:
        if into.scales is None:
            super().fill_matrix(into, part)
            return
        into.data.copy_(torch.randint(0, 256, into.data.shape, dtype=torch.uint8))
        into.scales.copy_((torch.rand(into.scales.shape) + 0.5) * 0.05 / 4.6)

    def fill_part(self, into: torch.Tensor, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> None:
        """Random numbers for `into`."""
        into.copy_((torch.randn(into.shape) * 0.05 + ("norm" in name)).to(torch.bfloat16))

    def progress(self, text: str) -> None:
        """Says nothing."""


def random_model(
    values: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    invariant: bool = False,
    fp8_cache: bool = False,
    int4_experts: bool = False,
) -> Model:
    """A model of these config values."""
    torch.manual_seed(5)
    source = RandomWeights(Mesh(), dtype, device)
    source.int4_experts = int4_experts
    config = parse_config(values)
    family = FAMILIES[config.model_type]
    how = {"max_positions": 4096, "draft_layer": False, "invariant": invariant, "fp8_cache": fp8_cache}
    return family.model(source, config, Group(), **how)


def decode_step(
    model: Model, lengths: list[int], width: int, cache_seed: int = 0
) -> tuple[torch.Tensor, Batch, PagedCache]:
    """Tokens, batch and a random cache in which row r has lengths[r] entries after the step (0: a padded row)."""
    torch.manual_seed(cache_seed)
    device, rows = model.norm_E.device, len(lengths)
    pages = max(1, -(-max(lengths) // 64))
    cache = PagedCache.allocate(model.caches, rows * pages + 1, device)
    for spec, layer in zip(cache.specs, cache.layers, strict=True):
        if isinstance(spec, Int8IndexSpec):
            # Of a dtype, so that models in others get the same keys.
            keys = Int8IndexSpec(spec.width, torch.float32)
            layer.copy_(keys.random(len(layer), device, torch.Generator(device).manual_seed(cache_seed)))
            continue
        width_here = layer.shape[2] if layer.is_floating_point() else model.config.cache_width
        content = torch.randn(*layer.shape[:2], width_here).to(torch.bfloat16)
        if layer.dtype == torch.uint8:
            entry = content.to(model.norm_E.dtype).flatten(0, 1)
            content = encoded(entry, model.config.kv_lora_rank).view(layer.shape)
        layer.copy_(content)
    table = torch.randperm(rows * pages).view(rows, pages).int() + 1
    length = torch.tensor(lengths, dtype=torch.int32)
    position = (length.long().unsqueeze(1) - width + torch.arange(width)).clamp(min=0)
    slot = torch.gather(table.long(), 1, position // 64) * 64 + position % 64
    slot[length == 0] = 0
    token = torch.randint(0, model.config.vocab_size, (rows * width,))
    batch = Batch(
        BatchLayout(width, rows),
        position.flatten().to(device),
        slot.flatten().to(device),
        DecodeBatch(length.to(device), table.to(device)),
        None,
    )
    return token.to(device), batch, cache
