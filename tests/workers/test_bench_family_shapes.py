"""Slices of the families near DeepSeek's have their published sizes, and their steps run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from published_configs import AXK1, AXK2, GLM52, HY4, SARVAM, SMALL4, YOUTU

from tests.workers.bench_shapes import SMALL
from tests.workers.test_bench_generated import ROOT
from workers.families.registry import parse_config
from workers.memory.scratch import Scratch
from workers.weights.formats import FP8_BLOCKS, MXFP8, PLAIN

pytestmark = pytest.mark.soak

PUBLISHED: dict[str, dict[str, Any]] = {
    "hy4-slice": HY4,
    "glm52-mxfp8-slice": GLM52,
    "sarvam": SARVAM,
    "sarvam-slice": SARVAM,
    "axk1-slice": AXK1,
    "axk2-light": AXK2,
    "axk2-slice": AXK2,
    "youtu": YOUTU,
    "small4": SMALL4["text_config"],
}
OF_SLICES = {"num_layers", "num_dense_layers", "draft_layers", "indexing", "max_positions", "eos_ids", "model_type"}
"""What a slice has otherwise, or does not say."""
SIZES = SMALL | {"hidden_size": 256, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
SIZES |= {"num_experts_per_tok": 3, "num_experts": 8, "index_n_heads": 4, "index_topk": 64, "num_hidden_layers": 5}
SIZES |= {"n_group": 1, "topk_group": 1, "max_position_embeddings": 4096}


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import shapes

    return shapes


def small(values: dict[str, Any]) -> dict[str, Any]:
    """These config values with sizes for a CPU."""
    return values | {name: size for name, size in SIZES.items() if name in values}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str, shapes: ModuleType) -> None:
    """Every size that a config has: heads, ranks, experts, rope, streams, gates."""
    ours, theirs = parse_config(shapes.SHAPES[name][0]), parse_config(PUBLISHED[name])
    for field in vars(theirs):
        if field not in OF_SLICES:
            assert getattr(ours, field) == getattr(theirs, field), field
    assert (ours.indexing is None) == (theirs.indexing is None)
    if ours.indexing is not None:
        own, whole = vars(ours.indexing), vars(theirs.indexing)
        assert {**own, "shared": ()} == {**whole, "shared": ()}
    if name == "hy4-slice":
        assert ours.indexing.shared == theirs.indexing.shared[:5]


@pytest.mark.parametrize(
    "name", ["hy4-slice", "glm52-mxfp8-slice", "sarvam-slice", "axk1-slice", "axk2-slice", "youtu"]
)
@torch.inference_mode()
def test_a_step_runs(name: str, shapes: ModuleType) -> None:
    """As `decode_step.py` runs it; experts are in the format in which they are published."""
    values, form = shapes.SHAPES[name]
    cpu = torch.device("cpu")
    model = shapes.model_of(small(values), 1, torch.float32, cpu, form)
    case = shapes.Case(model, 2, 1, 100, room=8)
    with shapes.choices() as noted:
        assert case.step(Scratch(cpu)).run().decided_N[-1] == 0
    assert len(noted) == (0 if name == "youtu" else 4)
    network = model.layers[4].feed_forward
    weight = network.gate_up_FE if name == "youtu" else network.mixture.gate_up_XFE
    assert weight.format is {"hy4-slice": MXFP8, "glm52-mxfp8-slice": MXFP8, "axk2-slice": FP8_BLOCKS}.get(name, PLAIN)
    assert weight.dequantized(torch.float32).std() == pytest.approx(0.025 if form is MXFP8 else 0.02, rel=0.1)


@torch.inference_mode()
def test_a_step_of_hy4_reads_its_gates_and_streams(shapes: ModuleType) -> None:
    """Beside a GLM-5.2 of the same sizes and experts it needs the weights of both, and a dense layer's width."""
    read = {}
    for name in ("hy4-slice", "glm52-mxfp8-slice"):
        values, form = shapes.SHAPES[name]
        model = shapes.model_of(small(values), 1, torch.bfloat16, torch.device("cpu"), form)
        work = shapes.target_work(model, shapes.Tokens.decode(2, 1, 64, 5.0))
        read[name] = work[shapes.INPUT].bytes
    heads, value, hidden, streams = 2, 16, 256, 4
    gate = heads * value * hidden * 2
    of_streams = 2 * (2 * streams) * streams * hidden * 4
    assert read["hy4-slice"] - read["glm52-mxfp8-slice"] == 5 * (gate + of_streams)
