"""Runs interpreted_small_batch_path.py in a process whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


def test_the_small_batch_path_tokens_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_small_batch_path.py")])
