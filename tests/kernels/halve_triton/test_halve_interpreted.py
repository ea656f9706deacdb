"""Runs interpreted_halve.py in a process whose Triton interprets."""

from pathlib import Path

from tests.support.interpreter import interpreted_pytest


def test_halving_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_halve.py"))
