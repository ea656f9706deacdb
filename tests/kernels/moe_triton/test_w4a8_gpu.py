"""Hopper's products of activations in FP8 with weights in MXFP4 on a GPU: eager, and replayed on other tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from captured import capture, check_replays, same_bits
from experts_case import Experts
from w8a8_stages import IN_TENSOR_CORES, Stages, tiled

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

V4_FLASH: dict[str, Any] = {"chosen": 6, "experts": 24, "hidden": 4096, "intermediate": 2048, "limit": 10.0}
"""DeepSeek-V4-Flash's, of fewer experts."""
SMALL: dict[str, Any] = {"chosen": 2, "experts": 8, "hidden": 512, "intermediate": 512}
MODELS = {"V4-Flash": V4_FLASH, "small": SMALL}
_weights: dict[str, tuple[Matrix, Matrix]] = {}


def make(model: str, tokens: int, **more: Any) -> Experts:
    """A case with the model's weights, made once."""
    given = {**MODELS[model], "device": "cuda", "formats": ("mxfp4", "mxfp4"), "weights": _weights.get(model), **more}
    case = Experts(tokens, quantize_activations=True, **given)
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


def tiling(case: Experts, stages: int = 3) -> ExpertTiling:
    return tiled(case, torch.cuda.get_device_properties(0).multi_processor_count, stages=stages)


@pytest.mark.parametrize("tokens", [1, 2, 63, 65, 129, 1000, 3000])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    Stages.run(case, tiling(case)).check(IN_TENSOR_CORES)


@pytest.mark.parametrize("tokens", [200, 2000])
def test_shared_and_crowded_experts(tokens: int) -> None:
    for more in ({"shared": 1, "padded": (0, 5)}, {"skewed": True, "holes": True}, {"added": True}):
        case = make("small", tokens, **more)
        Stages.run(case, tiling(case)).check(IN_TENSOR_CORES)


@pytest.mark.parametrize("tokens", [16, 256, 4096])
def test_replayed_on_other_tokens(tokens: int) -> None:
    """A graph is replayed many times, on another routing, and on none at all, with the same bits as kernel by
    kernel."""
    case = make("small", tokens)
    chosen = tiling(case)
    workspace = case.workspace(chosen)
    graph = capture(case.call(chosen, workspace).run)
    for padded in (tuple(range(tokens // 2, tokens)), tuple(range(tokens))):
        case.inputs = make("small", tokens, seed=1, holes=True, padded=padded).inputs
        case.refill()
        want = Stages.run(case, chosen).case.tensors["out"].clone()

        def refill() -> None:
            case.refill()
            case.poison(workspace, chosen)

        check_replays(graph, refill, [case.tensors["out"]])
        assert same_bits(case.tensors["out"], want)


def test_a_token_alone_equals_the_token_in_any_batch() -> None:
    batch = make("V4-Flash", 1600)
    want = batch.run(tiling(batch)).clone()
    for tokens in (2, 7, 64, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(tiling(part)), want[-tokens:])


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_the_public_function_chooses_them_where_it_may(quantize_activations: bool) -> None:
    """The memory is what it says without knowing."""
    case = replace(make("V4-Flash", 2000), quantize_activations=quantize_activations, tensors={}, inputs={})
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1], quantize_activations=quantize_activations)
    assert schedule.tiling(shape, case.stored).w4a8 is quantize_activations
    size = moe.workspace_bytes(moe.experts_shape(t["x"], t["id"], case.weights[1]))
    workspace = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(
        t["x"],
        t["id"],
        t["weight"],
        *case.weights,
        t["out"],
        workspace=workspace,
        quantize_activations=quantize_activations,
        limit=case.limit,
    )
    if quantize_activations:
        found = t["out"].clone()
        case.refill()
        assert same_bits(Stages.run(case, schedule.tiling(shape, case.stored)).case.tensors["out"], found)
    else:
        case.check()
