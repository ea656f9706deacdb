"""Hopper's products of many tokens with weights of four bits on a GPU: eager, and replayed on other tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from captured import same_bits
from experts_case import Experts
from replayed import check_replayed

from kernels import moe
from kernels.matrix import Matrix
from kernels.moe import schedule
from kernels.moe.schedule import ExpertTiling
from kernels.runtime.hopper import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90, method="thread"),  # a kernel that hangs cannot be interrupted, only left
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
    ),
]

K2: dict[str, Any] = {"chosen": 8, "experts": 48, "hidden": 7168, "intermediate": 512}
"""Kimi K2's on four ranks, of fewer experts."""
OF_8_RANKS: dict[str, Any] = {**K2, "intermediate": 256}
SMALL: dict[str, Any] = {"chosen": 2, "experts": 8, "hidden": 512, "intermediate": 256}
V4_FLASH: dict[str, Any] = {"chosen": 6, "experts": 48, "hidden": 4096, "intermediate": 1024, "limit": 10.0}
"""DeepSeek-V4-Flash's on two ranks, of fewer experts."""
MODELS = {"K2": K2, "on 8 ranks": OF_8_RANKS, "small": SMALL, "V4-Flash": V4_FLASH}
_weights: dict[str, tuple[Matrix, Matrix]] = {}


def make(model: str, tokens: int, **more: Any) -> Experts:
    """A case with the model's weights, made once."""
    format = "mxfp4" if model == "V4-Flash" else "int4"
    given = {**MODELS[model], "device": "cuda", "formats": (format, format), "weights": _weights.get(model), **more}
    case = Experts(tokens, **given)
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


def grouped(case: Experts, rows: int = 0) -> ExpertTiling:
    """Return the tiling of the call, or the one of other tiles."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    tiling = schedule.four_bit_grouped(case.shape, programs, case.stored)
    if not rows:
        return tiling
    stages = {64: 5, 128: 4}[rows]
    gate_up, down = (replace(product, stages=stages) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, rows=rows, gate_up=gate_up, down=down)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("tokens", [2, 63, 64, 65, 257, 1000, 3000])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int, rows: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    case.run(grouped(case, rows), dependent=True)
    case.check()


@pytest.mark.parametrize("tokens", [200, 2000])
def test_shared_and_crowded_experts(tokens: int) -> None:
    for more in ({"shared": 1, "padded": (0, 5)}, {"skewed": True, "holes": True}):
        case = make("small", tokens, **more)
        case.run(grouped(case))
        case.check()


@pytest.mark.parametrize("tokens", [100, 600])
@pytest.mark.parametrize("model", ["K2", "V4-Flash"])
def test_replayed_on_other_tokens(model: str, tokens: int) -> None:
    case = make(model, tokens)
    for more in ({"holes": True}, {"padded": tuple(range(tokens))}):
        other = make(model, tokens, seed=1, **more)
        check_replayed(case, other, grouped(case), dependent=True)


def test_a_pair_does_not_depend_on_its_tile() -> None:
    """Bit for bit, whatever else is in it, and however many it has."""
    batch = make("K2", 1600)
    want = batch.run(grouped(batch)).clone()
    for tokens, rows in ((2, 64), (70, 64), (300, 128), (1599, 128)):
        part = make("K2", tokens)
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.tensors[name][-tokens:])
        assert same_bits(part.run(grouped(part, rows)), want[-tokens:])


@pytest.mark.parametrize("model", ["K2", "V4-Flash"])
def test_as_triton_has_it_but_for_the_order_of_sums(model: str) -> None:
    """Weights are rounded alike, so that what differs is smaller than what their rounding does to a result."""
    case = make(model, 1000)
    want = case.run(schedule.tiling(case.shape, case.stored)).float()
    out = case.run(grouped(case)).float()
    error = torch.linalg.vector_norm(out - want, dim=-1) / torch.linalg.vector_norm(want, dim=-1)
    assert float(error.max()) < 2**-8


@pytest.mark.parametrize("model", ["K2", "V4-Flash"])
def test_the_public_function_chooses_them(model: str) -> None:
    case = make(model, 600)
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1])
    assert schedule.tiling(shape, case.stored).rearranged
    workspace = torch.full((moe.workspace_bytes(shape),), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], workspace=workspace, limit=case.limit)
    case.check()
