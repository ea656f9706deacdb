"""Hopper's products of activations in FP8 as they were compiled, run by the PTX emulator under drawn schedules."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from experts_case import Experts

from kernels.moe import schedule
from kernels.moe.rounded_launch import inputs
from kernels.moe.schedule import ExpertTiling
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

BLOCKS = ((128, 128), (128, 128))


def case(tokens: int, chosen: int = 1, experts: int = 2, sizes: tuple[int, int] = (256, 128), **more: Any) -> Experts:
    return Experts(tokens, chosen, experts, *sizes, formats=BLOCKS, rounds=True, **more)


def tiled(case: Experts, programs: int = 3, stages: int = 4, group: int = 8) -> ExpertTiling:
    tiling = schedule.rounded(case.shape, programs, case.stored)
    gate_up, down = (replace(product, stages=stages, group=group) for product in (tiling.gate_up, tiling.down))
    return replace(tiling, gate_up=gate_up, down=down)


def check(case: Experts, seed: int = 0, **changes: int) -> None:
    """Nothing is summed in fewer bits here, so nearly all rows are as exact as what is in bf16."""
    with emulated(seed, consecutive=True) as launches:
        case.run(tiled(case, **changes))
    assert launches.count("product") == 2
    assert launches.count("quantise") == 1
    case.check()
    out, want = case.tensors["out"].double(), case.expected()
    error = torch.linalg.vector_norm(out - want, dim=-1) / torch.linalg.vector_norm(want, dim=-1)
    assert error.nan_to_num().quantile(0.9) < 2**-7


@pytest.mark.parametrize("tokens", [1, 64, 65, 130])
def test_any_number_of_tokens(tokens: int) -> None:
    check(case(tokens), tokens)


def test_rings_go_round() -> None:
    """More steps than stages, of both products; the last block of `down` is moved back."""
    check(case(70, sizes=(640, 384)), stages=2, programs=2)


def test_padded_tokens_get_zero_and_disturb_nobody() -> None:
    check(case(5, 2, 3, padded=(2, 3, 4), holes=True))


def test_shared_experts_among_the_routed() -> None:
    check(case(20, 3, 4, shared=1, padded=(0, 7)), group=1, stages=3)


def test_a_group_of_zeros_is_zero() -> None:
    """Of tokens, and of the inputs of `down`."""
    found = case(40)
    found.tensors["x"][:, :128] = 0
    found.tensors["x"][3] = 0
    check(found)
    assert not found.tensors["out"][3].any()


def test_nothing_is_written_for_pairs_that_are_no_work() -> None:
    found = case(30, 2, 3, holes=True)
    tiling = tiled(found)
    call = found.call(tiling, found.workspace(tiling))
    with emulated():
        call.run()
    wanted = (found.tensors["id"].flatten() >= 0).sum()
    assert 0 < wanted < 60
    numbers, scales = inputs(call.scratch, found.shape)
    assert bool((numbers[wanted:].view(torch.uint8) == 0xFF).all())
    assert bool(scales[wanted:].isnan().all())
    assert not scales[:wanted].isnan().any()
    assert not numbers[:wanted].float().isnan().any()


def test_what_it_does_not_take() -> None:
    for wrong in (
        Experts(4, hidden=192, intermediate=128, formats=BLOCKS),
        Experts(4, hidden=128, intermediate=128, formats=BLOCKS),
        Experts(4, hidden=256, intermediate=128, formats=((64, 128), (128, 128))),
        Experts(4, hidden=256, intermediate=128, formats=((128, 128), None)),
        Experts(4, hidden=256, intermediate=128, formats=BLOCKS, dtype=torch.float16),
        Experts(4, hidden=256, intermediate=128, formats=BLOCKS, groups=2),
    ):
        with pytest.raises(ValueError, match="whole blocks"):
            schedule.rounded(wrong.shape, 3, wrong.stored)
