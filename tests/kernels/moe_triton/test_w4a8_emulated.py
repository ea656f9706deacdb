"""Hopper's products of activations in FP8 with weights in MXFP4 as they were compiled, run by the PTX emulator under
drawn schedules."""

from typing import Any

import pytest
from experts_case import Experts
from w8a8_stages import IN_FP32, Stages, tiled

from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def case(tokens: int, chosen: int = 2, experts: int = 3, sizes: tuple[int, int] = (512, 512), **more: Any) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=("mxfp4", "mxfp4"), quantize_activations=True, **more)


def check(case: Experts, seed: int = 0, programs: int = 3, **product: int) -> None:
    with emulated(seed, consecutive=True) as launches:
        stages = Stages.run(case, tiled(case, programs, **product))
    assert launches.count("product") == 2
    assert launches.count("gather") == 1
    stages.check(IN_FP32)


@pytest.mark.parametrize("tokens", [1, 64, 65, 130, 200, 257])
def test_any_number_of_tokens(tokens: int) -> None:
    check(case(tokens), tokens)


def test_clamped() -> None:
    check(case(65, limit=0.5))
