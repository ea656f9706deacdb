"""Runs the interpreted tests in a process whose Triton interprets."""

from pathlib import Path

from tests.support.interpreter import interpreted_pytest


def test_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_ordered_sum.py"))
