"""Routing as it was compiled, run by the PTX emulator, where several experts' scores are equal."""

import pytest
from routing_case import MODELS, Routing

from tests.support.ptx import emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize("equal", ["some", "all", "none"])
@pytest.mark.parametrize("model", MODELS)
def test_equal_scores(model: str, equal: str) -> None:
    case = Routing(3, **MODELS[model], shared=1, ties=equal == "some", rows=3, padded=(1,))
    if equal == "all":
        for tensors in (case.tensors, case.inputs):
            tensors["logit"].fill_(0.25)
            tensors["bias"].fill_(0.5)
    with emulated(fences=False):
        case.run()
    case.check()
