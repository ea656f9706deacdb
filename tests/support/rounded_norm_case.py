"""Norms that are rounded to FP8 as they are made, and what they should be."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.quantize import GROUP, Fp8Rows, quantize_reference
from kernels.rms_norm import rms_norm_reference
from kernels.rounded_norm import launch_rounded_norm

EPS = 1e-6
SHAPES = [(1, 128), (3, 384), (9, 1536), (5, 7168)]
"""Tokens and features, of which some are no power of two."""


def memory_of(tokens: int, features: int, device: str) -> tuple[Tensor, Fp8Rows]:
    """Memory for a norm and for what is rounded of it, of NaN; rows are a multiple of four."""
    rows = -(-tokens // 4) * 4
    number = torch.full((rows, features), torch.nan, device=device).to(torch.float8_e4m3fn)
    scale = torch.full((features // GROUP, rows), torch.nan, device=device).t()
    by_token = torch.full((tokens, features // GROUP), torch.nan, device=device) if tokens % 2 else None
    return torch.full((tokens, features), torch.nan, device=device).bfloat16(), Fp8Rows(number, scale, by_token)


def check_norm(
    x: Tensor,
    weight: Tensor,
    normed: Tensor,
    rounded: Fp8Rows,
    scale_T: Tensor | None = None,
) -> None:
    """The norm is within one rounding of bf16 of what fp64 makes, and what is rounded to FP8 is that very norm, to the
    bit; rows behind the tokens are left alone."""
    x, weight, normed = x.cpu().double(), weight.cpu().double(), normed.cpu()
    want = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight
    if scale_T is not None:
        want *= scale_T.cpu().double().unsqueeze(1)
    assert bool(((normed.double() - want).abs() <= 2**-8 * want.abs()).all())
    number, scale = rounded.number_RK.cpu(), rounded.scale_RG.cpu()
    tokens = len(normed)
    numbers, scales = torch.empty_like(number[:tokens]), torch.empty_like(scale[:tokens])
    quantize_reference(normed, numbers, scales)
    assert torch.equal(number[:tokens].view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(scale[:tokens], scales)
    if rounded.by_token_TG is not None:
        assert torch.equal(rounded.by_token_TG.cpu(), scales)
    assert bool(scale[tokens:].isnan().all())
    assert bool(number[tokens:].float().isnan().all())


@dataclass
class Case:
    """Rows of very different sizes, with a residual or without."""

    tokens: int
    features: int
    add: bool = False
    scaled: bool = False
    device: str = "cpu"
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator(self.device).manual_seed(self.tokens * self.features)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=self.device)

        size = torch.exp2(4 * drawn(self.tokens, 1))
        x = torch.full((self.tokens, self.features + 16), torch.nan, device=self.device).bfloat16()[:, :-16]
        x.copy_(drawn(self.tokens, self.features) * size)
        x[:, : min(GROUP, self.features - GROUP)] = 0
        self.tensors = {
            "x": x,
            "residual": (drawn(self.tokens, self.features) * size).bfloat16(),
            "weight": (1 + 0.1 * drawn(self.features)).bfloat16(),
            "scale": 1 + 0.1 * drawn(self.tokens),
        }
        self.refill()

    def refill(self) -> None:
        """Set everything to what it is before a run."""
        self.inputs = self.inputs or {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, tensor in self.tensors.items():
            tensor.copy_(self.inputs[name])
        self.out, self.rounded = memory_of(self.tokens, self.features, self.device)

    def run(self, dependent: bool = False) -> None:
        """Launch the kernel."""
        t = self.tensors
        residual, scale = t["residual"] if self.add else None, t["scale"] if self.scaled else None
        into = t["weight"], self.out, self.rounded
        launch_rounded_norm(t["x"], *into, EPS, residual, scale, dependent=dependent)

    def check(self) -> None:
        """The residual is the sum, rounded once; the norm is that of the residual."""
        x = self.inputs["x"]
        if self.add:
            x = (self.inputs["residual"].float() + x.float()).bfloat16()
            assert torch.equal(self.tensors["residual"], x)
        check_norm(x, self.tensors["weight"], self.out, self.rounded, self.tensors["scale"] if self.scaled else None)


def reference(case: Case) -> Tensor:
    """`kernels.rms_norm` of the case's rows, in plain torch."""
    out = torch.empty_like(case.out)
    rms_norm_reference(case.inputs["x"], case.tensors["weight"], out, EPS)
    return out
