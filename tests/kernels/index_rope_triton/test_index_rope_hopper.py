"""Compilation of norm and rope of an indexer for Hopper, at the sizes of published models."""

import pytest
import torch
from index_rope_case import EPS, FACTOR, Case

from kernels.index_rope import launch_index_rope
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("heads", [0, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_without_spills(heads: int, dtype: torch.dtype, int8: bool) -> None:
    case = Case(3, heads, 128, 64, dtype)
    with compile_only() as compiled:
        launch_index_rope(*case.tensors().values(), case.code() if int8 else None, EPS, FACTOR, dependent=True)
    found = resources(compiled[0])
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)
