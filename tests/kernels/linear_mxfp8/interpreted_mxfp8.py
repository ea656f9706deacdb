"""Products of few tokens with MXFP8 weights in Triton. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402

from kernels.linear.micro_scaled import launch_micro_scaled  # noqa: E402
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows", "features"), [(1, 40, 256), (17, 16, 352), (70, 96, 64), (3, 8, 32)])
def test_any_sizes(tokens: int, rows: int, features: int, dtype: torch.dtype) -> None:
    x, matrix, out = drawn(tokens, rows, features, dtype)
    launch_micro_scaled(x, matrix, out)
    check(x, matrix, out)


def test_no_tokens() -> None:
    x, matrix, out = drawn(0, 16, 32, torch.bfloat16)
    launch_micro_scaled(x, matrix, out)
