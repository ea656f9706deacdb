"""Elementwise functions of torch on a CPU whose results do not depend on where an element stands.

torch computes the bulk of an array with vector instructions and its tail, and the tail of every thread's share, with
the C library, which may round differently. The references that invariant mode runs on a CPU use these instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_LANES: Final = 64
"""A multiple of what torch takes at once on any processor."""
_ALONE: Final = 1 << 15
"""Elements that torch leaves to one thread."""


def _whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of an array without a tail."""
    count = x.numel()
    filled = F.pad(x.flatten(), (0, -count % _LANES)) if count % _LANES else x.flatten()
    if count <= _ALONE:
        return function(filled)[:count].view(x.shape)
    return torch.cat([function(part) for part in torch.split(filled, _ALONE)])[:count].view(x.shape)


exp: Final = partial(_whole, torch.exp)
"""e to the power of a tensor."""
log: Final = partial(_whole, torch.log)
"""Natural logarithm of a tensor."""
exp2: Final = partial(_whole, torch.exp2)
"""2 to the power of a tensor."""
log2: Final = partial(_whole, torch.log2)
"""Logarithm of a tensor to the base 2."""


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e to the power of minus `x`)."""
    return 1 / (1 + exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Natural logarithm of 1 + e to the power of `x`; from 20 on `x` itself, as in torch."""
    return torch.where(x > 20, x, _whole(torch.log1p, exp(x.clamp(max=20))))


def silu(x: Tensor) -> Tensor:
    """`x` times its sigmoid."""
    return x * sigmoid(x)
