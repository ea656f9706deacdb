"""Activations to FP8 in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import bounds, interpreter

interpreter.repair()
bounds.check_bounds()

import pytest  # noqa: E402
import torch  # noqa: E402
from quantize_case import SHAPES, Case  # noqa: E402

from kernels.quantize import quantize_reference  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_every_number(tokens: int, features: int, dtype: torch.dtype) -> None:
    for by_columns in (True, False):
        case = Case(tokens, features, dtype, by_columns, seed=tokens)
        case.run()
        case.check()


def test_the_same_bits_as_the_reference() -> None:
    case = Case(40, 640)
    case.run()
    out, scale = case.tensors["out"].clone(), case.tensors["scale"].clone()
    case.refill()
    quantize_reference(case.tensors["x"], case.tensors["out"], case.tensors["scale"])
    assert torch.equal(out.view(torch.uint8), case.tensors["out"].view(torch.uint8))
    assert torch.equal(scale, case.tensors["scale"])


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_behind_a_gate(tokens: int, features: int) -> None:
    case = Case(tokens, features, seed=tokens, gated=True)
    case.run()
    case.check()


def test_what_is_no_number_stays_none() -> None:
    case = Case(2, 256)
    case.tensors["x"][0, 3] = torch.nan
    case.tensors["x"][1, 130:200] = torch.nan
    case.run()
    case.check()


def test_no_tokens() -> None:
    Case(0, 256).run()
