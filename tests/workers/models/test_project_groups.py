"""DeepSeek V4's output in groups: which numbers are multiplied, and in what memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear import MOST_STREAMED
from workers.memory.scratch import Scratch
from workers.models import compressed_kernels
from workers.models.compressed_kernels import MOST_WIDENED_IN_REGISTERS, project_groups, rounded_bytes
from workers.weights.formats import FP8_BLOCKS
from workers.weights.weight import Weight

GROUPS, ROWS, FEATURES = 2, 128, 256


def weight(block: tuple[int, int] = (128, 128)) -> Weight:
    """A matrix whose scales are powers of two, as published ones are."""
    torch.manual_seed(1)
    data = torch.randn(GROUPS * ROWS, FEATURES).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-8, -3, (GROUPS * ROWS // block[0], FEATURES // block[1])).float())
    return Weight(data, FP8_BLOCKS, scales, block)


def tokens(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(count)
    return (torch.randn(count, GROUPS, FEATURES) * torch.exp2(4 * torch.rand(count, GROUPS, 1))).to(dtype)


def projected(x: Tensor, matrix: Weight) -> Tensor:
    """Multiply in fp64."""
    wide = matrix.dequantized(torch.float64).view(GROUPS, ROWS, FEATURES)
    return torch.einsum("tge,gue->tgu", x.double(), wide)


def rounded(x: Tensor) -> Tensor:
    """Round by the recipe's own words: 128 features of a token share a scale."""
    groups = x.double().unflatten(2, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(2)


def far(
    x: Tensor, matrix: Weight, want: Tensor, *, quantize_activations: bool, scratch: Scratch | None = None
) -> float:
    """How far the products are from what is wanted, in norms of it; memory and room for results hold NaN before."""
    out = torch.full((len(x), GROUPS, ROWS), torch.nan, dtype=x.dtype)
    scratch = scratch or Scratch(x.device, torch.full((1 << 20,), 0xFF, dtype=torch.uint8))
    project_groups(x, matrix, out, scratch, quantize_activations=quantize_activations)
    return float((out.double() - want).norm() / want.norm())


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of rounded tokens be possible as on a Hopper GPU."""
    monkeypatch.setattr(compressed_kernels, "takes_w8a8_groups", lambda device, groups, matrix: matrix.rows == 128)


@pytest.mark.parametrize("count", [MOST_STREAMED + 1, 50, MOST_WIDENED_IN_REGISTERS + 1])
@pytest.mark.usefixtures("anywhere")
def test_many_tokens_are_rounded_where_they_may_be(count: int) -> None:
    x, matrix = tokens(count), weight()
    exact, want = projected(x, matrix), projected(rounded(x), matrix)
    assert far(x, matrix, want, quantize_activations=True) < 2**-8
    assert far(x, matrix, exact, quantize_activations=True) > 2**-7
    assert far(x, matrix, exact, quantize_activations=False) < 2**-8


@pytest.mark.parametrize(
    ("why", "x", "matrix"),
    [
        ("few tokens", tokens(MOST_STREAMED), weight()),
        ("other blocks", tokens(50), weight((64, 128))),
        ("fp32", tokens(50, torch.float32), weight()),
        ("no such memory", tokens(50).transpose(0, 1).contiguous().transpose(0, 1), weight()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("anywhere")
def test_tokens_stay_as_they_are(why: str, x: Tensor, matrix: Weight) -> None:
    assert far(x, matrix, projected(x, matrix), quantize_activations=True) < 2**-8, why


@pytest.mark.parametrize("count", [1, MOST_WIDENED_IN_REGISTERS, MOST_WIDENED_IN_REGISTERS + 1])
def test_weights_are_dequantized_for_many_tokens_that_are_not_rounded(count: int) -> None:
    """Without Hopper's products nothing is rounded; the memory is the matrix's."""
    x, matrix, scratch = tokens(count), weight(), Scratch(torch.device("cpu"))
    assert far(x, matrix, projected(x, matrix), quantize_activations=True, scratch=scratch) < 2**-8
    assert scratch.peak == (2 * GROUPS * ROWS * FEATURES if count > MOST_WIDENED_IN_REGISTERS else 0)


@pytest.mark.usefixtures("anywhere")
def test_the_memory_that_is_estimated_is_the_memory_that_is_taken() -> None:
    x, matrix, scratch = tokens(51), weight(), Scratch(torch.device("cpu"))
    far(x, matrix, projected(x, matrix), quantize_activations=True, scratch=scratch)
    assert scratch.peak == rounded_bytes(51, GROUPS * FEATURES)
