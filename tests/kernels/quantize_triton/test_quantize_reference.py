"""Quantization of activations to FP8 on a CPU, against float64."""

import pytest
import torch
from quantize_case import SHAPES, Case

from kernels.quantize import GROUP, MOST, quantize, silu_mul_quantize


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_on_a_cpu(tokens: int, features: int, dtype: torch.dtype) -> None:
    case = Case(tokens, features, dtype)
    quantize(case.tensors["x"], case.tensors["out"], case.tensors["scale"])
    case.check()


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_behind_a_gate_on_a_cpu(tokens: int, features: int) -> None:
    case = Case(tokens, features, gated=True)
    silu_mul_quantize(case.tensors["x"], case.tensors["out"], case.tensors["scale"])
    case.check()
    with pytest.raises(ValueError, match="do not go into"):
        quantize(case.tensors["x"], case.tensors["out"], case.tensors["scale"])


def test_infinite_numbers_do_not_become_finite_ones() -> None:
    x = torch.ones(1, 2 * GROUP)
    x[0, 5] = torch.inf
    out, scale = torch.zeros(1, 2 * GROUP).to(torch.float8_e4m3fn), torch.zeros(1, 2)
    quantize(x, out, scale)
    back = out.float() * scale.repeat_interleave(GROUP, 1)
    assert not bool(back[0, :GROUP].isfinite().any())
    torch.testing.assert_close(back[0, GROUP:], torch.ones(GROUP))
    assert scale[0, 1] == 1 / MOST


def test_what_does_not_fit_is_refused() -> None:
    x, out, scale = torch.zeros(4, 256), torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.zeros(4, 2)
    for wrong in ((x[:, ::2], out[:, :128], scale[:, :1]), (x, out.float(), scale), (x, out, scale[:, :1])):
        with pytest.raises(ValueError, match=r"do not go into|scales of|side by side"):
            quantize(*wrong)
    with pytest.raises(ValueError, match="side by side"):
        quantize(torch.zeros(256, 4).t(), out, scale)
