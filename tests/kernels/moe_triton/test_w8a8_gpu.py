"""The experts with activations in FP8 on a Hopper GPU: eager, replayed on other tokens, alone against in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import capture, check_replays, same_bits
from experts_case import Experts
from w8a8_stages import BLOCKS, IN_TENSOR_CORES, Stages, tiled

from kernels import moe
from kernels.matrix import Matrix
from kernels.moe import schedule
from kernels.moe.schedule import ExpertTiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90, method="thread"),  # a kernel that hangs cannot be interrupted, only left
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

V3 = {"chosen": 9, "experts": 17, "shared": 1, "hidden": 7168, "intermediate": 2048}
"""DeepSeek-V3's, of fewer experts."""
V2_LITE = {"chosen": 6, "experts": 64, "hidden": 2048, "intermediate": 1408}
MODELS = {"V3": V3, "V2-Lite": V2_LITE}
_weights: dict[str, tuple[Matrix, Matrix]] = {}


def make(model: str, tokens: int, **changes: object) -> Experts:
    """A case with the model's weights, made once."""
    sizes = {**MODELS[model], **changes}
    case = Experts(
        tokens, **sizes, device="cuda", formats=BLOCKS, quantize_activations=True, weights=_weights.get(model)
    )  # type: ignore[arg-type]
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


def tiling(case: Experts, stages: int = 4) -> ExpertTiling:
    return tiled(case, torch.cuda.get_device_properties(0).multi_processor_count, stages=stages)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 1000])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    Stages.run(case, tiling(case)).check(IN_TENSOR_CORES)


def test_shared_experts_of_many_tokens() -> None:
    case = make("V3", 3000, padded=(0, 5))
    Stages.run(case, tiling(case)).check(IN_TENSOR_CORES)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_same_bits_with_any_ring(stages: int) -> None:
    case = make("V2-Lite", 2000, skewed=True, holes=True)
    want = case.run(tiling(case)).clone()
    case.refill()
    assert same_bits(case.run(tiling(case, stages)), want)


@pytest.mark.parametrize("tokens", [16, 256, 4096])
def test_replayed_on_other_tokens(tokens: int) -> None:
    """A graph is replayed many times, on another routing, and on none at all, with the same bits as kernel by
    kernel."""
    case = make("V2-Lite", tokens)
    chosen = tiling(case)
    workspace = case.workspace(chosen)
    graph = capture(case.call(chosen, workspace).run)
    for padded in (tuple(range(tokens // 2, tokens)), tuple(range(tokens))):
        case.inputs = make("V2-Lite", tokens, seed=1, holes=True, padded=padded).inputs
        case.refill()
        want = Stages.run(case, chosen).case.tensors["out"].clone()

        def refill() -> None:
            case.refill()
            case.poison(workspace, chosen)

        check_replays(graph, refill, [case.tensors["out"]])
        assert same_bits(case.tensors["out"], want)


def test_a_token_alone_equals_the_token_in_any_batch() -> None:
    batch = make("V2-Lite", 1600)
    want = batch.run(tiling(batch)).clone()
    for tokens in (1, 7, 64, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(tiling(part)), want[-tokens:])


@pytest.mark.parametrize("quantize_activations", [False, True])
def test_the_public_function_chooses_them_where_it_may(quantize_activations: bool) -> None:
    """The memory is what it says without knowing."""
    case = replace(make("V3", 1000), quantize_activations=quantize_activations, tensors={}, inputs={})
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1, quantize_activations=quantize_activations)
    assert schedule.tiling(shape, case.stored).w8a8 is quantize_activations
    size = moe.workspace_bytes(moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1))
    workspace = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(
        t["x"],
        t["id"],
        t["weight"],
        *case.weights,
        t["out"],
        shared=1,
        workspace=workspace,
        quantize_activations=quantize_activations,
    )
    if quantize_activations:
        assert same_bits(t["out"], Stages.run(case, schedule.tiling(shape, case.stored)).case.tensors["out"])
    else:
        case.check()
