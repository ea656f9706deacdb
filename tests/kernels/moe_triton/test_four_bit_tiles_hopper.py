"""Compilation of Hopper's products of several tokens with weights of four bits, at published sizes."""

import pytest
from four_bit_compiled import check_main_loop, compiled

from kernels.moe import schedule
from kernels.moe.scaled_launch import TILED_PROGRAMS, TILED_REGISTERS
from kernels.moe.schedule import ExpertsShape
from kernels.runtime.carveout import SHARED_BYTES
from tests.support.hopper import resources

pytestmark = pytest.mark.gate

SIZES = {
    "K2": (8, 384, 7168, 2048),
    "K2 on 8 ranks": (8, 384, 7168, 256),
    "small": (2, 24, 1024, 512),
    "V4-Flash": (6, 256, 4096, 2048),
}


@pytest.mark.parametrize(("tokens", "pairs"), [(2, 2), (5, 8)])
@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str, tokens: int, pairs: int) -> None:
    format, limit = ("mxfp4", 10.0) if name == "V4-Flash" else ("int4", 0.0)
    shape = ExpertsShape(tokens, *SIZES[name], limit=limit)
    kernels = compiled(shape, schedule.four_bit_tiled, format)
    names = [*["product"] * 4, "combine_pending"]
    assert [resources(kernel).name for kernel in kernels] == names
    combine = resources(kernels.pop())
    combine.check(64)
    assert (combine.waits, combine.releases) == (True, True)
    for kernel, features in zip(kernels, 2 * (shape.hidden, shape.intermediate), strict=True):
        found = resources(kernel)
        found.check(TILED_REGISTERS)
        assert TILED_PROGRAMS[pairs] * (found.shared + 1024) <= SHARED_BYTES
        assert (found.waits, found.releases) == (True, True)
        if features > 512:  # else a block's steps are no loop of their own
            check_main_loop(kernel, format)
