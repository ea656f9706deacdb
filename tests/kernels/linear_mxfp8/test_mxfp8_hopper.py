"""Compilation of products with MXFP8 weights for Hopper, at the sizes of Hy4: no spills, weights that are copied
asynchronously, and products on tensor cores."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.linear.micro_scaled import launch_micro_scaled
from kernels.matrix import MicroScaled
from tests.support.hopper import compile_only, instructions, machine_code, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize(("rows", "features"), [(16384, 2048), (6144, 16384), (2048, 6144), (576, 6144)])
@pytest.mark.parametrize("tokens", [1, 64])
def test_sizes_of_hy4(tokens: int, rows: int, features: int) -> None:
    x, out = (torch.empty(tokens, width, dtype=torch.bfloat16) for width in (features, rows))
    data = torch.empty(rows, features, dtype=torch.float8_e4m3fn)
    matrix = MicroScaled(data, torch.empty(rows, features // 32, dtype=torch.uint8))
    with compile_only() as compiled:
        launch_micro_scaled(x, matrix, out, dependent=True)
    resources(compiled[0]).check()
    found = instructions(compiled[0])
    assert found["HGMMA"] + found["HMMA"] >= 8
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))
