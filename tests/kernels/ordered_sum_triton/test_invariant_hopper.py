"""Compilation for Hopper of the sums and products of invariant mode, at the sizes of published models."""

import pytest
import torch

from kernels.linear import launch as linear_launch
from kernels.ordered_sum import launch_ordered_sum
from tests.support.hopper import compile_only, instructions, resources

pytestmark = pytest.mark.gate

SUMS = {"V2-Lite": (2048, 16 * 128, 10944), "V3": (7168, 128 * 128, 18432), "demo": (192, 8 * 32, 640)}
"""Hidden features, and the input features of the two sums over ranks."""


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("model", SUMS)
def test_ordered_sum(model: str, count: int) -> None:
    features = SUMS[model][0]
    with compile_only() as compiled:
        for tokens in (1, 2, 17, 3000):
            for dtype in (torch.bfloat16, torch.float32):
                part = torch.empty(tokens, count, features).transpose(0, 1)
                launch_ordered_sum(part, torch.empty(tokens, features, dtype=dtype))
    assert len({kernel.hash for kernel in compiled}) == 2, "one kernel serves every number of tokens"
    for kernel in compiled[:2]:
        resources(kernel).check(registers=128)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("model", SUMS)
def test_products_of_groups(model: str, ranks: int) -> None:
    hidden, *inputs = SUMS[model]
    groups = 8 // ranks
    for features in inputs:
        with compile_only() as compiled:
            for tokens in (1, 2, 3, 5, 16, 17, 64, 4000):
                x = torch.empty(tokens, groups, features // 8, dtype=torch.bfloat16)
                weight = torch.empty(hidden, groups, features // 8, dtype=torch.bfloat16).transpose(0, 1)
                linear_launch.tiled(x, weight, torch.empty(tokens, groups, hidden), invariant=True)
        assert len({kernel.hash for kernel in compiled}) == 1, "one kernel serves every number of tokens"
        found = resources(compiled[0])
        found.check()
        assert "HGMMA" in instructions(compiled[0])
