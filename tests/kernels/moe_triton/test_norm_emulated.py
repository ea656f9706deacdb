"""The experts of a few tokens as they were compiled, from the norm before them to the norm or the sum behind, run by
the PTX emulator: their launches are dependent, and follow each other on memory that holds poison."""

import re
from typing import Any

import pytest
import torch
from experts_case import Experts

from kernels.rms_norm import launch_add_rms_norm
from tests.support.ptx import Unordered, emulated
from tests.support.ptx.memory import Fault

pytestmark = pytest.mark.long

ADDED = {"normed": False, "added": True}
"""A call whose sums are added to what the kernel before it has made."""


def check(seed: int = 0, normed: bool = True, added: bool = False, **how: Any) -> list[str]:
    """`added`: sums without a norm are added to the norm before, which is another one each time."""
    case = Experts(5, 3, 6, 64, 32, shared=1, holes=True, padded=(2,), seed=seed, added=added)
    with emulated(fences=False):
        sum = case.run().clone()
    tiling, norm = case.tiling(), case.norm()
    assert tiling.rows == 16
    workspace, begun = case.workspace(tiling), case.norm().residual_TE
    x, weight, given = (torch.zeros(5, 64).bfloat16() for _ in range(3))
    with emulated(seed, consecutive=True, fences=False, **how) as launches:
        for sign in (1, -1):  # the second finds the first one's lines in L1
            case.poison(workspace, tiling)
            norm.residual_TE.zero_()
            if added:
                given = case.tensors["before"].fill_(torch.nan)
                x.copy_(sign * begun)
                launch_add_rms_norm(x, norm.residual_TE, norm.weight_E, given, 1e-3, dependent=True)
            else:
                launch_add_rms_norm(x.copy_(begun), norm.residual_TE, weight[0], given, 1e-3, dependent=True)
            case.call(tiling, workspace, True, norm if normed else None).run()
            if added:
                case.inputs["before"] = given.clone()
                case.check()
            elif normed:
                case.check_norm(norm, sum)
            else:
                assert torch.equal(case.tensors["out"], sum)
    return launches


def test_experts_without_a_norm_are_right_and_in_order() -> None:
    assert check(normed=False) == 2 * ["rms_norm_kernel", "sort_few", "gate_up", "down", "combine"]


def test_sums_are_added_to_what_was_just_made() -> None:
    assert check(normed=False, added=True) == 2 * ["rms_norm_kernel", "sort_few", "gate_up", "down", "combine"]


@pytest.mark.parametrize("seed", range(2))
def test_experts_and_norm_are_right_and_in_order(seed: int) -> None:
    assert check(seed) == 2 * ["rms_norm_kernel", "sort_few", "gate_up", "down", "combine_norm"]


@pytest.mark.parametrize(
    ("kernel", "what", "by", "how"),
    [
        ("gate_up", r"griddepcontrol\.wait", "griddepcontrol.launch_dependents; griddepcontrol.wait", {}),
        ("gate_up|down", r"// %bb\.0:", "griddepcontrol.launch_dependents;\ngriddepcontrol.wait;\n", {}),
        ("combine_norm", r"griddepcontrol\.wait;", "", {}),
        ("combine_norm", r"ld\.global\.cg", "ld.global", {}),
        ("combine", r"griddepcontrol\.wait;", "", ADDED),
        ("combine", r"ld\.global\.cg", "ld.global", ADDED),
    ],
    ids=[
        "starts down too early",
        "start the norm too early",
        "does not wait",
        "reads through L1",
        "adds without waiting",
        "adds through L1",
    ],
)
def test_planted_faults_are_found(kernel: str, what: str, by: str, how: dict[str, bool]) -> None:
    def edit(ptx: str) -> str:
        if not re.search(rf"\.entry ({kernel})\(", ptx):
            return ptx
        assert re.search(what, ptx)
        return re.sub(what, by, ptx)

    with pytest.raises((Unordered, Fault)):  # what it reads, or the store of a token that reads nothing
        check(edit=edit, **how)
