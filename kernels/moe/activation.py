"""What experts make of gate and up, before `down` reads it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def clamped(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """`gate` and `up` as they are multiplied: min(gate, limit) and clamp(up, -limit, limit), of a limit above 0; NaN
    stays NaN."""
    return (torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)) if limit > 0 else (gate, up)


@triton.jit
def gated(gate, up, LIMIT: tl.constexpr):
    """silu(gate) * up of what `clamped` makes of both."""
    if LIMIT > 0:
        # Comparisons, which leave NaN as it is; minima of numbers would not.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate * tl.sigmoid(gate) * up
