"""Random activations to be rounded to FP8, and what that makes of them, in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.quantize import GROUP, LEAST_SCALE, MOST, launch_quantize

SHAPES = [(1, 128), (3, 512), (7, 200), (5, 1536), (2, 2080), (4, 64)]
"""Tokens and features, some of which end in the middle of groups and programs."""
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()].unique()
"""All that e4m3 has."""


@dataclass
class Case:
    """Numbers of all sizes, among them groups of zeros, of the largest and of the smallest numbers; NaN around."""

    tokens: int
    features: int
    dtype: torch.dtype = torch.bfloat16
    by_columns: bool = True
    device: str = "cpu"
    seed: int = 0
    gated: bool = False
    """Whether what is rounded is silu(gate) * up; of moderate numbers then."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator(self.device).manual_seed(self.seed)
        groups = -(-self.features // GROUP)

        def drawn(*shape: int) -> Tensor:
            return torch.rand(shape, generator=random, device=self.device)

        wide = torch.randn(self.tokens, groups, GROUP, generator=random, device=self.device)
        wide *= torch.exp2(40 * drawn(self.tokens, groups, 1) - 20) * torch.exp2(-12 * drawn(*wide.shape))
        kind = drawn(self.tokens, groups)
        most, least = torch.finfo(self.dtype).max, torch.finfo(self.dtype).smallest_normal
        wide[kind < 0.1] = 0
        wide[(kind >= 0.1) & (kind < 0.2)] *= least * 2.0**-10
        huge = (kind >= 0.2) & (kind < 0.3)
        wide[huge] = (wide[huge] / wide[huge].abs().amax(-1, keepdim=True)) * most
        x = torch.full((self.tokens, self.features + 24), torch.nan, dtype=self.dtype, device=self.device)[:, 8:-16]
        x.copy_(wide.clamp(-most, most).flatten(1)[:, : self.features])
        if self.gated:
            x = torch.full((self.tokens, 2 * self.features + 24), torch.nan, dtype=self.dtype, device=self.device)
            x = x[:, 8:-16]
            x.copy_(torch.randn(x.shape, generator=random, device=self.device))
            x[:, : min(GROUP, self.features)] = 0
        out = torch.full((self.tokens, self.features), torch.nan, device=self.device).to(torch.float8_e4m3fn)
        scale = torch.full((self.tokens, groups), torch.nan, device=self.device)
        if self.by_columns:
            scale = scale.t().contiguous().t()
        self.tensors = {"x": x, "out": out, "scale": scale}
        self.inputs = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def refill(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.view(torch.uint8 if name == "out" else tensor.dtype).copy_(
                self.inputs[name].view(torch.uint8 if name == "out" else tensor.dtype)
            )

    def run(self, dependent: bool = False) -> None:
        tensors = (self.tensors[name] for name in ("x", "out", "scale"))
        launch_quantize(*tensors, gated=self.gated, dependent=dependent)

    def check(self) -> None:
        """Scales to the bit. Of numbers: the reciprocal and the product are rounded in fp32, so what is within 2^-22 of
        itself from the middle between two numbers of e4m3 may become either."""
        if self.gated:
            self._check_gated()
            return
        x, out, scale = (self.tensors[name].cpu() for name in ("x", "out", "scale"))
        groups = scale.shape[1]
        x = torch.nn.functional.pad(x.float(), (0, groups * GROUP - self.features)).unflatten(1, (groups, GROUP))
        most = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(-1)
        assert torch.equal(scale, (most / MOST).clamp(min=LEAST_SCALE))
        exact = (x.double() / scale.double().unsqueeze(-1)).flatten(1)[:, : self.features]
        found = out.double()
        assert torch.equal(found.isnan(), exact.isnan())
        wrong = (found - exact).abs()
        above = torch.searchsorted(NUMBERS, exact.nan_to_num().clamp(-MOST, MOST)).clamp(max=len(NUMBERS) - 1)
        best = torch.minimum(*((NUMBERS[i] - exact).abs() for i in (above, (above - 1).clamp(min=0))))
        assert not bool((wrong > best + exact.abs() * 2**-22).any())

    def _check_gated(self) -> None:
        """Check gated numbers. In fp32 the gate is off by a few parts in a million, which may make it the other of two
        numbers."""
        x, out, scale = (self.tensors[name].cpu() for name in ("x", "out", "scale"))
        gate, up = x.double().chunk(2, 1)
        padding = (0, scale.shape[1] * GROUP - self.features)
        exact = torch.nn.functional.pad(torch.nn.functional.silu(gate) * up, padding).unflatten(1, (-1, GROUP))
        want = (exact.abs().amax(-1) / MOST).clamp(min=LEAST_SCALE)
        torch.testing.assert_close(scale.double(), want, rtol=1e-5, atol=0)
        wide = scale.double().unsqueeze(-1)
        found = torch.nn.functional.pad(out.double(), padding).unflatten(1, (-1, GROUP)) * wide
        assert bool(((found - exact).abs() <= 1.0001 * (2**-4 * exact.abs() + 2**-10 * wide)).all())
