"""Compilation of products of groups for Hopper, at the sizes of DeepSeek V4's output projection: no spills, FP8 weights
that are copied asynchronously, and products on tensor cores."""

from __future__ import annotations

import re

import pytest
import torch

from kernels.linear import launch
from kernels.linear.groups import launch_group_linear
from kernels.matrix import BlockScaled
from tests.support.hopper import compile_only, instructions, machine_code, resources, serialized

pytestmark = pytest.mark.gate

FEATURES, ROWS = 4096, 1024


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_few_tokens_in_fp8(tokens: int) -> None:
    x, out = (torch.empty(tokens, 8, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    data = torch.empty(8 * ROWS, FEATURES, dtype=torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.empty(8 * ROWS // 128, FEATURES // 128))
    with compile_only() as compiled:
        launch.stream_heads(x, matrix, out, dependent=True)
    resources(compiled[0]).check()


@pytest.mark.parametrize("groups", [8, 1])
@pytest.mark.parametrize("tokens", [24, 64, 2048])
def test_fp8(tokens: int, groups: int) -> None:
    x, out = (torch.empty(tokens, groups, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    data = torch.empty(groups * ROWS, FEATURES, dtype=torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.empty(groups * ROWS // 128, FEATURES // 128))
    with compile_only() as compiled:
        launch_group_linear(x, matrix, out)
    resources(compiled[0]).check()
    assert not serialized(compiled[0])
    assert instructions(compiled[0])["HGMMA"] >= 8
    assert re.search(r"LDGSTS\.E\.BYPASS\S*\.128", machine_code(compiled[0]))


@pytest.mark.parametrize("tokens", [1, 64])
def test_plain(tokens: int) -> None:
    x, out = (torch.empty(tokens, 8, width, dtype=torch.bfloat16) for width in (FEATURES, ROWS))
    weight = torch.empty(8, ROWS, FEATURES, dtype=torch.bfloat16)
    with compile_only() as compiled:
        (launch.stream_heads(x, weight, out) if tokens == 1 else launch.tiled(x, weight, out, invariant=False))
    resources(compiled[0]).check()
