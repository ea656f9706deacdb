"""Compilation of Hopper's products of a single token with weights of four bits, at published sizes."""

import pytest
from four_bit_compiled import check_main_loop, compiled

from kernels.moe import scaled_launch, schedule
from kernels.moe.scaled_launch import SINGLE_REGISTERS
from kernels.moe.schedule import ExpertsShape
from kernels.runtime.carveout import SHARED_BYTES
from tests.support.hopper import resources

pytestmark = pytest.mark.gate

SIZES = {
    "K2": (8, 384, 7168, 2048),
    "K2 on 8 ranks": (8, 384, 7168, 256),
    "small": (2, 8, 1024, 512),
    "V4-Flash": (6, 256, 4096, 2048),
}


@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str) -> None:
    check(name, programs=4)


@pytest.mark.parametrize(("ahead", "lines"), [(4, 0), (2, 4), (4, 4)])
@pytest.mark.parametrize("name", ["V4-Flash", "K2 on 8 ranks"])
def test_three_programs_on_a_multiprocessor(name: str, ahead: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than three, of either product or of both."""
    monkeypatch.setattr(schedule, "THREE_SINGLE", 3)
    monkeypatch.setattr(schedule, "THREE_AHEAD", ahead)
    monkeypatch.setattr(scaled_launch, "SINGLE_LINES", lines)
    check(name, programs=3)


def check(name: str, programs: int) -> None:
    """`programs`: of V4-Flash's products. Others have three where their blocks are few."""
    format, limit = ("mxfp4", 10.0) if name == "V4-Flash" else ("int4", 0.0)
    shape = ExpertsShape(1, *SIZES[name], limit=limit)
    kernels = compiled(shape, schedule.four_bit_alone, format)
    names = [*["product"] * 4, "combine_pending"]
    assert [resources(kernel).name for kernel in kernels] == names
    combine = resources(kernels.pop())
    combine.check(64)
    assert (combine.waits, combine.releases) == (True, True)
    for kernel, features in zip(kernels, 2 * (shape.hidden, shape.intermediate), strict=True):
        found = resources(kernel)
        rows = shape.hidden if features < shape.hidden else 2 * shape.intermediate
        few = schedule.few_blocks(shape.pairs * rows // 64, 132)
        own = 3 if few else 4
        assert own == programs or name != "V4-Flash"
        found.check(SINGLE_REGISTERS[own])
        assert own * (found.shared + 1024) <= SHARED_BYTES
        assert own == 4 or 4 * (found.shared + 1024) > SHARED_BYTES
        assert (found.waits, found.releases) == (True, True)
        if features > 1024:  # else a block's steps are no loop of their own
            check_main_loop(kernel, format)
