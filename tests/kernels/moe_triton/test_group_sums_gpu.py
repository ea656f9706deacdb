"""Hopper's `down` of sums of groups on a GPU: eager, captured, and beside Triton's kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import same_bits
from experts_case import Experts
from replayed import check_replayed

from kernels.moe import hopper_programs, schedule
from kernels.moe.schedule import ExpertTiling
from kernels.runtime.hopper import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(torch.cuda.is_available() and not is_hopper(torch.device("cuda")), reason="Hopper's own kernel"),
]

V2_LITE = {"chosen": 8, "experts": 66, "shared": 2, "hidden": 2048, "intermediate": 1408, "device": "cuda"}
ODD = {"chosen": 3, "experts": 9, "hidden": 208, "intermediate": 640, "device": "cuda"}
MODELS = {"V2-Lite": V2_LITE, "odd": ODD}


def ring(case: Experts, **changes: int) -> ExpertTiling:
    tiling = schedule.group_sums(case.tiling(), case.shape, hopper_programs(torch.device("cuda")))
    return replace(tiling, **changes)  # type: ignore[arg-type]


def spread(case: Experts) -> Experts:
    """The case at magnitudes that cancel."""
    case.tensors["x"].mul_(torch.randn(case.hidden, device="cuda").mul(3).exp2())
    case.inputs["x"].copy_(case.tensors["x"])
    return case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_tritons_kernel(model: str, tokens: int, dtype: torch.dtype) -> None:
    padded = (0,) if tokens > 2 else ()
    case = spread(Experts(tokens, **MODELS[model], dtype=dtype, groups=8, holes=True, padded=padded))  # type: ignore[arg-type]
    want = case.run(case.tiling()).clone()
    for walked in (1, 2, 8):
        case.refill()
        assert same_bits(case.run(ring(case, walked=walked), dependent=True), want), walked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_a_token_alone_equals_the_token_in_any_batch(model: str, dtype: torch.dtype) -> None:
    batch = spread(Experts(1600, **MODELS[model], dtype=dtype, groups=8))  # type: ignore[arg-type]
    want = batch.run(ring(batch)).clone()
    for tokens in (1, 2, 7, 64, 120, 300, 1599):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight", "out"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(ring(part)), want[-tokens:])


def test_twenty_times_the_same_bits() -> None:
    case = Experts(300, **V2_LITE, groups=8)  # type: ignore[arg-type]
    want = case.run(ring(case), dependent=True).clone()
    case.check()
    for _ in range(20):
        case.refill()
        assert same_bits(case.run(ring(case), dependent=True), want)


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64, 2000])
def test_replayed_on_other_tokens(tokens: int, dependent: bool) -> None:
    case = Experts(tokens, **V2_LITE, groups=8)  # type: ignore[arg-type]
    padded = tuple(range(tokens // 2, tokens))
    other = Experts(tokens, **V2_LITE, groups=8, seed=1, holes=True, padded=padded, weights=case.weights)  # type: ignore[arg-type]
    check_replayed(case, other, ring(case), dependent)
