"""Runs interpreted_halve.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest


@pytest.mark.long
def test_halving_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_halve.py"))
