"""Activations to FP8 on a GPU: eager, captured, and replayed on other values."""

import pytest
import torch
from captured import capture, check_replays, same_bits
from quantize_case import SHAPES, Case

from kernels.quantize import quantize_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
    ),
]


@pytest.mark.parametrize(("tokens", "features"), [*SHAPES, (300, 7168), (1000, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_number(tokens: int, features: int, dtype: torch.dtype) -> None:
    for by_columns in (True, False):
        case = Case(tokens, features, dtype, by_columns, "cuda")
        case.run()
        case.check()


@pytest.mark.parametrize(("tokens", "features"), [*SHAPES, (300, 18432)])
def test_behind_a_gate(tokens: int, features: int) -> None:
    case = Case(tokens, features, device="cuda", gated=True)
    case.run()
    case.check()


def test_the_same_bits_as_the_reference() -> None:
    case = Case(500, 2048, device="cuda")
    case.tensors["x"][3, 5] = torch.nan
    case.run()
    x, out, scale = (case.tensors[name].cpu() for name in ("x", "out", "scale"))
    want_out, want_scale = torch.empty_like(out), torch.empty_like(scale)
    quantize_reference(x, want_out, want_scale)
    assert same_bits(scale, want_scale)
    number = ~want_out.float().isnan()
    assert torch.equal(out.float().isnan(), ~number)
    assert torch.equal(out.float()[number], want_out.float()[number])


@pytest.mark.parametrize("dependent", [False, True])
def test_replayed_on_other_numbers(dependent: bool) -> None:
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs dependent launch")
    case = Case(100, 1536, device="cuda")
    graph = capture(lambda: case.run(dependent))
    case.inputs = Case(100, 1536, device="cuda", seed=1).inputs
    check_replays(graph, case.refill, [case.tensors["out"].view(torch.uint8), case.tensors["scale"]])
    case.check()
