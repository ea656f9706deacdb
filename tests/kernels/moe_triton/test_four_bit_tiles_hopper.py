"""Compilation of Hopper's products of several tokens with weights of four bits, at published sizes."""

import pytest
from four_bit_compiled import check_main_loop, compiled

from kernels.moe import scaled_launch, schedule
from kernels.moe.scaled_launch import TILED_REGISTERS, TILED_WARPS
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


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("name", SIZES)
def test_compiles_to_what_it_was_written_for(name: str, tokens: int) -> None:
    check(name, tokens)


@pytest.mark.parametrize("lines", [0, 4])
@pytest.mark.parametrize("name", ["small", "V4-Flash"])
def test_two_programs_on_a_multiprocessor(name: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "BESIDE_FEATURES", 4096)
    monkeypatch.setattr(scaled_launch, "TILED_LINES", lines)
    check(name, 5, warps=8)


def check(name: str, tokens: int, warps: int = 0) -> None:
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
        assert TILED_WARPS // found.warps * (found.shared + 1024) <= SHARED_BYTES
        assert found.warps == (warps or (4 if tokens == 2 else 16))
        assert (found.waits, found.releases) == (True, True)
        if features > 512:  # else a block's steps are no loop of their own
            check_main_loop(kernel, format)
