"""Products with MXFP8 weights in a ring, as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import mxfp8_launch
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def run(tokens: int, rows: int, features: int, programs: int, **more: int) -> None:
    x, matrix, _ = drawn(tokens, rows, features, torch.bfloat16)
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(mxfp8_launch.pieces(tokens, matrix, programs), torch.nan)
    with emulated(tokens, consecutive=True) as launches:
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=programs, dependent=True, **more)
    assert launches[0] == "mxfp8_multiply"
    assert launches[1:] in ([], ["add_pieces"])
    check(x, matrix, out)


@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128])
def test_any_number_of_tokens(tokens: int) -> None:
    run(tokens, 144, 256, 2)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 9])
def test_shares_that_end_in_the_middle_of_blocks(programs: int) -> None:
    """Three blocks of three steps: pieces of one and two programs, whole blocks, and programs with one step."""
    run(10, 304, 384, programs, stages=2)


def test_a_block_of_many_pieces() -> None:
    run(12, 128, 768, 6)
