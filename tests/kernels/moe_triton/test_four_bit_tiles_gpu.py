"""Hopper's products of several tokens with weights of four bits on a GPU: eager, and replayed on other tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import same_bits
from experts_case import Experts, Format
from replayed import check_replayed

from kernels.moe import schedule
from kernels.moe.schedule import ExpertTiling
from kernels.runtime.hopper import is_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU"
    ),
]

K2: dict[str, Any] = {"chosen": 8, "experts": 80, "hidden": 7168, "intermediate": 512}
"""Kimi K2's on four ranks, of fewer experts."""
OF_8_RANKS: dict[str, Any] = {**K2, "intermediate": 256}
SMALL: dict[str, Any] = {"chosen": 2, "experts": 32, "hidden": 1024, "intermediate": 512}


V4_FLASH: dict[str, Any] = {"chosen": 6, "experts": 64, "hidden": 4096, "intermediate": 1024, "limit": 10.0}
"""DeepSeek-V4-Flash's on two ranks, of fewer experts."""


def make(tokens: int, sizes: dict[str, Any], **more: Any) -> Experts:
    format: Format = "mxfp4" if sizes is V4_FLASH else "int4"
    return Experts(tokens, **sizes, device="cuda", formats=(format, format), **more)


def tiled(case: Experts) -> ExpertTiling:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return schedule.four_bit_tiled(case.shape, multiprocessors, case.stored)


@pytest.mark.parametrize("tokens", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("sizes", [K2, OF_8_RANKS, SMALL, V4_FLASH], ids=["K2", "on 8 ranks", "small", "V4-Flash"])
@pytest.mark.parametrize("more", [{}, {"holes": True, "padded": (1,)}], ids=["all", "holes and padding"])
def test_eager(sizes: dict[str, Any], tokens: int, more: dict[str, Any]) -> None:
    case = make(tokens, sizes, **more)
    case.run(tiled(case), dependent=True)
    case.check()


@pytest.mark.parametrize("tokens", [20, 112])
def test_experts_of_several_tiles(tokens: int) -> None:
    case = make(tokens, SMALL, skewed=True)
    case.run(tiled(case), dependent=True)
    case.check()


@pytest.mark.parametrize("tokens", [2, 4, 10])
@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("sizes", [K2, V4_FLASH], ids=["K2", "V4-Flash"])
def test_replayed_on_other_tokens(sizes: dict[str, Any], tokens: int, dependent: bool) -> None:
    case = make(tokens, sizes)
    other = make(tokens, sizes, seed=1, holes=True, weights=case.weights)
    check_replayed(case, other, tiled(case), dependent)


def test_a_pair_does_not_depend_on_its_tile() -> None:
    """Bit for bit, whatever else is in it, and however many it has."""
    batch = make(10, K2)
    out = batch.run(tiled(batch)).clone()
    for tokens in (2, 3, 7):
        part = make(tokens, K2, weights=batch.weights)
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(tiled(part)), out[-tokens:])
