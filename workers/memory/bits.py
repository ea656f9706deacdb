"""Tensors compared bit by bit, where NaN is equal to the same NaN and 0 is not -0."""

from __future__ import annotations

import torch
from torch import Tensor

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """View the memory of a tensor as integers, of as many bytes as an element has."""
    return x.view(_INTS[x.element_size()])


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors of one shape and dtype differ in any bit: a bool on their device, not waited for."""
    return (bits(a) != bits(b)).any()
