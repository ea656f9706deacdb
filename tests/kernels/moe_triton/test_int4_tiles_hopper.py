"""Compilation of Hopper's products of several tokens with INT4 weights, at published sizes."""

import pytest
from int4_compiled import check_main_loop, compiled

from kernels.moe import schedule
from kernels.moe.scaled_launch import TILED_PROGRAMS, TILED_REGISTERS
from kernels.moe.schedule import ExpertsShape
from kernels.runtime.carveout import SHARED_BYTES
from tests.support.hopper import resources

pytestmark = pytest.mark.gate

SIZES = {"K2": (8, 384, 7168, 2048), "K2 on 8 ranks": (8, 384, 7168, 256), "small": (2, 24, 1024, 512)}


@pytest.mark.parametrize(("tokens", "pairs"), [(2, 2), (5, 8)])
@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str, tokens: int, pairs: int) -> None:
    shape = ExpertsShape(tokens, *SIZES[name])
    kernels = compiled(shape, schedule.int4_tiled)
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
            check_main_loop(kernel)
