"""Runs interpreted_way_of_few.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


def test_the_way_of_few_tokens_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_way_of_few.py")])
