"""Reference of `kernels.quantize` in plain torch."""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

from kernels import deterministic_math

GROUP: Final = 128
"""Features that share a scale."""
MOST: Final = 448.0
"""The largest number of e4m3."""
LEAST_SCALE: Final = 2.0**-120


def quantize(x_TK: Tensor, out_TK: Tensor, scale_TG: Tensor) -> None:
    """See `kernels.quantize.quantize`."""
    features = x_TK.shape[1]
    x_TGk = F.pad(x_TK.float(), (0, -features % GROUP)).view(*scale_TG.shape, GROUP)
    most_TG = x_TGk.abs().where(~x_TGk.isnan(), 0).amax(-1)
    scale_TG.copy_((most_TG / MOST).clamp(min=LEAST_SCALE))
    # What the reciprocal's rounding may carry beyond the largest number would become NaN in torch's conversion.
    number_TGk = (x_TGk * (1 / scale_TG).unsqueeze(-1)).clamp(-MOST, MOST)
    out_TK.copy_(number_TGk.flatten(1)[:, :features].to(out_TK.dtype))


def silu_mul_quantize(gate_up_TF: Tensor, out_TK: Tensor, scale_TG: Tensor) -> None:
    """See `kernels.quantize.silu_mul_quantize`."""
    gate_TK, up_TK = gate_up_TF.float().chunk(2, dim=-1)
    quantize(deterministic_math.silu(gate_TK) * up_TK, out_TK, scale_TG)
