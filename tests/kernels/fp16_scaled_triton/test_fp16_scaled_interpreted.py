"""Runs interpreted_fp16_scaled.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest


@pytest.mark.long
def test_fp16_scaled_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_fp16_scaled.py"))
