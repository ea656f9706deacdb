"""Runs the files `interpreted_*.py` beside the kernels' tests in processes whose Triton interprets.

A process runs several files, because its imports take longer than most of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted_pytest

HERE = Path(__file__).parent
FEW_TOKENS = "small_batch/interpreted_small_batch.py"
NARROW = "mla_decode_triton/interpreted_mla_decode_narrow.py"
"""File that interprets Gluon, as the one above does: that changes what is imported after them."""
LONG = ("moe_triton/interpreted_experts.py", "moe_triton/interpreted_scaled.py")
"""The emulator and a GPU run these kernels, too."""
TOGETHER = sorted(
    path
    for path in HERE.glob("*/interpreted_*.py")
    if str(path.relative_to(HERE)) not in (FEW_TOKENS, NARROW, *LONG, "triton_tools/interpreted_narrow_floats.py")
)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    "cases", [pytest.param("not soak", marks=pytest.mark.long), pytest.param("soak", marks=pytest.mark.soak)]
)
def test_kernels(part: int, cases: str) -> None:
    assert len(TOGETHER) > 10
    interpreted_pytest(TOGETHER[part::2], ["-m", cases])


@pytest.mark.long
def test_hoppers_narrow_attention() -> None:
    interpreted_pytest([HERE / NARROW])


@pytest.mark.soak
@pytest.mark.parametrize("cases", ["not soak", "soak"])
def test_few_token_kernels(cases: str) -> None:
    interpreted_pytest([HERE / FEW_TOKENS], ["-m", cases])


@pytest.mark.soak
@pytest.mark.parametrize("file", LONG)
def test_kernels_that_take_longer(file: str) -> None:
    interpreted_pytest([HERE / file])
