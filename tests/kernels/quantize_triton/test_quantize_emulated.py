"""The quantization of activations as it was compiled, between dependent launches, under drawn schedules."""

import pytest
import torch
from quantize_case import Case

from kernels.silu_mul import launch_silu_mul
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered

pytestmark = pytest.mark.long


def run(seed: int, **options: object) -> tuple[Case, torch.Tensor]:
    """The gate of a dense network, what it leaves is rounded, and the next gate overwrites what was rounded."""
    case = Case(5, 384, seed=seed)
    x = case.tensors["x"] = torch.full((5, 384), torch.nan, dtype=torch.bfloat16)
    first, second = (torch.randn(5, 768, generator=torch.Generator().manual_seed(seed + i)).bfloat16() for i in (0, 1))
    kept = torch.empty_like(x)
    with emulated(seed, consecutive=True, **options):  # type: ignore[arg-type]
        launch_silu_mul(first, x, dependent=True)
        case.run(dependent=True)
        launch_silu_mul(second, kept, dependent=True)
        launch_silu_mul(second, case.tensors["x"], dependent=True)
    gate_TI, up_TI = first.float().chunk(2, 1)
    return case, (torch.nn.functional.silu(gate_TI) * up_TI).bfloat16()


@pytest.mark.parametrize("seed", range(3))
def test_dependent_launches(seed: int) -> None:
    case, x = run(seed)
    case.tensors["x"] = x
    case.check()


def test_without_its_wait_it_would_be_noticed() -> None:
    with pytest.raises((Fault, Unordered)):
        run(0, edit=lambda ptx: ptx.replace("griddepcontrol.wait;", "") if "quantize" in ptx else ptx)
