"""Norms that are rounded to FP8 as they are made, on a GPU: eager and replayed."""

import pytest
import torch

from tests.support.rounded_norm_case import SHAPES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs dependent launches"
    ),
]


@pytest.mark.parametrize(("tokens", "features"), [*SHAPES, (300, 7168)])
@pytest.mark.parametrize("add", [False, True])
def test_a_norm_and_its_numbers(tokens: int, features: int, add: bool) -> None:
    case = Case(tokens, features, add, scaled=not add, device="cuda")
    for dependent in (False, True):
        case.refill()
        case.run(dependent)
        case.check()


def test_replayed() -> None:
    case = Case(16, 7168, add=True, device="cuda")
    case.run(True)
    case.refill()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(True)
    graph.replay()
    case.check()
