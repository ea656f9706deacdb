"""Products of groups of rounded tokens as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
from w8a8_groups_case import check, groups_case

from kernels.linear.w8a8_groups_launch import launch_w8a8_groups
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "features", "programs", "more"),
    [
        pytest.param(17, 2, 256, 256, 3, {}, id="half a tile, items of one block"),
        pytest.param(130, 2, 256, 384, 3, {"blocks": 2, "stages": 2}, id="rings go round, and a tile of two tokens"),
        pytest.param(65, 3, 128, 256, 2, {"stages": 2}, id="both halves, items of one block"),
        pytest.param(64, 1, 256, 128, 1, {"blocks": 2}, id="one step, one item"),
    ],
)
def test_groups(tokens: int, groups: int, rows: int, features: int, programs: int, more: dict[str, int]) -> None:
    number, scale, weight, out = groups_case(tokens, groups, rows, features, "cpu")
    with emulated(tokens, consecutive=True) as launches:
        launch_w8a8_groups(number, scale, weight, out, programs=programs, **more)
    assert launches == ["multiply_groups"]
    check(number, scale, weight, out)
