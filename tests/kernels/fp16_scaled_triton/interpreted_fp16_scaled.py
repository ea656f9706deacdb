"""The conversion of rows to scaled fp16 in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
from fp16_scaled_case import check_against_reference, rows  # noqa: E402


@pytest.mark.parametrize("features", [16, 128, 200, 2048])
def test_rows(features: int) -> None:
    check_against_reference(rows(features))
