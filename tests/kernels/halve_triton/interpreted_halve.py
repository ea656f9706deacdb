"""The halving of rows in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_halve_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
from halve_case import check_against_reference, rows  # noqa: E402


@pytest.mark.parametrize("features", [16, 128, 200, 2048])
def test_rows(features: int) -> None:
    check_against_reference(rows(features))
