"""Products of few tokens with MXFP8 weights on a GPU, at sizes of Hy4 and others, against fp64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear, mxfp8_launch, mxfp8_linear, takes_mxfp8
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "features"), [(16384, 2048), (6144, 16384), (4096, 6144), (2048, 6144), (576, 6144), (40, 352)]
)
@pytest.mark.parametrize("tokens", [1, 8, 17, 64, 100])
def test_products(tokens: int, rows: int, features: int, dtype: torch.dtype) -> None:
    x, matrix, out = drawn(tokens, rows, features, dtype, "cuda")
    assert takes_mxfp8(x, matrix)
    linear(x, matrix, out)
    check(x, matrix, out)
    again = torch.empty_like(out)
    linear(x, matrix, again, dependent=True)
    assert torch.equal(again, out)


@pytest.mark.parametrize(("groups", "chunks"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 16, 40, 128])
@pytest.mark.parametrize(("rows", "features"), [(16384, 2048), (6144, 16384), (2624, 6144)])
def test_streamed_products(rows: int, features: int, tokens: int, groups: int, chunks: int) -> None:
    """Of weights that come through a ring, in every tiling that is there for so many tokens: blocks in pieces, whole
    ones, and one that the matrix ends in. Memory that held something else does not matter."""
    if groups == 4 and tokens > mxfp8_launch.MOST_OF_FOUR_GROUPS:
        pytest.skip("the sums do not fit the registers of as many warps")
    x, matrix, _ = drawn(tokens, rows, features, torch.bfloat16, "cuda")
    tiling = mxfp8_launch.tiling_of(tokens, groups, chunks)
    pieces = torch.full(mxfp8_launch.pieces(tokens, matrix, tiling=tiling), torch.nan, device="cuda")
    first, again = (torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    mxfp8_linear(x, matrix, first, pieces, tiling=tiling)
    check(x, matrix, first)
    for _ in range(3):
        mxfp8_linear(x, matrix, again, pieces, tiling=tiling, dependent=True)
    assert torch.equal(again, first)


@pytest.mark.parametrize("tokens", [1, 50, 128])
@pytest.mark.parametrize(("rows", "features"), [(16384, 2048), (2624, 6144)])
def test_streamed_in_the_tiling_that_is_chosen(rows: int, features: int, tokens: int) -> None:
    x, matrix, _ = drawn(tokens, rows, features, torch.bfloat16, "cuda")
    pieces = torch.full(mxfp8_launch.pieces(tokens, matrix), torch.nan, device="cuda")
    out = torch.full((tokens, rows), torch.nan, dtype=torch.bfloat16, device="cuda")
    mxfp8_linear(x, matrix, out, pieces, dependent=True)
    check(x, matrix, out)
