"""Hopper's `down` of sums of groups as it was compiled, run by the PTX emulator under drawn schedules."""

import re
from dataclasses import replace

import pytest
import torch
from experts_case import Experts
from torch import Tensor

from kernels.moe import schedule
from kernels.moe.schedule import ExpertTiling
from tests.support.ptx import Fault, Unordered, emulated

pytestmark = pytest.mark.long


def ring(case: Experts, programs: int = 3, stages: int = 4, walked: int | None = None) -> ExpertTiling:
    tiling = schedule.group_sums(case.tiling(), case.shape, programs)
    down = replace(tiling.down, stages=stages)
    return replace(tiling, down=down, walked=tiling.walked if walked is None else walked)


def run(case: Experts, tiling: ExpertTiling, seed: int = 0, dependent: bool = True) -> Tensor:
    """The sums that the ring makes, beside Triton's other kernels."""
    call = case.call(tiling, case.workspace(tiling), dependent)
    with emulated(seed, fences=False):
        call.sort()
        call.gate_up()
    with emulated(seed, consecutive=True) as launches:
        call.down()
    with emulated(seed, fences=False):
        call.combine()
    assert launches == ["group_sums"]
    return case.tensors["out"]


def check(case: Experts, tiling: ExpertTiling, seed: int = 0, dependent: bool = True) -> None:
    """The right sums, with the bits of Triton's kernel, which has a program for each group."""
    with emulated(seed, fences=False):
        want = case.run(case.tiling()).clone()
    case.refill()
    found = run(case, tiling, seed, dependent)
    case.check()
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    ("groups", "intermediate"), [(1, 176), (2, 160), (4, 320), (8, 128), (4, 256), (3, 240), (8, 8 * 176)]
)
def test_any_groups(groups: int, intermediate: int) -> None:
    """Groups of whole steps and of parts of one, of as few as 16 features, and so many that none is its neighbour's."""
    case = Experts(5, 2, 3, 128, intermediate, groups=groups, holes=True, padded=(2,), adds=False)
    check(case, ring(case), groups)


@pytest.mark.parametrize("walked", [1, 2, 4, 8])
def test_items_of_any_number_of_groups(walked: int) -> None:
    case = Experts(9, 3, 5, 144, 8 * 80, groups=8, holes=True, padded=(4,), adds=False)
    check(case, ring(case, walked=walked), walked)


@pytest.mark.parametrize(("programs", "stages"), [(1, 2), (1, 9), (2, 3), (5, 9), (40, 4)])
def test_rings_and_programs(programs: int, stages: int) -> None:
    """Rings go round several times; some programs have several items and some have none."""
    case = Experts(20, 2, 4, 256, 4 * 144, torch.float16, groups=4, holes=True, skewed=True, adds=False)
    check(case, ring(case, programs, stages), programs)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 140])
def test_tiles_of_any_number_of_pairs(tokens: int) -> None:
    """One of two experts has all tokens: up to 16 of a tile's pairs are fetched apart."""
    case = Experts(tokens, 1, 2, 128, 2 * 80, groups=2, adds=False, seed=tokens)
    for tensors in (case.tensors, case.inputs):
        tensors["id"].fill_(1)
    check(case, ring(case, 2), tokens)


@pytest.mark.parametrize("hidden", [128, 144, 208, 272])
def test_features_that_blocks_do_not_divide(hidden: int) -> None:
    case = Experts(6, 2, 3, hidden, 2 * 64, groups=2, shared=1, adds=False)
    check(case, ring(case), dependent=False)


def test_nothing_is_written_for_pairs_that_are_no_work() -> None:
    case = Experts(30, 2, 4, 128, 2 * 48, groups=2, holes=True, adds=False)
    tiling = ring(case)
    workspace = case.workspace(tiling)
    call = case.call(tiling, workspace)
    with emulated(fences=False):
        call.sort()
        call.gate_up()
    with emulated():
        call.down()
    work = case.tensors["id"].flatten() >= 0
    assert 0 < work.sum() < 60
    assert not call.scratch.partial_YGE[work].isnan().any()
    assert bool(call.scratch.partial_YGE[~work].isnan().all())


def turns(*, cached: bool = False) -> list[Tensor]:
    """What two turns in the same memory leave, the second of the same tokens from the last to the first. All launches
    are dependent, so that L1 keeps what it has of the turn before. `cached`: the ring's loads go through L1."""

    def edited(ptx: str) -> str:
        if not cached or ".entry group_sums(" not in ptx:
            return ptx
        assert "ld.global.cg" in ptx
        return ptx.replace("ld.global.cg", "ld.global")

    case = Experts(20, 2, 4, 128, 4 * 48, groups=4, holes=True, padded=(2,), adds=False)
    tiling = ring(case)
    workspace, sums = case.workspace(tiling), []
    with emulated(7, consecutive=True, fences=False, edit=edited) as launches:
        for _ in range(2):
            case.call(tiling, workspace, True).run()
            case.check()
            sums.append(case.tensors["out"].clone())
            for name in ("x", "id", "weight"):
                case.tensors[name].copy_(case.tensors[name].flip(0))
    assert launches == 2 * ["sort_few", "gate_up", "group_sums", "combine"]
    return sums


def test_turns_are_right_and_in_order() -> None:
    first, second = turns()
    assert torch.equal(first.flip(0), second)


def test_what_is_read_of_the_turn_before_in_l1_is_found() -> None:
    with pytest.raises(Unordered, match="as L1 may have it"):
        turns(cached=True)


def test_no_work_at_all() -> None:
    case = Experts(3, 2, 4, 128, 2 * 48, groups=2, padded=(0, 1, 2), adds=False)
    run(case, ring(case))
    assert not case.tensors["out"].any()


@pytest.mark.parametrize(
    "fault",
    [
        (r"griddepcontrol\.wait;", ""),  # inputs before `gate_up` has made them, and results over those that are read
        (r"wgmma\.wait_group\.sync\.aligned \d;", ""),  # stages handed back while they are multiplied
    ],
)
def test_planted_faults_are_found(fault: tuple[str, str]) -> None:
    case = Experts(20, 2, 3, 128, 4 * 144, groups=4, adds=False)
    tiling = ring(case, 2, 3)
    call = case.call(tiling, case.workspace(tiling), True)

    def edited(ptx: str) -> str:
        if ".entry group_sums(" not in ptx:
            return ptx
        assert re.search(fault[0], ptx)
        return re.sub(*fault, ptx)

    with pytest.raises((Fault, Unordered)), emulated(3, consecutive=True, fences=False, edit=edited):
        call.run()


def test_sizes_that_it_does_not_take() -> None:
    for wrong in (
        {"groups": 0},
        {"dtype": torch.float32},
        {"hidden": 112},
        {"intermediate": 8 * 36, "groups": 8},
    ):
        case = Experts(4, **{"hidden": 128, "intermediate": 128, "groups": 2, **wrong})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="16-bit floats"):
            schedule.group_sums(case.tiling(), case.shape, 3)
        assert not schedule.tiling(replace(case.shape, hopper=132), case.stored).down_programs
