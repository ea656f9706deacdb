"""Runs the interpreted tests in processes whose Triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.long


def test_portable_kernels_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_mla_decode.py"))


def test_hoppers_narrow_kernel_in_the_interpreter() -> None:
    pytest.importorskip("tests.support.gluon_interpreter")
    interpreted_pytest(Path(__file__).with_name("interpreted_mla_decode_narrow.py"))
