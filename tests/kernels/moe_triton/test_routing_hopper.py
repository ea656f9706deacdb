"""Compilation of routing for Hopper."""

import pytest
from routing_case import MODELS, Routing

from tests.support.hopper import compile_only, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("parts", [0, 16])
@pytest.mark.parametrize("model", MODELS)
def test_compiles_without_spills(model: str, parts: int, dependent: bool) -> None:
    with compile_only() as compiled:
        Routing(3, **MODELS[model], shared=1, padded=(1,), parts=parts).run(dependent)
    found = resources(compiled[0])
    found.check()
    assert found.waits == dependent


def test_the_number_of_tokens_compiles_nothing_new() -> None:
    with compile_only() as compiled:
        for tokens in (1, 2, 16, 17, 1000):
            Routing(tokens, rows=1, padded=(0,)).run()
    assert len({kernel.hash for kernel in compiled}) == 1
