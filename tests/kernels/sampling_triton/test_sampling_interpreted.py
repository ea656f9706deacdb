"""Runs interpreted_sampling.py in a process whose Triton interprets."""

from pathlib import Path

from tests.support.interpreter import interpreted_pytest


def test_sampling_kernels_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_sampling.py"))
