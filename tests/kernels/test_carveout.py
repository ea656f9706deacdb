"""The first cache of kernels whose weights go to registers."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels.linear import launch, linear, stream
from kernels.runtime.carveout import SHARED_BYTES, SHARED_PERCENT, leave_to_cache
from kernels.runtime.hopper import is_hopper
from tests.support.hopper import compile_only

MOST = 228 * 1024
"""Bytes that can be shared memory on a Hopper GPU."""


def test_the_percentage_is_that_of_the_bytes() -> None:
    assert 0 <= SHARED_PERCENT * MOST // 100 - SHARED_BYTES < MOST // 100


def test_what_was_only_compiled_is_left_alone() -> None:
    x_TE, weight_FE = torch.ones(2, 512, dtype=torch.bfloat16), torch.ones(64, 512, dtype=torch.bfloat16)
    with compile_only() as kernels:
        launch.stream_linear(x_TE, weight_FE, torch.empty(2, 64, dtype=torch.bfloat16))
    assert len(kernels) == 1
    leave_to_cache(kernels[0])
    leave_to_cache(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU")
def test_a_launched_kernel_has_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = stream.stream_linear.run

    def noting(*args: object, **kwargs: object) -> object:
        seen.append(plain(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(stream.stream_linear, "run", noting)
    x_TE, weight_FE = (torch.ones(rows, 512, dtype=torch.bfloat16, device="cuda") for rows in (2, 64))
    linear(x_TE, weight_FE, torch.empty(2, 64, dtype=torch.bfloat16, device="cuda"))
    percent = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert not driver.cuFuncGetAttribute(ctypes.byref(percent), 9, ctypes.c_void_p(seen[0].function))
    assert percent.value == SHARED_PERCENT
