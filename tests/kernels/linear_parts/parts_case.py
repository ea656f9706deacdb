"""Random inputs of products in parts, in rows between poison, and their answers by torch in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.linear import parts
from kernels.linear.parts import Cut


@dataclass
class Product:
    """Tokens times a matrix of `rows` x `features`."""

    tokens: int
    rows: int
    features: int
    cut: Cut
    device: str = "cpu"
    seed: int = 0
    x: Tensor = field(init=False)
    weight: Tensor = field(init=False)
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """`x`, `weight` and `out` stand in the middle of memory that holds NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        # One storage: what lies behind a row, behind the last token and behind the weights is poison.
        x = torch.full((self.tokens + 3, self.features + 16), torch.nan, dtype=torch.bfloat16)
        x[:-3, 8:-8] = torch.randn(self.tokens, self.features, generator=generator)
        self.x = x.to(self.device)[:-3, 8:-8]
        weight = torch.full((self.rows + 2, self.features + 16), torch.nan, dtype=torch.bfloat16)
        weight[:-2, :-16] = torch.randn(self.rows, self.features, generator=generator)
        self.weight = weight.to(self.device)[:-2, :-16]
        self.out = torch.full(
            (self.tokens + 1, self.cut.parts + 1, self.rows + 2), torch.nan, dtype=torch.float32, device=self.device
        )

    def run(self, dependent: bool = False) -> None:
        """Launch the kernel."""
        out = self.out[:-1, : self.cut.parts, :-2]
        parts.part_linear(self.x, self.weight, out, self.cut, dependent=dependent)

    def check(self) -> None:
        """AssertionError unless every part is right, and nothing else is written."""
        assert self.out[-1].isnan().all()
        assert self.out[:, -1].isnan().all()
        assert self.out[..., -2:].isnan().all()
        x, weight = (t.double().cpu().split(self.cut.group, dim=1) for t in (self.x, self.weight))
        assert len(x) == self.cut.parts
        for part, (x_part, weight_part) in enumerate(zip(x, weight, strict=True)):
            got, want = self.out[:-1, part, :-2].double().cpu(), x_part @ weight_part.T
            # Sums of at most 512 products in fp32: a few units in the last place of the largest intermediate sum.
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * x_part.shape[1] ** 0.5)
