"""Dequantization on a GPU."""

import dequantize_case as case
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("rows", "features"), [*case.SHAPES, (2112, 7168)])
def test_every_number(rows: int, features: int) -> None:
    device = torch.device("cuda")
    for block in case.BLOCKS:
        case.check(*case.fp8(rows, features, block, device))
    case.check(*case.int4(rows, features, device))
    case.check(*case.mxfp8(rows, features, device))
    case.check(*case.mxfp4(rows, features, device))
