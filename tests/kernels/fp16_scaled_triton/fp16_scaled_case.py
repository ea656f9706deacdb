"""Rows to be converted to scaled fp16: of ordinary numbers, tiny and huge ones, zeros, infinities and NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.fp16_scaled import Fp16Scaled, launch_to_fp16_scaled, to_fp16_scaled_reference

HUGE, TINY = 3e38, 2.0**-133
"""The largest bf16 numbers, about, and the smallest ones above 0."""


def rows(features: int, device: str = "cpu") -> Tensor:
    """bf16, strided."""
    random = torch.Generator().manual_seed(features)
    x = torch.randn(9, features + 8, generator=random)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] = 0
    x[4] = torch.randn(features + 8, generator=random) * 2.0 ** torch.randint(
        -40, 20, (features + 8,), generator=random
    )
    x[5, 0] = HUGE
    x[6] = TINY
    x[7, features // 2] = torch.inf
    x[8, features - 1] = torch.nan
    return x.bfloat16().to(device)[:, :features]


def poisoned(x: Tensor) -> Fp16Scaled:
    """Memory for the rows that nobody has written."""
    half = torch.full(x.shape, torch.nan, dtype=torch.float16, device=x.device)
    return Fp16Scaled(half, torch.full(x.shape[:1], torch.nan, device=x.device))


def check(x: Tensor, got: Fp16Scaled) -> None:
    """Powers of two; exact above 2^-31 of a row's largest number, and below off by at most 2^-39 of it."""
    x, got = x.cpu(), Fp16Scaled(got.fp16_TF.cpu(), got.unit_T.cpu())
    assert bool((torch.frexp(got.unit_T).mantissa == 0.5).all())
    finite = x.isfinite().all(1)
    value, wide = got.fp16_TF.double() * got.unit_T.double()[:, None], x.double()
    assert torch.equal(got.fp16_TF.isfinite().all(1), finite)
    assert torch.equal(value[7].isinf(), wide[7].isinf())
    assert value[8, -1].isnan()
    value, wide = value[finite], wide[finite]
    peak = wide.abs().amax(1, keepdim=True)
    large = wide.abs() >= peak * 2.0**-31
    assert torch.equal(value[large], wide[large])
    assert bool(((value - wide).abs() <= peak * 2.0**-39).all())
    normal = (peak >= 2.0**-111)[:, 0]
    most = got.fp16_TF[finite].double().abs().amax(1)
    assert bool(((most >= 2**14) & (most < 2**15))[normal].all())


def check_against_reference(x: Tensor) -> None:
    """The kernel's bits are the reference's."""
    want, got = poisoned(x), poisoned(x)
    to_fp16_scaled_reference(x, want.fp16_TF, want.unit_T)
    check(x, want)
    launch_to_fp16_scaled(x, got.fp16_TF, got.unit_T, dependent=False)
    finite = x.isfinite().all(1)
    assert torch.equal(got.unit_T[finite], want.unit_T[finite])
    assert torch.equal(got.fp16_TF[finite], want.fp16_TF[finite])
    check(x, got)
