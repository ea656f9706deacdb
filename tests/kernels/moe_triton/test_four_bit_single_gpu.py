"""Hopper's products of a single token with weights of four bits on a GPU: eager, and replayed on other tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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

K2: dict[str, Any] = {"chosen": 8, "experts": 40, "hidden": 7168, "intermediate": 2048}
"""Kimi K2's, of fewer experts."""
OF_8_RANKS: dict[str, Any] = {**K2, "intermediate": 256}
SMALL: dict[str, Any] = {"chosen": 2, "experts": 8, "hidden": 1024, "intermediate": 512}


V4_FLASH: dict[str, Any] = {"chosen": 6, "experts": 32, "hidden": 4096, "intermediate": 2048, "limit": 10.0}


def make(sizes: dict[str, Any], **more: Any) -> Experts:
    format: Format = "mxfp4" if sizes is V4_FLASH else "int4"
    return Experts(1, **sizes, device="cuda", formats=(format, format), **more)


def tiled(case: Experts) -> ExpertTiling:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return schedule.four_bit_alone(case.shape, multiprocessors, case.stored)


@pytest.mark.parametrize("sizes", [K2, OF_8_RANKS, SMALL, V4_FLASH], ids=["K2", "on 8 ranks", "small", "V4-Flash"])
@pytest.mark.parametrize("more", [{}, {"holes": True}, {"padded": (0,)}], ids=["all", "holes", "padded"])
def test_eager(sizes: dict[str, Any], more: dict[str, Any]) -> None:
    case = make(sizes, **more)
    case.run(tiled(case), dependent=True)
    case.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("sizes", [K2, V4_FLASH], ids=["K2", "V4-Flash"])
def test_replayed_on_other_tokens(sizes: dict[str, Any], dependent: bool) -> None:
    case = make(sizes)
    other = make(sizes, seed=1, holes=True, weights=case.weights)
    check_replayed(case, other, tiled(case), dependent)
