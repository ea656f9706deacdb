"""About how much memory the graphs of a rank will take, where there is no GPU to measure it on."""

from __future__ import annotations

import math
from typing import Final

import torch

from kernels import moe
from workers.fit.compressed_graph_memory import CompressedMemory
from workers.graphs.capture import COMPRESSED_GRAPH_BYTES, Warmed, count_graphs
from workers.graphs.mixed_warm_up import reserve_attention, reserve_decode
from workers.memory.scratch import Scratch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.feed_forward import MixtureOfExperts
from workers.models.model import Model
from workers.step.mixed import Stage, at_once
from workers.step.parts import StepParts
from workers.weights.formats import PLAIN
from workers.weights.weight import Weight

BESIDE_EXPERTS: Final = 1.25
"""Memory that segments need on their way, over that of their experts alone, which is most of it. DeepSeek-V2-Lite needs
68 KiB per token, 54 of them for its experts."""


def estimate(parts: StepParts, max_rows: int, token_budget: int) -> Warmed:
    """Estimate what `warm_up` would find, for a model on the meta device. The memory that mixed steps hand on is exact,
    and so is that of attention where its kernels are the same on any GPU; the rest, and so the whole, may be a fifth
    off."""
    scratch, inner, decode = (Scratch(parts.device) for _ in range(3))
    stage, tokens, model = Stage(parts, token_budget, scratch, inner), max_rows * parts.width, parts.model
    compressed = CompressedMemory(parts, model) if isinstance(model, CompressedModel) else None
    weights = _weights(model) if compressed is None else compressed.weights
    dequantized = _dequantized_bytes(weights, model.norm_E.dtype)

    def beside(tokens: int, scored: int) -> int:
        """Estimate the bytes that segments of so many tokens take, with the logits of `scored` of them."""
        experts = _feed_forward_bytes(model, tokens) if compressed is None else compressed.experts(tokens)
        layer = max(int(BESIDE_EXPERTS * experts), 0 if compressed is None else compressed.projected(tokens))
        return layer + scored * model.config.vocab_size * torch.float32.itemsize + dequantized

    mixed, alone = beside(token_budget, max(tokens, at_once(max_rows))), beside(tokens, tokens)
    graphs = count_graphs(parts, max_rows, token_budget)
    if compressed is not None:  # attention, layers and drafts have the same memory in turn
        parts.aux_hidden(tokens, decode)
        attending, drafting = compressed.attention(tokens, parts.width), compressed.drafts(max_rows)
        passed = compressed.handed_on(tokens) + max(attending, alone)
        decoding = decode.peak + max(passed, compressed.caught_up(tokens, alone), drafting)
        between = max(attending, compressed.attention(token_budget, 0), compressed.caught_up(token_budget, mixed))
        handed_on = max(scratch.peak + drafting, decoding)
        return Warmed(handed_on, max(between, mixed), graphs, COMPRESSED_GRAPH_BYTES)
    reserve_attention(stage)  # of a long context it may need most
    reserve_decode(parts, max_rows, decode)
    return Warmed(max(scratch.peak, decode.peak + alone), max(inner.peak, mixed), graphs)


def _weights(model: Model) -> list[Weight]:
    """Return the matrices outside of routed experts."""
    return [
        weight
        for layer in model.layers
        for part in (layer.attention, layer.feed_forward, getattr(layer.feed_forward, "shared", None))
        for weight in (vars(part).values() if part is not None else ())
        if isinstance(weight, Weight)
    ]


def _dequantized_bytes(weights: list[Weight], dtype: torch.dtype) -> int:
    """Return the bytes of the largest matrix that the general path needs in the model's dtype and that is stored in
    another one."""
    stored = [weight for weight in weights if weight.format is not PLAIN]
    return max((math.prod(weight.shape) * dtype.itemsize for weight in stored), default=0)


def _feed_forward_bytes(model: Model, tokens: int) -> int:
    """Return the bytes that the largest feed-forward part takes for this number of tokens."""
    config, dtype, ranks = model.config, model.norm_E.dtype, model.group.mesh.experts.size
    most = 3 * tokens * config.intermediate_size // ranks * dtype.itemsize  # gate, up and their product
    for part in (layer.feed_forward for layer in model.layers):
        if isinstance(part, MixtureOfExperts):
            routing = part.mixture.routing
            chosen = routing.experts_per_token + routing.shared_experts
            experts, hidden, intermediate = part.mixture.down_XEI.shape
            hidden, intermediate = (-(-features // 16) * 16 for features in (hidden, intermediate))  # whole tiles
            x_TE, down_XEI = (
                torch.empty(shape, dtype=dtype, device="meta")
                for shape in ((tokens, hidden), (experts, hidden, intermediate))
            )
            id_TK = torch.empty(tokens, chosen, dtype=torch.int64, device="meta")
            shape = moe.experts_shape(x_TE, id_TK, down_XEI, shared=routing.shared_experts)
            return max(most, moe.workspace_bytes(shape))
    return most
