"""RMS norm, its residual variant and the SwiGLU gate against fp64 formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.sigmoid_mul import launch_sigmoid_mul, sigmoid_mul
from kernels.silu_mul import launch_silu_mul, silu_mul


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-6, 2**-8), torch.float16: (1e-6, 2**-11)}


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_of_strided_rows(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(5, 40).to(dtype), (torch.rand(24) + 0.5).to(dtype)
    x, out = wide[:, 3:27], torch.empty(5, 24, dtype=dtype)
    rms_norm(x, weight, out, eps=0.1)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), naive_norm(x, weight, 0.1), atol=atol, rtol=rtol)
    rms_norm(x, weight, x, eps=0.1)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in [(5, 24), (5, 24), (24,)])
    want_residual, out = x + residual, torch.empty_like(x)
    add_rms_norm(x, residual, weight, out, eps=1e-3)
    assert torch.equal(residual, want_residual)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), naive_norm(want_residual, weight, 1e-3), atol=atol, rtol=rtol)


def test_rms_norm_of_zeros_is_zero() -> None:
    out = torch.full((2, 8), torch.nan)
    rms_norm(torch.zeros(2, 8), torch.ones(8), out, eps=1e-6)
    assert torch.equal(out, torch.zeros(2, 8))


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype: torch.dtype, limit: float) -> None:
    gate_up, out = (torch.randn(6, 20) * 3).to(dtype), torch.empty(6, 10, dtype=dtype)
    silu_mul(gate_up, out, limit=limit)
    gate, up = gate_up.double().chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sigmoid_mul(dtype: torch.dtype) -> None:
    made, x = (torch.randn(6, 4, 16) * 3).to(dtype), (torch.randn(6, 4, 10) * 3).to(dtype)
    out, gate = torch.empty_like(x), made[..., 6:]
    want = x.double() / (1 + (-gate.double()).exp())
    atol, rtol = TOLERANCE[dtype]
    sigmoid_mul(x, gate, out)
    torch.testing.assert_close(out.double(), want, atol=atol, rtol=rtol)
    sigmoid_mul(x, gate, x)
    assert torch.equal(x, out)
    silu = F.silu(x.double())
    sigmoid_mul(x, x, x)
    torch.testing.assert_close(x.double(), silu, atol=atol, rtol=rtol)


def test_the_launcher_of_output_gates_refuses_what_its_kernel_cannot_read() -> None:
    x = torch.empty(4, 3, 8)
    for gate in (torch.empty(4, 8, 3).transpose(1, 2), x[:, :2], x[..., :4]):
        with pytest.raises(ValueError, match="side by side"):
            launch_sigmoid_mul(x, gate, x)


def test_the_gates_launcher_refuses_what_its_kernel_cannot_read() -> None:
    x = torch.empty(20, 20)
    for gate_up, out in ((x.t(), x[:, :10]), (x, x[:10].t()), (x[:, :18], x[:, :10]), (x[:6], x[:, :10])):
        with pytest.raises(ValueError, match="side by side"):
            launch_silu_mul(gate_up, out)
