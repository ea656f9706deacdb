"""Parts to sum, and their sum by the tree in fp32, written out."""

from __future__ import annotations

import torch
from torch import Tensor


def parts(count: int, tokens: int, features: int, device: str = "cpu") -> Tensor:
    """[G, T, E] out of [T, G, E] or of a wider one, of magnitudes that make the order of the sum show."""
    torch.manual_seed(count * tokens)
    x = torch.randn(tokens, count, features) * torch.randn(tokens, count, 1).mul(6).exp2()
    return x.to(device).transpose(0, 1)


def tree(part: Tensor) -> Tensor:
    """The sum of a half plus the sum of the other half."""
    if len(part) == 1:
        return part[0]
    middle = len(part) // 2
    return tree(part[:middle]) + tree(part[middle:])
