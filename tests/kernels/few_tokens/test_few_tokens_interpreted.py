"""Runs interpreted_few_tokens.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize("cases", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_few_token_kernels_in_the_interpreter(cases: str) -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_few_tokens.py"), ["-m", cases])
