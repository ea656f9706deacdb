"""Compilation of the quantization of activations for Hopper, at the sizes of published models."""

import re

import pytest
from quantize_case import Case

from tests.support.hopper import compile_only, machine_code, resources

pytestmark = pytest.mark.gate


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("features", [7168, 2048, 1536, 18432, 16384, 192])
def test_compiles_without_spills(features: int, gated: bool) -> None:
    with compile_only() as compiled:
        Case(4, features, gated=gated).run(dependent=True)
    found = resources(compiled[0])
    found.check(registers=96 if gated else 64)
    assert found.waits
    assert found.releases
    code = machine_code(compiled[0])
    assert features == 192 or "LDG.E.128" in code  # rows of the last begin at multiples of 8 bytes
    assert re.search(r"F2FP\.\S*E4M3", code)


def test_tokens_compile_nothing_new() -> None:
    with compile_only() as compiled:
        for tokens in (1, 7, 16, 300):
            Case(tokens, 512).run()
    assert len({kernel.hash for kernel in compiled}) == 1
