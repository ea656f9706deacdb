"""Compilation of dequantization for Hopper, at the sizes of published models."""

import pytest
import torch

from kernels.dequantize import launch_dequantize
from kernels.matrix import GROUP, BlockScaled, GroupScaled, MicroScaled, MicroScaled4
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize(("rows", "features"), [(2112, 7168), (24576, 1536), (7168, 16384), (576, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_without_spills(rows: int, features: int, dtype: torch.dtype) -> None:
    out = torch.empty(rows, features, dtype=dtype)
    data, scales = (
        torch.empty(rows, features, dtype=torch.float8_e4m3fn),
        torch.empty(-(-rows // 128), -(-features // 128)),
    )
    groups = torch.empty(rows, features // GROUP, dtype=torch.bfloat16)
    pairs, exponents = (torch.empty(rows, features // step, dtype=torch.uint8) for step in (2, GROUP))
    with compile_only() as compiled:
        launch_dequantize(BlockScaled(data, scales), out)
        launch_dequantize(GroupScaled(pairs, groups), out)
        launch_dequantize(MicroScaled(data, exponents), out)
        launch_dequantize(MicroScaled4(pairs, exponents), out)
    assert len(compiled) == 4
    for kernel in compiled:
        found = resources(kernel)
        found.check(registers=128)
        # `tiled_linear`, launched dependently behind it, reads what it wrote through L1: that is right as long as a
        # plain launch has emptied L1, and nobody has read that memory since.
        assert (kernel.metadata.launch_pdl, found.waits, found.releases) == (False, False, False)


def test_rows_compile_nothing_new() -> None:
    with compile_only() as compiled:
        for rows in (128, 400, 7168):
            data, scales = torch.empty(rows, 512, dtype=torch.float8_e4m3fn), torch.empty(-(-rows // 128), 4)
            launch_dequantize(BlockScaled(data, scales), torch.empty(rows, 512))
    assert len({kernel.hash for kernel in compiled}) == 1
