"""Products with MXFP8 weights in a ring, as they were compiled, run by the PTX emulator under drawn schedules."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.linear import mxfp8_launch
from kernels.linear.records import Blocks
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def run(tokens: int, rows: int, features: int, programs: int, tiling: Blocks) -> None:
    x, matrix, _ = drawn(tokens, rows, features, torch.bfloat16)
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16)
    pieces = torch.full(mxfp8_launch.pieces(tokens, matrix, programs, tiling), torch.nan)
    with emulated(tokens, consecutive=True) as launches:
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=programs, tiling=tiling, dependent=True)
    assert launches[0] == "mxfp8_multiply"
    assert launches[1:] in ([], ["add_pieces"])
    check(x, matrix, out)


@pytest.mark.parametrize(("groups", "chunks"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 128])
def test_any_number_of_tokens(tokens: int, groups: int, chunks: int) -> None:
    if groups == 2 or tokens <= mxfp8_launch.MOST_OF_FOUR_GROUPS:
        run(tokens, 144, 256, 2, mxfp8_launch.tiling_of(tokens, groups, chunks))


@pytest.mark.parametrize("programs", [1, 2, 3, 5, 9])
def test_shares_that_end_in_the_middle_of_blocks(programs: int) -> None:
    """Three blocks of three steps: pieces of one and two programs, whole blocks, and programs with one step."""
    run(10, 304, 384, programs, Blocks(2, 1, 2))


@pytest.mark.parametrize("programs", [1, 2, 5, 6])
@pytest.mark.parametrize(("groups", "chunks"), [(2, 2), (4, 1)])
def test_shares_of_wide_blocks(programs: int, groups: int, chunks: int) -> None:
    """Two blocks of three steps, of which the second has a piece that is behind the last row."""
    run(10, 304, 384, programs, Blocks(groups, chunks, 2))


def test_a_block_of_many_pieces() -> None:
    run(12, 128, 768, 6, Blocks(2, 1, 8))
    run(12, 256, 768, 6, Blocks(4, 1, 5))


@pytest.mark.parametrize("tokens", [3, 100])
def test_products_behind_each_other(tokens: int) -> None:
    """As in a captured graph, the second of the first one's result, and all with the same memory for pieces."""
    (x, wide, _), (_, narrow, _) = (drawn(tokens, *sizes, torch.bfloat16) for sizes in ((384, 256), (256, 384)))
    between, out = (torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16) for rows in (384, 256))
    tiling = mxfp8_launch.tiling_of(tokens)
    sizes = [mxfp8_launch.pieces(tokens, matrix, 3, tiling) for matrix in (wide, narrow)]
    room = torch.full((max(map(math.prod, sizes)),), torch.nan)
    pieces = [room[: math.prod(size)].view(size) for size in sizes]
    with emulated(tokens, consecutive=True) as launches:
        for _ in range(2):
            for of_product in (x, wide, between, pieces[0]), (between, narrow, out, pieces[1]):
                mxfp8_launch.mxfp8_linear(*of_product, programs=3, tiling=tiling, dependent=True)
    assert launches == ["mxfp8_multiply", "add_pieces"] * 4
    check(x, wide, between)
    check(between, narrow, out)


def test_memory_that_is_not_enough() -> None:
    x, matrix, _ = drawn(4, 128, 1024, torch.bfloat16)
    pieces, out = torch.empty(3, 16, 128), torch.empty(4, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="are not those of 4 tokens and 8 programs"):
        mxfp8_launch.mxfp8_linear(x, matrix, out, pieces, programs=8)
