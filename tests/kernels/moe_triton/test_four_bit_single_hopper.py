"""Compilation of Hopper's products of a single token with weights of four bits, at published sizes."""

import pytest
from four_bit_compiled import check_main_loop, compiled

from kernels.moe import schedule
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
PROGRAMS = {"K2": (4, 4), "K2 on 8 ranks": (3, 4), "small": (3, 3), "V4-Flash": (3, 3)}
"""Programs on a multiprocessor, no more of which find room than are to, of gate and up and of down."""


@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str) -> None:
    format, limit = ("mxfp4", 10.0) if name == "V4-Flash" else ("int4", 0.0)
    shape = ExpertsShape(1, *SIZES[name], limit=limit)
    kernels = compiled(shape, schedule.four_bit_alone, format)
    names = [*["product"] * 4, "combine_pending"]
    assert [resources(kernel).name for kernel in kernels] == names
    combine = resources(kernels.pop())
    combine.check(64)
    assert (combine.waits, combine.releases) == (True, True)
    sizes = 2 * (shape.hidden, shape.intermediate)
    for kernel, features, own in zip(kernels, sizes, 2 * PROGRAMS[name], strict=True):
        found = resources(kernel)
        found.check(SINGLE_REGISTERS[own])
        assert own * (found.shared + 1024) <= SHARED_BYTES
        assert own == 4 or 4 * (found.shared + 1024) > SHARED_BYTES
        assert (found.waits, found.releases) == (True, True)
        if features > 1024:  # else a block's steps are no loop of their own
            check_main_loop(kernel, format)
