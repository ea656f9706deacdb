"""Least bytes that a decode step reads from this rank's memory: the floor of its time, which `/live` shows.

Counted is the target's pass alone: drafts, activations and what is written come on top.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Final

import torch

from workers.models.deepseek_v4_model import CompressedModel, compressors
from workers.models.feed_forward import MixtureOfExperts
from workers.models.model import Model
from workers.weights.weight import Weight

STEP_READS: Final = (
    "step_weight_bytes",
    "step_expert_bytes",
    "step_expert_share",
    "step_entry_bytes",
    "step_bandwidth",
)


def step_reads(model: Model, device: torch.device) -> dict[str, float]:
    """Compute the parts of the least that a decode step reads, by name:

    - `step_weight_bytes`: of all matrices that a step reads whatever its tokens are.
    - `step_expert_bytes`: of all routed experts, of which a step reads those that its tokens choose.
    - `step_expert_share`: the share of them that one token chooses.
    - `step_entry_bytes`: that a row reads for each token of its context. Of sparse attention the index keys alone: how
      many latents it reads does not grow with the context.
    - `step_bandwidth`: bytes a second that the device can read by its own account; 0 where it says nothing.
    """
    if isinstance(model, CompressedModel):
        return dict(zip(STEP_READS, (*_compressed(model), _bandwidth(device)), strict=True))
    routing = model.config.routing
    fixed, experts, entry = model.head_YE.nbytes, 0, 0
    for layer in model.layers:
        attention, network = layer.attention, layer.feed_forward
        specs = attention.caches if model.config.indexing is None else attention.caches[1:]
        entry += sum(spec.entry_bytes for spec in specs)
        fixed += attention.heads.up_HFL.nbytes
        fixed += _bytes(attention.down_FE, attention.q_up_QA, attention.out_EF)
        if isinstance(network, MixtureOfExperts):
            mixture = network.mixture
            stored = _bytes(mixture.gate_up_XFE, mixture.down_XEI)
            shared = stored * mixture.routing.shared_experts // mixture.gate_up_XFE.shape[0]
            experts += stored - shared
            fixed += shared + _bytes(mixture.router_XE)
            if mixture.shared is not None:
                fixed += _bytes(mixture.shared.gate_up_FE, mixture.shared.down_EI)
        else:
            fixed += _bytes(network.gate_up_FE, network.down_EI)
    chosen = routing.experts_per_token / routing.experts if routing is not None and experts else 0.0
    return dict(zip(STEP_READS, (fixed, experts, chosen, entry, _bandwidth(device)), strict=True))


def _compressed(model: CompressedModel) -> tuple[int, int, float, int]:
    """The parts of a DeepSeek V4. Of layers with an indexer a row reads the keys of its context alone, as above."""
    routing, layers = model.config.routing, model.compression.layers
    assert routing is not None
    experts = sum(_bytes(block.experts.gate_up_XFE, block.experts.down_XEI) for block in model.blocks)
    weights = sum(map(_weights, model.blocks))
    specs = iter(model.caches)
    entry = 0
    for layer in layers:
        own = [next(specs) for _ in range(compressors(layer))]
        entry += sum(spec.entry_bytes for spec in own[-1:])
    return model.head_YE.nbytes + weights - experts, experts, routing.experts_per_token / routing.experts, entry


def _weights(part: object) -> int:
    """Bytes of the matrices of a block and of its parts."""
    if isinstance(part, Weight):
        return part.nbytes
    return sum(map(_weights, vars(part).values())) if is_dataclass(part) else 0


def _bytes(*weights: Weight | None) -> int:
    return sum(weight.nbytes for weight in weights if weight is not None)


def _bandwidth(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    clock_khz, bus_bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * clock_khz * bus_bits / 8  # two transfers a clock
