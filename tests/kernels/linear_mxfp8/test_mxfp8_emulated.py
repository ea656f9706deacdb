"""Products with MXFP8 weights in a ring, as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import mxfp8_launch
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def run(tokens: int, rows: int, features: int, programs: int, groups: int, stages: int | None = None) -> None:
    x, matrix, _ = drawn(tokens, rows, features, torch.bfloat16)
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(mxfp8_launch.pieces(tokens, matrix, programs, groups), torch.nan)
    how = {"programs": programs, "groups": groups, "stages": stages}
    with emulated(tokens, consecutive=True) as launches:
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, **how, dependent=True)
    assert launches[0] == "mxfp8_multiply"
    assert launches[1:] in ([], ["add_pieces"])
    check(x, matrix, out)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128])
def test_any_number_of_tokens(tokens: int, groups: int) -> None:
    if groups <= mxfp8_launch.groups_of(tokens):
        run(tokens, 144, 256, 2, groups)


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 9])
def test_shares_that_end_in_the_middle_of_blocks(programs: int) -> None:
    """Three blocks of three steps: pieces of one and two programs, whole blocks, and programs with one step."""
    run(10, 304, 384, programs, 2, stages=2)


@pytest.mark.parametrize("programs", [1, 2, 5, 6])
def test_shares_of_wide_blocks(programs: int) -> None:
    """Two blocks of three steps, of which the second has a piece that is behind the last row."""
    run(10, 304, 384, programs, 4, stages=2)


def test_a_block_of_many_pieces() -> None:
    run(12, 128, 768, 6, 2)
    run(12, 256, 768, 6, 4)


def test_memory_that_is_not_enough() -> None:
    x, matrix, _ = drawn(4, 128, 1024, torch.bfloat16)
    pieces, out = torch.empty(3, 16, 128), torch.empty(4, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="are not those of 4 tokens and 8 programs"):
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=8, groups=2)
