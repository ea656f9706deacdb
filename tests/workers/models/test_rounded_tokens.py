"""Where many tokens are rounded to FP8, and what products they make then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.moe import AddNorm
from workers.memory.scratch import Scratch
from workers.models import many_tokens
from workers.models.invariant import InvariantTokens
from workers.models.many_tokens import FEWEST_ROUNDED, DecodeTokens, ManyTokens
from workers.parallel.group import TensorParallel
from workers.weights.weight import Format, Weight

TOKENS = 2 * FEWEST_ROUNDED


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU."""
    monkeypatch.setattr(many_tokens, "multiplies_rounded", lambda device: True)


def weight(outputs: int = 256, features: int = 512, block: tuple[int, int] = (128, 128)) -> Weight:
    torch.manual_seed(1)
    data = (torch.randn(outputs, features) * 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-outputs // block[0]), -(-features // block[1])) + 0.5) * features**-0.5 / 64
    return Weight(data, Format.FP8_BLOCKS, scales, block)


def tokens(count: int = TOKENS, features: int = 512) -> Tensor:
    torch.manual_seed(2)
    return (torch.randn(count, features) * torch.exp2(4 * torch.rand(count, features))).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """What is left of `x`, by the recipe's own words."""
    groups = x.double().unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(1)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kind", [ManyTokens, DecodeTokens])
def test_products_are_those_of_rounded_activations(kind: type[ManyTokens]) -> None:
    x, matrix, way = tokens(), weight(), kind(TensorParallel(), rounds=True)
    exact = x.double() @ matrix.dequantised(torch.float64).t()
    want = rounded(x) @ matrix.dequantised(torch.float64).t()
    out = torch.full((TOKENS, 256), torch.nan, dtype=torch.bfloat16)
    way.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, want) < 2**-8
    assert distance(out, exact) > 2**-7


@pytest.mark.parametrize("rounds", [False, True])
def test_the_product_behind_attention(rounds: bool) -> None:
    x, matrix, way = tokens(), weight(), ManyTokens(TensorParallel(), rounds=rounds)
    want = (rounded(x) if rounds else x.double()) @ matrix.dequantised(torch.float64).t()
    norm = AddNorm(torch.zeros(TOKENS, 256, dtype=torch.bfloat16), torch.ones(256).bfloat16(), 1e-6)
    way.add(x, matrix, norm, torch.empty_like(norm.residual_TE), Scratch(x.device))
    assert distance(norm.residual_TE, want) < 2**-8


def test_the_gate_of_a_dense_network() -> None:
    x, matrix, way = tokens(), weight(), ManyTokens(TensorParallel(), rounds=True)
    gate, up = (rounded(x) @ matrix.dequantised(torch.float64).t()).chunk(2, 1)
    got = way.gated(x, matrix, Scratch(x.device))
    assert distance(got, torch.nn.functional.silu(gate) * up) < 2**-7


@pytest.mark.parametrize(
    ("why", "way", "x", "matrix", "dtype"),
    [
        ("it is forbidden", ManyTokens(TensorParallel()), tokens(), weight(), torch.bfloat16),
        ("invariant mode", InvariantTokens(TensorParallel()), tokens(), weight(), torch.bfloat16),
        ("few tokens", ManyTokens(TensorParallel(), rounds=True), tokens(16), weight(), torch.bfloat16),
        ("other blocks", ManyTokens(TensorParallel(), rounds=True), tokens(), weight(block=(64, 128)), torch.bfloat16),
        ("a size", ManyTokens(TensorParallel(), rounds=True), tokens(features=640), weight(256, 640), torch.bfloat16),
        ("fp32", ManyTokens(TensorParallel(), rounds=True), tokens().float(), weight(), torch.float32),
        ("fp32 results", ManyTokens(TensorParallel(), rounds=True), tokens(), weight(), torch.float32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_activations_stay_as_they_are(why: str, way: ManyTokens, x: Tensor, matrix: Weight, dtype: torch.dtype) -> None:
    want = x.double() @ matrix.dequantised(x.dtype).double().t()
    out = torch.full((len(x), 256), torch.nan, dtype=dtype)
    way.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, want) < 2**-8, why


def test_a_gpu_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_tokens, "multiplies_rounded", lambda device: False)
    way, x, matrix = ManyTokens(TensorParallel(), rounds=True), tokens(), weight()
    out = torch.full((TOKENS, 256), torch.nan, dtype=torch.bfloat16)
    way.linear(x, matrix, out, Scratch(x.device))
    assert distance(out, x.double() @ matrix.dequantised(torch.bfloat16).double().t()) < 2**-8
