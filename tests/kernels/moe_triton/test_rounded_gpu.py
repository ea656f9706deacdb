"""The experts with activations in FP8 on a Hopper GPU: eager, replayed on other tokens, alone against in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import capture, check_replays, same_bits
from experts_case import Experts, dequantised, exact

from kernels import moe
from kernels.matrix import Matrix
from kernels.moe import schedule
from kernels.moe.rounded_launch import inputs
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
BLOCKS = ((128, 128), (128, 128))
_weights: dict[str, tuple[Matrix, Matrix]] = {}


def make(model: str, tokens: int, **changes: object) -> Experts:
    """A case with the model's weights, made once."""
    sizes = {**MODELS[model], **changes}
    case = Experts(tokens, **sizes, device="cuda", formats=BLOCKS, rounds=True, weights=_weights.get(model))  # type: ignore[arg-type]
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


def tiled(case: Experts, stages: int = 4) -> ExpertTiling:
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    tiling = schedule.rounded(case.shape, programs, case.stored)
    gate_up, down = (replace(product, stages=stages) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, gate_up=gate_up, down=down)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 129, 1000, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    case.run(tiled(case))
    case.check()


def test_down_of_the_inputs_that_are_there() -> None:
    """What becomes of them is no further off than their sums' few bits and a rounding to bf16 take it."""
    case = make("V3", 500)
    tiling = tiled(case)
    call = case.call(tiling, case.workspace(tiling))
    call.run()
    act = dequantised(*inputs(call.scratch, case.shape))
    pair = call.scratch.sorted_Y.long()
    expert = case.tensors["id"].flatten()[pair]
    assert case.weights is not None
    for which in range(0, 17, 4):
        mine = expert == which
        want = act[mine] @ exact(case.weights[1], which).t()
        got = call.scratch.partial_YGE[pair[mine], 0].double()
        error = torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
        assert len(error) > 50
        assert error.max() < 2**-8


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_same_bits_with_any_ring(stages: int) -> None:
    case = make("V2-Lite", 2000, skewed=True, holes=True)
    want = case.run(tiled(case)).clone()
    case.refill()
    assert same_bits(case.run(tiled(case, stages)), want)


@pytest.mark.parametrize("tokens", [16, 256, 4096])
def test_replayed_on_other_tokens(tokens: int) -> None:
    """From a graph, many times, on another routing, and on none at all."""
    case = make("V2-Lite", tokens)
    tiling = tiled(case)
    workspace = case.workspace(tiling)
    graph = capture(case.call(tiling, workspace).run)
    for padded in (tuple(range(tokens // 2, tokens)), tuple(range(tokens))):
        case.inputs = make("V2-Lite", tokens, seed=1, holes=True, padded=padded).inputs

        def refill() -> None:
            case.refill()
            case.poison(workspace, tiling)

        check_replays(graph, refill, [case.tensors["out"]])
        case.check()


def test_a_token_alone_equals_the_token_in_any_batch() -> None:
    batch = make("V2-Lite", 1600)
    want = batch.run(tiled(batch)).clone()
    for tokens in (1, 7, 64, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(tiled(part)), want[-tokens:])


@pytest.mark.parametrize("rounds", [False, True])
def test_the_public_function_chooses_them_where_it_may(rounds: bool) -> None:
    """In the memory that it says without knowing."""
    case = replace(make("V3", 1000), rounds=rounds, tensors={}, inputs={})
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1, rounds=rounds)
    assert schedule.tiling(shape, case.stored).rounded is rounds
    size = moe.workspace_bytes(moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1))
    workspace = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], shared=1, workspace=workspace, rounds=rounds)
    case.check()
