"""Cases of products with MXFP8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.matrix import GROUP, MicroScaled


def drawn(
    tokens: int, rows: int, features: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, MicroScaled, Tensor]:
    """Tokens that lie apart, NaN between them; a matrix with scales from 2^-7 to 2^4, and some of 0; and room for their
    products, likewise apart."""
    torch.manual_seed(tokens + features)
    x = torch.full((tokens, features + 16), torch.nan, dtype=dtype)[:, :features]
    x.copy_(torch.randn(tokens, features))
    data = (torch.randn(rows, features) * 60).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 132, (rows, features // GROUP), dtype=torch.uint8)
    scales[torch.rand(scales.shape) < 0.1] = 0
    out = torch.full((tokens, rows + 8), torch.nan, dtype=dtype)[:, :rows]
    moved = torch.empty_strided(x.shape, x.stride() if tokens else (features + 16, 1), dtype=dtype, device=device)
    room = torch.empty_strided(out.shape, out.stride() if tokens else (rows + 8, 1), dtype=dtype, device=device)
    return moved.copy_(x), MicroScaled(data.to(device), scales.to(device)), room.fill_(torch.nan)


def check(x: Tensor, matrix: MicroScaled, out: Tensor) -> None:
    """Compare with the product of the numbers that the matrix stands for, in fp64. Beside its last rounding a sum in
    fp32 is rounded as often as it has terms: it loses less than four times the square root of their number times half
    of the last place of the largest."""
    want = x.double() @ matrix.float().double().t()
    last = {torch.float32: 2**-24, torch.bfloat16: 2**-8}[out.dtype]
    lost = 4 * x.shape[1] ** 0.5 * 2**-24 * float(want.abs().max())
    assert bool(((out.double() - want).abs() <= 1.01 * last * want.abs() + lost).all())
