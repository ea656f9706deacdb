"""Compilation of the conversion of rows to scaled fp16 for Hopper."""

import pytest
import torch

from kernels.fp16_scaled import Fp16Scaled, launch_to_fp16_scaled, to_fp16_scaled
from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("features", [2048, 18432])
def test_compiles_without_spills(features: int) -> None:
    x = torch.empty(3, features, dtype=torch.bfloat16)
    out = Fp16Scaled.empty(x, torch.empty)
    with compile_only() as compiled:
        launch_to_fp16_scaled(x, out.fp16_TF, out.unit_T, dependent=True)
    found = resources(compiled[0])
    found.check(registers=128)
    assert (found.waits, found.releases) == (True, True)


def test_memory_of_another_size_is_refused() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit memory"):
        to_fp16_scaled(x, Fp16Scaled.empty(x[:2], torch.empty))
