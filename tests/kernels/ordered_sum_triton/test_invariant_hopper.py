"""Compilation for Hopper of the sums and products of invariant mode, at the sizes of published models."""

import re

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


def test_a_sum_that_is_launched_dependently() -> None:
    """It reads parts behind its wait, past L1, and lets the kernel behind start only then."""
    with compile_only() as compiled:
        for dependent in (False, True):
            part = torch.empty(17, 8, 7168).transpose(0, 1)
            launch_ordered_sum(part, torch.empty(17, 7168, dtype=torch.bfloat16), dependent=dependent)
    plain, dependently = compiled
    assert not resources(plain).waits
    assert not resources(plain).releases
    resources(dependently).check(registers=128)
    before, behind = dependently.asm["ptx"].split("griddepcontrol.wait")
    assert "griddepcontrol.launch_dependents" in behind
    assert "griddepcontrol.launch_dependents" not in before
    assert "ld.global" not in before
    loads = re.findall(r"ld\.global\S*", behind)
    assert loads
    assert all(".cg" in load for load in loads)


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


@pytest.mark.parametrize("features", [192, 2048, 7168])
@pytest.mark.parametrize("rows", [64, 256, 3648, 8192])
def test_tiles_of_few_programs(rows: int, features: int) -> None:
    """All of them multiply by wgmma, 64 tokens by their output features: another instruction would have other bits."""
    with compile_only() as compiled:
        for tokens in (1, 16, 64):
            x, weight = torch.empty(tokens, 1, features).bfloat16(), torch.empty(1, rows, features).bfloat16()
            for dependent in (False, True):
                out = torch.empty(tokens, 1, rows)
                linear_launch.tiled(x, weight, out, invariant=True, few=True, dependent=dependent)
    assert len({kernel.hash for kernel in compiled}) == 2, "one kernel serves up to 64 tokens"
    block, _, _ = linear_launch.invariant_tile(1, rows, features, 132)
    for kernel in compiled[:2]:
        resources(kernel).check()
        assert f"wgmma.mma_async.sync.aligned.m64n{block}k16" in kernel.asm["ptx"]
        assert "HGMMA" in instructions(kernel)
        assert "HMMA" not in instructions(kernel)


@pytest.mark.parametrize("dependent", [False, True])
def test_absorbed_queries(dependent: bool) -> None:
    """With what lies behind the features that are multiplied."""
    with compile_only() as compiled:
        for tokens in (1, 64):
            q, weight = torch.empty(tokens, 16, 192).bfloat16(), torch.empty(16, 512, 128).bfloat16()
            out = torch.empty(tokens, 16, 576).bfloat16()
            linear_launch.tiled(q[..., :128], weight, out[..., :512], invariant=True, behind=64, dependent=dependent)
    assert len({kernel.hash for kernel in compiled}) == 1
    resources(compiled[0]).check()
