"""Products of groups with matrices of their own, reference and Triton. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from collections.abc import Callable  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from kernels.linear import group_linear, launch  # noqa: E402
from kernels.linear.groups import launch_group_linear  # noqa: E402
from kernels.matrix import BlockScaled, GroupScaled  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()

FP8: dict[str, Callable[..., None]] = {"reference": group_linear, "triton": launch_group_linear}


def drawn(tokens: int, groups: int, rows: int, features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose groups lie apart, NaN between them; and room for their products, likewise."""
    x = torch.full((tokens, groups, features + 16), torch.nan, dtype=dtype)[..., :features]
    x.copy_(torch.randn(tokens, groups, features))
    return x, torch.full((tokens, groups, rows + 8), torch.nan, dtype=dtype)[..., :rows]


def check(x: torch.Tensor, wide_FE: torch.Tensor, out: torch.Tensor) -> None:
    rows = out.shape[2]
    for group in range(x.shape[1]):
        want = x[:, group].double() @ wide_FE[group * rows : (group + 1) * rows].double().t()
        rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[out.dtype]
        torch.testing.assert_close(out[:, group].double(), want, rtol=rounding, atol=rounding * float(want.abs().max()))


@pytest.mark.parametrize("path", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "features", "block"),
    [(1, 3, 128, 256, (128, 128)), (17, 2, 64, 200, (32, 128)), (70, 2, 48, 128, (16, 64)), (3, 1, 40, 64, (128, 64))],
)
def test_fp8(
    tokens: int, groups: int, rows: int, features: int, block: tuple[int, int], dtype: torch.dtype, path: str
) -> None:
    torch.manual_seed(tokens)
    x, out = drawn(tokens, groups, rows, features, dtype)
    data = torch.randn(groups * rows, features).to(torch.float8_e4m3fn)
    blocks = -(-groups * rows // block[0]), -(-features // block[1])
    matrix = BlockScaled(data, torch.rand(blocks) + 0.5, *block)
    FP8[path](x, matrix, out)
    check(x, matrix.float(), out)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain(dtype: torch.dtype, path: str) -> None:
    torch.manual_seed(3)
    x, out = drawn(5, 3, 24, 40, dtype)
    weight = torch.randn(3 * 24, 40).to(dtype)
    if path == "reference":
        group_linear(x, weight, out)
    else:
        launch.tiled(x, weight.view(3, 24, 40), out, invariant=False)
    check(x, weight, out)


@pytest.mark.parametrize("stored", ["plain", "fp8"])
def test_a_cpu_sums_fp64_in_fp64(stored: str) -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(5, 2, 256, dtype=torch.float64), torch.randn(256, 256, dtype=torch.float64)
    matrix = weight if stored == "plain" else BlockScaled(weight.to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5)
    out = torch.empty(5, 2, 128, dtype=torch.float64)
    group_linear(x, matrix, out)
    wide_FE = weight if isinstance(matrix, torch.Tensor) else matrix.float().double()
    want = torch.stack([x[:, group] @ wide_FE[128 * group : 128 * (group + 1)].t() for group in range(2)], 1)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_refuses_what_is_no_such_product() -> None:
    x, out = torch.empty(2, 3, 64), torch.empty(2, 3, 16)
    with pytest.raises(ValueError, match="does not make"):
        group_linear(x, torch.empty(47, 64), out)
    with pytest.raises(ValueError, match="lie side by side"):
        group_linear(x, torch.empty(48, 64), torch.empty(2, 16, 3).transpose(1, 2))
    for matrix in (
        BlockScaled(torch.empty(48, 64, dtype=torch.float8_e4m3fn), torch.empty(2, 1), 32, 64),
        GroupScaled(torch.empty(48, 32, dtype=torch.uint8), torch.empty(48, 2, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match="dequantize the matrix"):
            group_linear(x, matrix, out)
