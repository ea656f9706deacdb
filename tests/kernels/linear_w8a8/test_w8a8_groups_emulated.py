"""Products of groups of rounded tokens as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
import torch
from w8a8_groups_case import check, groups_case

from kernels.linear.w8a8_groups_launch import launch_w8a8_groups
from kernels.quantize import GROUP, launch_quantize
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "features", "programs", "more"),
    [
        pytest.param(17, 2, 256, 256, 3, {"own": 128}, id="half a tile, items of one block"),
        pytest.param(80, 2, 128, 384, 3, {"own": 64, "stages": 2}, id="items of half a block"),
        pytest.param(130, 2, 256, 384, 3, {"own": 256, "stages": 2}, id="rings go round, and a tile of two tokens"),
        pytest.param(65, 3, 128, 256, 2, {"stages": 2}, id="both halves, items of one block"),
        pytest.param(64, 1, 256, 128, 1, {"own": 256}, id="one step, one item"),
    ],
)
def test_groups(tokens: int, groups: int, rows: int, features: int, programs: int, more: dict[str, int]) -> None:
    run(tokens, groups, rows, features, programs, more)


def run(
    tokens: int, groups: int, rows: int, features: int, programs: int, more: dict[str, int], **options: object
) -> None:
    """The kernel behind the one that rounds tokens."""
    number, scale, weight, out = groups_case(tokens, groups, rows, features, "cpu")
    x = (number.float() * scale.repeat_interleave(GROUP, 1)).bfloat16()
    number.view(torch.uint8).fill_(0x7F)
    scale.fill_(torch.nan)
    with emulated(tokens, consecutive=True, **options) as launches:  # type: ignore[arg-type]
        launch_quantize(x, number, scale, dependent=True)
        launch_w8a8_groups(number, scale, weight, out, programs=programs, dependent=True, **more)
    assert launches == ["quantize_kernel", "multiply_groups"]
    check(number, scale, weight, out)


def test_without_their_waits_it_would_be_noticed() -> None:
    """Each partition has its own."""
    waits = "griddepcontrol.wait;"
    for place in range(3):

        def broken(ptx: str, place: int = place) -> str:
            parts = ptx.split(waits)
            if "multiply_groups" not in ptx:
                return ptx
            assert len(parts) == 4
            return waits.join(parts[: place + 1]) + parts[place + 1] + waits.join(["", *parts[place + 2 :]])

        with pytest.raises((AssertionError, Fault, Unordered)):
            run(130, 1, 128, 256, 1, {}, edit=broken)
