"""Products of groups of FP8 (W8A8) activations on a CPU, and which sizes they take."""

from __future__ import annotations

import pytest
import torch
from w8a8_groups_case import check, groups_case

from kernels.linear import takes_w8a8_groups, w8a8_group_linear, w8a8_groups_launch
from kernels.matrix import BlockScaled

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "features"), [(17, 3, 128, 384), (5, 2, 256, 128), (1, 1, 128, 256)]
)
def test_reference(tokens: int, groups: int, rows: int, features: int) -> None:
    number, scale, weight, out = groups_case(tokens, groups, rows, features, "cpu")
    w8a8_group_linear(number, scale, weight, out)
    check(number, scale, weight, out)


@pytest.mark.parametrize(
    ("rows", "features", "block", "takes"),
    [
        (512, 256, (128, 128), True),
        (256, 256, (128, 128), True),
        (384, 256, (128, 128), False),
        (512, 192, (128, 128), False),
        (512, 256, (64, 128), False),
        (512, 256, (128, 64), False),
    ],
)
def test_matrices(
    rows: int, features: int, block: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two groups."""
    scales = torch.ones(-(-rows // block[0]), -(-features // block[1]))
    weight = BlockScaled(torch.zeros(rows, features).to(torch.float8_e4m3fn), scales, *block)
    assert not takes_w8a8_groups(CPU, 2, weight)
    monkeypatch.setattr(w8a8_groups_launch, "is_hopper", lambda device: True)
    assert takes_w8a8_groups(CPU, 2, weight) is takes


def test_refuses_what_is_no_such_product() -> None:
    number, scale, weight, out = groups_case(5, 2, 128, 256, "cpu")
    for wrong in (out[:4], out[:, :1]):
        with pytest.raises(ValueError, match="do not become"):
            w8a8_group_linear(number, scale, weight, wrong)
    with pytest.raises(ValueError, match="column by column"):
        w8a8_group_linear(number, scale.contiguous(), weight, out)


@pytest.mark.parametrize(
    ("tokens", "own"), [(17, 64), (128, 64), (129, 128), (256, 128), (300, 256), (512, 256), (600, 128), (8192, 256)]
)
def test_rows_of_an_item(tokens: int, own: int) -> None:
    """Of DeepSeek V4 Flash on an H200: as many programs as possible have something to do, and few turns."""
    assert w8a8_groups_launch._rows_of_item(-(-tokens // 128) * 64, 1024, 132) == own
    assert w8a8_groups_launch._rows_of_item(-(-tokens // 128) * 64, 1024 + 128, 132) == min(own, 128)
