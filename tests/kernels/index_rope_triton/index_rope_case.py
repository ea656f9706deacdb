"""Queries and keys of an indexer, and what naive fp64 formulas make of them.

Shape legend: T tokens, J indexer heads, I features, O rope features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6
FACTOR = 0.3
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
"""Relative and absolute: one rounding to the dtype, of numbers of a few units."""


@dataclass(frozen=True)
class Case:
    """Sizes; strided tensors as a wider projection leaves them."""

    tokens: int
    heads: int
    features: int
    rope: int
    dtype: torch.dtype = torch.float32

    def tensors(self, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """The arguments."""
        random = torch.Generator().manual_seed(seed + self.tokens)
        angle_TX = torch.rand(self.tokens, self.rope // 2, generator=random) * 2 * math.pi
        drawn = {
            "q_TJI": torch.randn(self.tokens, self.heads * self.features + 16, generator=random).to(self.dtype),
            "both_TX": torch.randn(self.tokens, self.features + self.heads + 16, generator=random),
            "norm_I": torch.rand(self.features, generator=random) + 0.5,
            "bias_I": torch.randn(self.features, generator=random),
            "rotation_TO": torch.stack([angle_TX.cos(), angle_TX.sin()], -1).flatten(1),
        }
        drawn = {name: tensor.to(device) for name, tensor in drawn.items()}
        q_TJI = drawn["q_TJI"][:, : self.heads * self.features].view(self.tokens, self.heads, self.features)
        left = {
            "key_TI": torch.full((self.tokens, self.features + 16), torch.nan, dtype=self.dtype, device=device),
            "weight_TJ": torch.full((self.tokens, self.heads), torch.nan, device=device),
        }
        left["key_TI"] = left["key_TI"][:, : self.features]
        return drawn | {"q_TJI": q_TJI, "both_TX": drawn["both_TX"][:, : self.features + self.heads]} | left

    def code(self, device: str = "cpu") -> Tensor:
        """Codes of queries that nobody has written."""
        return torch.full((self.tokens, self.heads, self.features), -128, dtype=torch.int8, device=device)


def expected(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the expected tensors in fp64, on a CPU."""
    q_TJI, both_TX, norm_I, bias_I, rotation_TO = (tensor.cpu().double() for tensor in list(tensors.values())[:5])
    key_TI, weight_TJ = both_TX[:, : len(norm_I)], both_TX[:, len(norm_I) :]
    centred_TI = key_TI - key_TI.mean(-1, keepdim=True)
    normed_TI = centred_TI / (centred_TI.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_I + bias_I
    found = {"q_TJI": q_TJI.clone(), "key_TI": normed_TI}
    for x in found.values():
        turn = rotation_TO if x.dim() == 2 else rotation_TO.unsqueeze(1)
        for i in range(rotation_TO.shape[1] // 2):
            cos, sin = turn[..., 2 * i], turn[..., 2 * i + 1]
            a, b = x[..., 2 * i].clone(), x[..., 2 * i + 1].clone()
            x[..., 2 * i], x[..., 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return found | {"weight_TJ": weight_TJ * FACTOR}


def check(
    tensors: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype, scales_TJ: Tensor | None = None
) -> None:
    """Check what a kernel has made of `tensors`. `scales_TJ`: of queries in INT8."""
    for name, numbers in want.items():
        if scales_TJ is not None and name == "weight_TJ":
            numbers = numbers * scales_TJ.double()
        got = tensors[name].cpu().double()
        torch.testing.assert_close(got, numbers, atol=BOUND[dtype], rtol=BOUND[dtype])


def check_int8(tensors: dict[str, Tensor], want: dict[str, Tensor], code_TJI: Tensor, dtype: torch.dtype) -> None:
    """Keys, and what codes stand for, are times a Hadamard matrix what they would be. The largest code is 127, and none
    is off by more than half of the scale, which is in the weights."""
    q_TJI, number_TJI = spread(want["q_TJI"]), code_TJI.cpu().double()
    scale_TJ = q_TJI.abs().amax(-1) / 127
    check(tensors, {"key_TI": spread(want["key_TI"]), "weight_TJ": want["weight_TJ"]}, dtype, scale_TJ)
    assert torch.equal(number_TJI.abs().amax(-1), torch.full_like(scale_TJ, 127))
    assert bool(((number_TJI - q_TJI / scale_TJ.unsqueeze(-1)).abs() < 0.501).all())


def spread(x: Tensor) -> Tensor:
    """Times a Hadamard matrix of as many features as the largest power of two that divides theirs."""
    size = math.gcd(x.shape[-1], 1 << 20)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return (x.view(-1, size) @ matrix / math.sqrt(size)).view(x.shape)


CASES = [
    Case(1, 1, 16, 2),
    Case(3, 5, 48, 16),
    Case(2, 32, 128, 64),
    Case(1, 64, 128, 64, torch.bfloat16),
    Case(1, 17, 128, 128, torch.bfloat16),
    Case(3, 0, 128, 64, torch.bfloat16),
]
