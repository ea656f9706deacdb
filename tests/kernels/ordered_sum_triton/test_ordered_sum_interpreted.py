"""Runs the interpreted tests in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest


@pytest.mark.long
def test_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_ordered_sum.py"))
