"""Products of few tokens with MXFP8 weights on a GPU, at sizes of Hy4 and others, against fp64."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear, takes_mxfp8
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
