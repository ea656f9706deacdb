"""The few layers of a DeepSeek V4 that are launched before graphs are captured."""

from __future__ import annotations

from pathlib import Path

import torch
from paged import CPU

from kernels.matrix import MicroScaled4
from tests.deepseek_v4_layout import QUANTIZATION, published_v4, quantized_v4, tiny_v4, write_v4
from workers.families import load_model
from workers.models.compressed_layer import shallow_layers
from workers.models.deepseek_v4_model import CompressedModel
from workers.parallel.group import Group


def test_experts_that_become_fp8_are_a_kind_of_their_own(tmp_path: Path) -> None:
    """Whether MXFP4 is FP8 times powers of two is known of each layer by itself, and other kernels multiply it."""
    config, tiny = tiny_v4(expert_dtype="fp4", quantization_config=QUANTIZATION)
    write_v4(tmp_path, config, quantized_v4(published_v4(tiny))[0])
    model = load_model(tmp_path, group=Group(), dtype=torch.float32, device=CPU, max_positions=64)
    assert isinstance(model, CompressedModel)
    layers = model.segments.layers
    few = shallow_layers(layers)
    other = min({*range(len(layers))} - {*few})
    experts = layers[other].block.experts
    for weight in (experts.gate_up_XFE, experts.down_XEI):
        assert not experts.in_fp8
        assert isinstance(weight.matrix, MicroScaled4)
        vars(weight)["matrix"] = MicroScaled4(weight.data, torch.full_like(weight.matrix.scales, 120)).with_least()
    assert experts.in_fp8
    assert shallow_layers(layers) == sorted([*few, other])
