"""Activations in FP8 (e4m3), with a scale for each token and 128 features, as DeepSeek-V3 multiplies them
(arXiv:2412.19437, section 3.3).

Shape legend: T tokens, K features, G = K / 128 groups of neighbouring features, the last one maybe of fewer, F = 2 K
(gate, then up).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quantize import launch, reference
from kernels.quantize.reference import GROUP, LEAST_SCALE, MOST

__all__ = ["GROUP", "LEAST_SCALE", "MOST", "quantize", "silu_mul_quantize"]


def quantize(x_TK: Tensor, out_TK: Tensor, scale_TG: Tensor, *, dependent: bool = False) -> None:
    """x[t, k] is about out[t, k] * scale[t, k // 128], where the largest number of a group becomes 448, the largest of
    e4m3.

    A scale is the largest magnitude of its group divided by 448 in fp32, or `LEAST_SCALE` where that is more: so groups
    of zeros need no case of their own, and no reciprocal overflows. A number is multiplied by the reciprocal of its
    scale, in fp32, and rounded to e4m3, to the nearest and ties to even. NaN stays NaN and does not count for the
    scale; a group that holds an infinite number stands for infinite numbers and NaN.

    - `x_TK`: floats whose rows may be strided. `out_TK`: float8_e4m3fn, contiguous.
    - `scale_TG`: fp32, of any strides: products of torch want its columns contiguous.
    - `dependent`: programmatic dependent launch, see `launch`.

    ValueError where shapes or dtypes do not fit.
    """
    _check(x_TK, x_TK.shape[1], out_TK, scale_TG)
    if x_TK.is_cuda:
        launch.quantize(x_TK, out_TK, scale_TG, dependent=dependent)
    else:
        reference.quantize(x_TK, out_TK, scale_TG)


def silu_mul_quantize(gate_up_TF: Tensor, out_TK: Tensor, scale_TG: Tensor, *, dependent: bool = False) -> None:
    """`quantize` of silu(gate) * up, where `gate_up_TF` holds the K gate features, then the K up features: computed in
    fp32 and rounded to FP8 alone."""
    _check(gate_up_TF, gate_up_TF.shape[1] // 2, out_TK, scale_TG)
    if gate_up_TF.is_cuda:
        launch.quantize(gate_up_TF, out_TK, scale_TG, gated=True, dependent=dependent)
    else:
        reference.silu_mul_quantize(gate_up_TF, out_TK, scale_TG)


def _check(x: Tensor, features: int, out_TK: Tensor, scale_TG: Tensor) -> None:
    shape = (x.shape[0], features)
    if out_TK.shape != shape or out_TK.dtype != torch.float8_e4m3fn or not out_TK.is_contiguous():
        raise ValueError(f"{shape} numbers do not go into {tuple(out_TK.shape)} of {out_TK.dtype}")
    if scale_TG.shape != (shape[0], -(-features // GROUP)) or scale_TG.dtype != torch.float32:
        raise ValueError(f"scales of {shape} numbers are not {tuple(scale_TG.shape)} of {scale_TG.dtype}")
    if x.stride(1) != 1:
        raise ValueError("a token's features lie side by side")
