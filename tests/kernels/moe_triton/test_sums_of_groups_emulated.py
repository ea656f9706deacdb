"""Experts of invariant mode and the tree of their groups' sums as they were compiled, run by the PTX emulator: all
launches are dependent, and turns of tokens follow each other in the same memory."""

import re

import pytest
import torch
from experts_case import Experts
from torch import Tensor

from kernels.moe import schedule
from kernels.ordered_sum import launch_ordered_sum, ordered_sum_reference
from tests.support.ptx import Fault, Unordered, emulated

pytestmark = pytest.mark.long


def turns(edit: tuple[str, str, str] | None = None) -> tuple[list[Tensor], list[str]]:
    """What two turns leave, and their launches. `edit`: a kernel, what of its PTX is replaced, and by what."""

    def edited(ptx: str) -> str:
        if edit is None or not re.search(rf"\.entry {edit[0]}\(", ptx):
            return ptx
        assert re.search(edit[1], ptx)
        return re.sub(edit[1], edit[2], ptx)

    case = Experts(4, 2, 3, 64, 64, dtype=torch.bfloat16, groups=4, holes=True, padded=(2,), seed=1, adds=False)
    tiling = case.tiling(gate_up=schedule.FEW_IN_GROUPS[0])
    workspace, found = case.workspace(tiling), []
    with emulated(5, consecutive=True, fences=False, edit=edited) as launches:
        for _ in range(2):
            case.call(tiling, workspace, True, None, None).run()
            out = torch.full((4, 64), torch.nan, dtype=torch.bfloat16)
            launch_ordered_sum(case.tensors["out"].transpose(0, 1), out, dependent=True)
            found.append(out)
            want = torch.empty_like(out)
            ordered_sum_reference(case.expected().float().transpose(0, 1).contiguous(), want)
            torch.testing.assert_close(out, want, rtol=2**-6, atol=2e-2)
            case.tensors["x"].neg_()
            case.inputs["x"].neg_()
    return found, launches


def test_turns_are_right_and_in_order() -> None:
    found, launches = turns()
    assert launches == 2 * ["sort_few", "gate_up", "down", "combine", "ordered_sum_kernel"]
    assert not torch.equal(*found)


@pytest.mark.parametrize("kernel", ["sort_few", "gate_up", "down", "combine", "ordered_sum_kernel"])
def test_planted_faults_are_found(kernel: str) -> None:
    with pytest.raises((Fault, Unordered)):
        turns((kernel, r"griddepcontrol\.wait;", ""))


def test_parts_of_the_turn_before_in_l1_are_found() -> None:
    with pytest.raises((Fault, Unordered, AssertionError)):
        turns(("ordered_sum_kernel", r"ld\.global\.cg", "ld.global"))
