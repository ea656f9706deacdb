"""Dequantization in the repaired interpreter. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import bounds, interpreter

interpreter.repair()
bounds.check_bounds()

import dequantize_case as case  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", case.BLOCKS)
@pytest.mark.parametrize(("rows", "features"), case.SHAPES)
def test_fp8(rows: int, features: int, block: tuple[int, int]) -> None:
    case.check(*case.fp8(rows, features, block, CPU))


@pytest.mark.parametrize(("rows", "features"), case.SHAPES)
def test_mxfp8(rows: int, features: int) -> None:
    case.check(*case.mxfp8(rows, features, CPU))


@pytest.mark.parametrize(("rows", "features"), case.SHAPES)
def test_mxfp4(rows: int, features: int) -> None:
    case.check(*case.mxfp4(rows, features, CPU))


@pytest.mark.parametrize(("rows", "features"), case.SHAPES)
def test_int4(rows: int, features: int) -> None:
    case.check(*case.int4(rows, features, CPU))
