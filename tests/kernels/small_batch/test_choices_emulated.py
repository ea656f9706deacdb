"""The choice of experts as it was compiled, run by the PTX emulator: its warps meet, and scores are equal or nearly."""

import pytest
import small_batch_cases as cases
import torch

from kernels.routing_rule import RoutingRule
from tests.support.ptx import emulated

pytestmark = pytest.mark.long

CPU = cases.Place(torch.device("cpu"))
MODELS = {
    "v2-lite": (64, 6, RoutingRule("softmax", 1, 1, False, 1.0)),
    "v2": (160, 6, RoutingRule("softmax", 8, 3, False, 16.0)),
    "v3": (256, 8, RoutingRule("sigmoid", 8, 4, True, 2.5)),
    "k2": (384, 8, RoutingRule("sigmoid", 1, 1, True, 2.827)),
    "odd groups": (18, 2, RoutingRule("sigmoid", 3, 2, False, 1.0)),
}


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("equal", cases.EQUAL)
@pytest.mark.parametrize("model", MODELS)
def test_choices(model: str, tokens: int, equal: cases.Equal) -> None:
    experts, chosen, routing = MODELS[model]
    with emulated(tokens) as launches:
        cases.check_choose(CPU, tokens, experts, chosen, routing, dead=tokens > 1, equal=equal)
    assert launches == ["choose"]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_of_several_tokens(rows: int) -> None:
    experts, chosen, routing = MODELS["v2-lite"]
    with emulated(rows):
        cases.check_choose(CPU, 12, experts, chosen, routing, dead=True, rows=rows, equal="none")
