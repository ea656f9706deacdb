"""Runs the interpreted tests beside this file in processes whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["interpreted_routing", "interpreted_experts", "interpreted_scaled"])
def test_in_the_interpreter(name: str) -> None:
    interpreted_pytest(Path(__file__).with_name(f"{name}.py"))
