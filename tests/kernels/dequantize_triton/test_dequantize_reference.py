"""Dequantization on a CPU, and what is refused."""

import dequantize_case as case
import pytest
import torch

from kernels.dequantize import dequantize

CPU = torch.device("cpu")


def test_on_a_cpu() -> None:
    made = case.fp8(53, 96, (16, 64), CPU), case.int4(53, 96, CPU), case.mxfp8(53, 96, CPU), case.mxfp4(53, 96, CPU)
    for matrix, want in made:
        out = torch.empty(53, 96)
        dequantize(matrix, out)
        assert torch.equal(out, want.float())


def test_what_does_not_fit_is_refused() -> None:
    matrix, _ = case.int4(16, 64, CPU)
    for out in (torch.empty(16, 32), torch.empty(64, 16).t()):
        with pytest.raises(ValueError, match=r"a matrix \(16, 64\) does not go into"):
            dequantize(matrix, out)
