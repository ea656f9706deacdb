"""The experts on a GPU: eager, captured, replayed on other tokens and routings, and alone against in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import capture, check_replays, same_bits
from experts_case import Experts
from replayed import check_replayed

from kernels import moe
from kernels.moe import schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V2_LITE = {"chosen": 8, "experts": 66, "shared": 2, "hidden": 2048, "intermediate": 1408, "device": "cuda"}
DEMO = {"chosen": 3, "experts": 9, "shared": 1, "hidden": 192, "intermediate": 128, "device": "cuda"}
MODELS = {"V2-Lite": V2_LITE, "demo": DEMO}
_weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def make(model: str, tokens: int, **changes: object) -> Experts:
    """A case with the model's weights, made once."""
    case = Experts(tokens, **{**MODELS[model], **changes}, weights=_weights.get(model))  # type: ignore[arg-type]
    if model not in _weights and case.weights:
        _weights[model] = case.weights
    return case


@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 37, 128, 256, 1000, 3000])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int) -> None:
    case = make(model, tokens, holes=tokens % 2 == 1, padded=(0,) if tokens > 2 else ())
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 40, 500])
def test_other_types(tokens: int, dtype: torch.dtype) -> None:
    case = Experts(tokens, **DEMO, dtype=dtype)  # type: ignore[arg-type]
    case.run()
    case.check()


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_tile(rows: int) -> None:
    case = make("V2-Lite", 150, skewed=True, holes=True)
    case.run(case.tiling(rows=rows))
    case.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 256, 2000])
def test_replayed_on_other_tokens(tokens: int, dependent: bool) -> None:
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    case = make("V2-Lite", tokens)
    other = make("V2-Lite", tokens, seed=1, holes=True, padded=tuple(range(tokens // 2, tokens)))
    check_replayed(case, other, schedule.tiling(case.shape), dependent)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 64, 256, 2000])
@pytest.mark.parametrize("model", MODELS)
def test_sums_go_onto_the_residual_and_are_normed(model: str, tokens: int, dependent: bool) -> None:
    """A graph gives the same as a launch for the sum and one for the norm."""
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    case = make(model, tokens, holes=True, padded=(0,) if tokens > 2 else ())
    sum, norm, begun = case.run().clone(), case.norm(), case.norm().residual_TE
    tiling = schedule.tiling(case.shape)
    workspace = case.workspace(tiling)
    graph = capture(case.call(tiling, workspace, dependent, norm).run)

    def refill() -> None:
        case.refill()
        case.poison(workspace, tiling)
        norm.residual_TE.copy_(begun)

    check_replays(graph, refill, [case.tensors["out"], norm.residual_TE])
    case.check_norm(norm, sum)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_alone_equals_the_token_in_any_batch(model: str, dtype: torch.dtype) -> None:
    batch = Experts(1600, **MODELS[model], dtype=dtype, groups=8)  # type: ignore[arg-type]
    want = batch.run().clone()
    for tokens in (1, 2, 7, 64, 120, 180, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight", "out"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(), want[-tokens:])


@pytest.mark.parametrize("model", MODELS)
def test_twenty_sums_of_groups_agree_bitwise(model: str) -> None:
    case = Experts(300, **MODELS[model], groups=8)  # type: ignore[arg-type]
    want = case.run().clone()
    case.check()
    for _ in range(20):
        case.refill()
        assert same_bits(case.run(), want)


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("model", MODELS)
def test_narrow_tiles_of_gate_and_up_have_the_bits_of_wide_ones(model: str, tokens: int) -> None:
    """Those of sums of groups, at magnitudes that cancel."""
    case = make(model, tokens, groups=8)
    case.tensors["x"].mul_(torch.randn(case.hidden, device="cuda").mul(3).exp2())
    case.inputs["x"].copy_(case.tensors["x"])
    wide, narrow = (case.tiling(gate_up=products[0]) for products in (schedule.IN_GROUPS, schedule.FEW_IN_GROUPS))
    assert narrow.gate_up.block < wide.gate_up.block
    want = case.run(wide).clone()
    case.refill()
    assert same_bits(case.run(narrow, dependent=torch.cuda.get_device_capability() >= (9, 0)), want)


def test_all_tiles_agree_bitwise() -> None:
    """Sums over the input features have one order whatever the tile, on Hopper also across its matrix instructions and
    at magnitudes that cancel."""
    case = make("V2-Lite", 300, skewed=True)
    case.tensors["x"].mul_(torch.randn(2048, device="cuda").mul(3).exp2())
    base = case.tiling()
    results = []
    for rows in (16, 32, 64, 128):
        for block_k, stages in ((32, 4), (64, 3), (128, 2)):
            product = replace(base.gate_up, block=64, block_k=block_k, stages=stages, warps=4 + 4 * (rows == 128))
            down = replace(product, block=128)
            tiling = case.tiling(rows=rows, gate_up=product, down=down, partial=torch.float32)
            results.append(case.run(tiling).clone())
    assert [same_bits(results[0], other) for other in results] == [True] * len(results)


def test_the_public_function_allocates_for_itself_or_takes_memory() -> None:
    case = make("demo", 20)
    t = case.tensors
    assert case.weights is not None
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], shared=1)
    case.check()
    eager = t["out"].clone()
    size = moe.workspace_bytes(moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1))
    workspace = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
    t["out"].fill_(torch.nan)
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], shared=1, workspace=workspace)
    assert same_bits(t["out"], eager)


@pytest.mark.parametrize("tokens", [1, 20])
def test_addresses_past_two_to_the_31_elements(tokens: int) -> None:
    """The weights of the largest published layers; only the last expert's are filled."""
    experts, hidden, inner = 256, 7168, 2048
    gate_up = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(experts, hidden, inner, dtype=torch.bfloat16, device="cuda")
    small = Experts(tokens, 1, 1, hidden, inner, device="cuda")
    assert small.weights is not None
    gate_up[-1], down[-1] = small.weights[0][0], small.weights[1][0]
    small.run()
    small.check()
    large = Experts(tokens, 1, experts, hidden, inner, device="cuda", weights=(gate_up, down))
    for name in ("x", "weight"):
        large.tensors[name].copy_(small.tensors[name])
    large.tensors["id"].fill_(experts - 1)
    large.run(small.tiling())
    assert same_bits(large.tensors["out"], small.tensors["out"])
