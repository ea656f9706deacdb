"""Products of FP8 (W8A8) activations with weights in FP8, and their answer in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear import padded_scales
from kernels.matrix import BlockScaled
from kernels.quantize import GROUP, quantize

SIZES = [(4, 512, 128), (16, 512, 128), (64, 1024, 192), (32, 512, 2112), (20, 640, 336), (100, 128, 128)]
"""Tokens, input and output features, of which some end in the middle of a block."""


def case(tokens: int, features: int, outputs: int, device: str) -> tuple[Tensor, Tensor, BlockScaled]:
    """Activations and their scales, as they are rounded, of groups of very different sizes; and weights."""
    random = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, features, generator=random, device=device, dtype=torch.float32)
    sizes = torch.exp2(6 * torch.rand(tokens, features // GROUP, generator=random, device=device) - 3)
    x = (x * sizes.repeat_interleave(GROUP, 1)).bfloat16()
    number = torch.empty(tokens, features, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(features // GROUP, tokens, device=device).t()
    quantize(x, number, scale)
    codes = torch.randn(outputs, features, generator=random, device=device) * 64
    scales = torch.rand(-(-outputs // 128), features // 128, generator=random, device=device) + 0.5
    return number, scale, BlockScaled(codes.to(torch.float8_e4m3fn), scales)


def memory(weight: BlockScaled) -> Tensor | None:
    """Return memory for scales that do not begin where they should, filled with NaN; None where none is needed."""
    sizes = padded_scales(weight)
    return None if sizes is None else torch.full(sizes, torch.nan, device=weight.device)


def check(number: Tensor, scale: Tensor, weight: BlockScaled, out: Tensor) -> None:
    """The tensor cores add up 32 products and the sum so far, 4 times for 128 features, and drop what lies 13 bits
    below the largest of these. In random numbers what is dropped is at most 2^-10 of the products' magnitudes. A
    scale that is not the number's own is off by more. The result is rounded to 8 bits."""
    x = number.double() * scale.double().repeat_interleave(GROUP, 1)
    matrix = weight.data.double() * weight.scales.double().repeat_interleave(128, 0)[
        : weight.shape[0]
    ].repeat_interleave(128, 1)
    want, magnitude = x @ matrix.t(), x.abs() @ matrix.abs().t()
    assert bool(((out.double() - want).abs() <= 2**-10 * magnitude + 2**-8 * want.abs()).all())
