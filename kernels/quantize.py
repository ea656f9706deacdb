"""Activations in FP8 (e4m3), with a scale for each token and 128 features, as DeepSeek-V3 multiplies them
(arXiv:2412.19437, section 3.3).

Shape legend: T tokens, K features, G = K / 128 groups of neighbouring features, the last one maybe of fewer, F = 2 K
(gate, then up).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import deterministic_math

GROUP: Final = 128
"""Features that share a scale."""
MOST: Final = 448.0
"""The largest number of e4m3."""
LEAST_SCALE: Final = 2.0**-120
_MOST, _LEAST_SCALE = tl.constexpr(MOST), tl.constexpr(LEAST_SCALE)
GROUPS: Final = 8
"""Groups of a program."""
WARPS: Final = 2
"""Warps of a program. With them a thread has two pieces of 16 bytes in flight."""


@dataclass(frozen=True)
class Fp8Rows:
    """Activations as `quantize` leaves them, with rows behind the last token, to a multiple that products want: these
    hold whatever is there."""

    number_RK: Tensor
    """float8_e4m3fn, contiguous."""
    scale_RG: Tensor
    """fp32, whose columns are contiguous and lie side by side."""
    by_token_TG: Tensor | None = None
    """The tokens' scales once more, contiguous, for those who gather tokens."""

    def of(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The numbers [T, K] and scales [T, G] of the tokens."""
        return self.number_RK[:tokens], self.scale_RG[:tokens]


def quantize(
    x_TK: Tensor,
    out_TK: Tensor,
    scale_TG: Tensor,
    *,
    by_token_TG: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """x[t, k] is about out[t, k] * scale[t, k // 128], where the largest number of a group becomes 448, the largest of
    e4m3.

    A scale is the largest magnitude of its group divided by 448 in fp32, or `LEAST_SCALE` where that is more: so groups
    of zeros need no case of their own, and no reciprocal overflows. A number is multiplied by the reciprocal of its
    scale, in fp32, and rounded to e4m3, to the nearest and ties to even. NaN stays NaN and does not count for the
    scale; a group that holds an infinite number stands for infinite numbers and NaN.

    - `x_TK`: floats whose rows may be strided. `out_TK`: float8_e4m3fn, contiguous.
    - `scale_TG`: fp32, of any strides: products of torch want its columns contiguous.
    - `by_token_TG`: fp32, contiguous: gets the scales, too.
    - `dependent`: programmatic dependent launch (compute capability 9.0 and above), which is always safe.

    ValueError where shapes or dtypes do not fit.
    """
    _check(x_TK, x_TK.shape[1], out_TK, scale_TG)
    if x_TK.is_cuda:
        launch_quantize(x_TK, out_TK, scale_TG, by_token_TG, dependent=dependent)
        return
    quantize_reference(x_TK, out_TK, scale_TG)
    if by_token_TG is not None:
        by_token_TG.copy_(scale_TG)


def silu_mul_quantize(gate_up_TF: Tensor, out_TK: Tensor, scale_TG: Tensor, *, dependent: bool = False) -> None:
    """`quantize` of silu(gate) * up, where `gate_up_TF` holds the K gate features, then the K up features: computed in
    fp32 and rounded to FP8 alone."""
    _check(gate_up_TF, gate_up_TF.shape[1] // 2, out_TK, scale_TG)
    if gate_up_TF.is_cuda:
        launch_quantize(gate_up_TF, out_TK, scale_TG, gated=True, dependent=dependent)
    else:
        silu_mul_quantize_reference(gate_up_TF, out_TK, scale_TG)


def _check(x: Tensor, features: int, out_TK: Tensor, scale_TG: Tensor) -> None:
    shape = (x.shape[0], features)
    if out_TK.shape != shape or out_TK.dtype != torch.float8_e4m3fn or not out_TK.is_contiguous():
        raise ValueError(f"{shape} numbers do not go into {tuple(out_TK.shape)} of {out_TK.dtype}")
    if scale_TG.shape != (shape[0], -(-features // GROUP)) or scale_TG.dtype != torch.float32:
        raise ValueError(f"scales of {shape} numbers are not {tuple(scale_TG.shape)} of {scale_TG.dtype}")
    if x.stride(1) != 1:
        raise ValueError("a token's features lie side by side")


def quantize_reference(x_TK: Tensor, out_TK: Tensor, scale_TG: Tensor) -> None:
    """`quantize` in plain torch."""
    features = x_TK.shape[1]
    x_TGk = F.pad(x_TK.float(), (0, -features % GROUP)).view(*scale_TG.shape, GROUP)
    most_TG = x_TGk.abs().where(~x_TGk.isnan(), 0).amax(-1)
    scale_TG.copy_((most_TG / MOST).clamp(min=LEAST_SCALE))
    # What the reciprocal's rounding may carry beyond the largest number would become NaN in torch's conversion.
    number_TGk = (x_TGk * (1 / scale_TG).unsqueeze(-1)).clamp(-MOST, MOST)
    out_TK.copy_(number_TGk.flatten(1)[:, :features].to(out_TK.dtype))


def silu_mul_quantize_reference(gate_up_TF: Tensor, out_TK: Tensor, scale_TG: Tensor) -> None:
    """`silu_mul_quantize` in plain torch."""
    gate_TK, up_TK = gate_up_TF.float().chunk(2, dim=-1)
    quantize_reference(deterministic_math.silu(gate_TK) * up_TK, out_TK, scale_TG)


def launch_quantize(
    x: Tensor,
    out_TK: Tensor,
    scale_TG: Tensor,
    by_token_TG: Tensor | None = None,
    *,
    gated: bool = False,
    dependent: bool = False,
) -> None:
    """`quantize` as a Triton kernel, or `silu_mul_quantize` where `gated`."""
    tokens, features = out_TK.shape
    if not tokens:
        return
    groups = min(triton.next_power_of_2(triton.cdiv(features, GROUP)), GROUPS)
    quantize_kernel[(tokens, triton.cdiv(features, groups * GROUP))](
        x,
        out_TK,
        scale_TG,
        scale_TG if by_token_TG is None else by_token_TG,
        scale_TG.stride(0),
        scale_TG.stride(1),
        X_STRIDE=x.stride(0),
        FEATURES=features,
        GATED=gated,
        GROUP=GROUP,
        GROUPS=groups,
        TWICE=by_token_TG is not None,
        DEPENDENT=dependent,
        num_warps=WARPS,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit(do_not_specialize=["scale_row", "scale_column"])
def quantize_kernel(
    x,
    out,
    scale_out,
    by_token,
    scale_row,
    scale_column,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TWICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token's GROUPS neighbouring groups of features. Scales lie `scale_row` and `scale_column` elements apart; TWICE
    also row by row in `by_token`. GATED: `x` holds FEATURES of a gate, then as many of up, and what is rounded is
    silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = x + row * X_STRIDE + k
    number = tl.load(at, mask=k < FEATURES, other=0.0, cache_modifier=".cg").to(tl.float32)
    if GATED:
        up = tl.load(at + FEATURES, mask=k < FEATURES, other=0.0, cache_modifier=".cg").to(tl.float32)
        number = number * tl.sigmoid(number) * up
    to = row * scale_row + group.to(tl.int64) * scale_column
    there = group * GROUP < FEATURES
    scale = store_rounded(number, out + row * FEATURES + k, scale_out + to, k < FEATURES, there)
    if TWICE:
        tl.store(by_token + row * ((FEATURES + GROUP - 1) // GROUP) + group, scale, mask=there)


@triton.jit
def store_rounded(x, number, scale, inside, group_inside):
    """Round groups of features, fp32 [G, 128], as `quantize` does, into memory at `number` [G, 128] and `scale` [G].
    Returned are the scales."""
    size = tl.where(x == x, tl.abs(x), 0.0)
    factor = tl.maximum(tl.div_rn(tl.max(size, 1), _MOST), _LEAST_SCALE)
    tl.store(number, (x * tl.div_rn(1.0, factor)[:, None]).to(number.dtype.element_ty), mask=inside)
    tl.store(scale, factor, mask=group_inside)
    return factor
