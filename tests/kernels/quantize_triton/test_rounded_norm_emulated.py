"""Norms that are rounded to FP8 as they are made: the kernel as it was compiled, between dependent launches."""

import pytest
import torch

from kernels.quantize import Fp8Rows
from kernels.rms_norm import enter_rms_norm, launch_enter_rms_norm
from kernels.rounded_norm import rounded_norm
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered
from tests.support.rounded_norm_case import EPS, Case, check_norm, memory_of, reference

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("tokens", "features"), [(1, 128), (3, 384), (2, 1536)])
@pytest.mark.parametrize("add", [False, True])
def test_a_norm_and_its_numbers(tokens: int, features: int, add: bool) -> None:
    case = Case(tokens, features, add, scaled=not add)
    with emulated(tokens) as launches:
        case.run()
    assert launches == ["rounded_norm_kernel"]
    case.check()


def two_norms(seed: int, **options: object) -> Case:
    """Two layers' norms of one residual stream, launched dependently."""
    case = Case(3, 256, add=True)
    with emulated(seed, consecutive=True, **options):  # type: ignore[arg-type]
        case.run(dependent=True)
        case.run(dependent=True)
    return case


@pytest.mark.parametrize("seed", range(3))
def test_dependent_launches(seed: int) -> None:
    case, x = two_norms(seed), None
    x = (case.inputs["residual"].float() + case.inputs["x"].float()).bfloat16()
    x = (x.float() + case.inputs["x"].float()).bfloat16()
    assert torch.equal(case.tensors["residual"], x)
    check_norm(x, case.tensors["weight"], case.out, case.rounded)


def test_without_its_wait_it_would_be_noticed() -> None:
    with pytest.raises((AssertionError, Fault, Unordered)):
        two_norms(0, edit=lambda ptx: ptx.replace("griddepcontrol.wait;", ""))


@pytest.mark.parametrize("by_id", [False, True])
def test_the_first_norm_of_a_pass(by_id: bool) -> None:
    """Rows become the residual, and their norm; the same on a CPU."""
    rows, weight = torch.randn(7 if by_id else 3, 256).bfloat16(), torch.rand(256).bfloat16() + 0.5
    ids = torch.tensor([6, 0, 6]) if by_id else None
    residual, out = (torch.full((3, 256), torch.nan).bfloat16() for _ in range(2))
    with emulated(1) as launches:
        launch_enter_rms_norm(rows, ids, residual, weight, out, EPS, dependent=True)
    assert launches == ["rms_norm_kernel"]
    want = rows if ids is None else rows[ids]
    assert torch.equal(residual, want)
    on_cpu = torch.empty_like(residual), torch.empty_like(out)
    enter_rms_norm(rows, ids, on_cpu[0], weight, on_cpu[1], eps=EPS)
    assert torch.equal(on_cpu[0], want)
    torch.testing.assert_close(out, on_cpu[1], rtol=2**-7, atol=0)


def test_on_a_cpu() -> None:
    case = Case(5, 384)
    into = case.tensors["weight"], case.out, case.rounded
    rounded_norm(case.tensors["x"], *into, eps=EPS)
    case.check()
    assert torch.equal(case.out, reference(case))


def test_sizes_that_do_not_fit() -> None:
    case = Case(5, 384)
    with pytest.raises(ValueError, match="whole groups"):
        rounded_norm(case.tensors["x"][:, :200], case.tensors["weight"][:200], case.out, case.rounded, eps=EPS)
    _, small = memory_of(4, 384, "cpu")
    with pytest.raises(ValueError, match="do not go into"):
        rounded_norm(case.tensors["x"], case.tensors["weight"], case.out, small, eps=EPS)
    assert isinstance(small, Fp8Rows)
