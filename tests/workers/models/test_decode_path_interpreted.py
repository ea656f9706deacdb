"""Runs interpreted_decode_path.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


def test_the_decode_path_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_decode_path.py"))
