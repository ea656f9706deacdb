"""Compilation for Hopper of the norms that are rounded as they are made."""

import pytest
import torch

from kernels.quantize import GROUP, Fp8Rows
from kernels.rounded_norm import launch_rounded_norm
from tests.support.hopper import compile_only, resources, serialized

pytestmark = pytest.mark.gate

TOKENS = 16
WIDTHS = {"residual of V3": 7168, "residual of V2-Lite": 2048, "latent of V3's queries": 1536}
"""Features that are normed."""


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("name", WIDTHS)
def test_compiles_without_spills(name: str, adds: bool) -> None:
    features = WIDTHS[name]
    x = torch.empty(TOKENS, features, dtype=torch.bfloat16)
    number = torch.empty(TOKENS, features, dtype=torch.float8_e4m3fn)
    scales = torch.empty(features // GROUP, TOKENS).T
    by_token = torch.empty(TOKENS, features // GROUP) if adds else None
    rounded = Fp8Rows(number, scales, by_token)
    with compile_only() as compiled:
        launch_rounded_norm(x, x[0], x, rounded, 1e-6, x if adds else None, dependent=True)
    found = resources(compiled[0])
    found.check(registers=64)  # two blocks of 16 warps share a multiprocessor
    assert (found.waits, found.releases) == (True, True)
    assert not serialized(compiled[0])
