"""Hopper's products of many tokens on a GPU: eager, replayed, against the Triton kernels bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import capture, check_replays, same_bits
from experts_case import Experts

from kernels import moe
from kernels.moe import schedule
from kernels.moe.schedule import ExpertTiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90, method="thread"),  # a kernel that hangs cannot be interrupted, only left
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

V2_LITE = {"chosen": 6, "experts": 64, "hidden": 2048, "intermediate": 1408, "device": "cuda"}
DEMO = {"chosen": 2, "experts": 8, "hidden": 192, "intermediate": 128, "device": "cuda"}
MODELS = {"V2-Lite": V2_LITE, "demo": DEMO}
_weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def make(model: str, tokens: int, **changes: object) -> Experts:
    """A case with the model's weights, made once."""
    case = Experts(tokens, **{**MODELS[model], **changes}, weights=_weights.get(model))  # type: ignore[arg-type]
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


def grouped(case: Experts, stages: int = 4) -> ExpertTiling:
    tiling = schedule.grouped(case.shape, torch.cuda.get_device_properties(0).multi_processor_count)
    gate_up, down = (replace(product, stages=stages) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, gate_up=gate_up, down=down)


@pytest.mark.parametrize("tokens", [1, 2, 16, 63, 64, 65, 129, 256, 1000, 3000, 8192])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    case.run(grouped(case))
    case.check()


@pytest.mark.parametrize(("tokens", "spread"), [(200, True), (1000, True), (1000, False), (3000, False), (3000, True)])
def test_shared_experts(tokens: int, spread: bool) -> None:
    case = Experts(tokens, 8, 66, 2048, 1408, device="cuda", shared=2, padded=(0, 5))
    case.run(replace(grouped(case), spread=spread))
    case.check()


@pytest.mark.parametrize("sizes", [(64, 32), (80, 48), (144, 176), (272, 272)])
def test_features_that_blocks_and_stages_do_not_divide(sizes: tuple[int, int]) -> None:
    case = Experts(700, 3, 5, *sizes, torch.float16, device="cuda")
    case.run(grouped(case))
    case.check()


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("tokens", [3, 300, 2000])
def test_the_same_bits_as_the_triton_kernels(tokens: int, stages: int) -> None:
    case = make("V2-Lite", tokens, skewed=True, holes=True)
    case.tensors["x"].mul_(torch.randn(2048, device="cuda").mul(3).exp2())
    want = case.run(case.tall_tiling()).clone()
    assert same_bits(case.run(grouped(case, stages)), want)


@pytest.mark.parametrize("tokens", [16, 256, 4096])
def test_replayed_on_other_tokens(tokens: int) -> None:
    """A graph is replayed many times, on another routing, and on none at all."""
    case = make("V2-Lite", tokens)
    tiling = grouped(case)
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
    want = batch.run(grouped(batch)).clone()
    for tokens in (1, 7, 64, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.tensors[name][-tokens:])
        assert same_bits(part.run(grouped(part)), want[-tokens:])


def test_addresses_past_two_to_the_31_elements() -> None:
    """The weights of the largest published layers; only the last expert's are filled."""
    experts, hidden, inner = 256, 7168, 2048
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device="cuda")
    small = Experts(300, 1, 1, hidden, inner, device="cuda")
    assert small.weights is not None
    gate_up[-1], down[-1] = small.weights[0][0], small.weights[1][0]
    small.tensors["id"].zero_()
    small.run(grouped(small))
    small.check()
    large = Experts(300, 1, experts, hidden, inner, device="cuda", weights=(gate_up, down))
    for name in ("x", "weight"):
        large.tensors[name].copy_(small.tensors[name])
    large.tensors["id"].fill_(experts - 1)
    large.run(grouped(large))
    assert same_bits(large.tensors["out"], small.tensors["out"])


@pytest.mark.parametrize("offset", [0, 4])
def test_the_public_function_chooses_them_where_it_can(offset: int) -> None:
    """Tokens that do not begin at multiples of 16 bytes go through Triton's tiles, in the same memory."""
    case = make("V2-Lite", 2000)
    x = torch.zeros(2000, 2056, dtype=torch.bfloat16, device="cuda")[:, offset : offset + 2048]
    case.tensors["x"] = x.copy_(case.tensors["x"])
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1])
    assert bool(schedule.tiling(shape).programs) == (offset == 0)
    workspace = torch.full((moe.workspace_bytes(shape),), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], workspace=workspace)
    case.check()
