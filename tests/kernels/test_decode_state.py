"""The bookkeeping of a decode step, against a model of one row written without tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest


@pytest.mark.long
def test_reference_and_kernels_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).parent / "decode_state_triton" / "interpreted_decode_state.py")
