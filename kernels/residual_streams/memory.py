"""The weights of residual streams' gates, and what a pass keeps of its streams beside them.

Shape legend: see `kernels.residual_streams`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

BLOCK: Final = 512
"""Features of every stream that a program takes which adds to few tokens' streams. Sums have one order, which follows
from it."""
MIXED_BLOCK: Final = 128
"""The same where streams are mixed, which takes so many gates that their sums of more would not find registers."""


@dataclass(frozen=True)
class StreamGates:
    """The weights by which streams are read before a part of a layer and added to behind it."""

    weight_MF: Tensor
    """fp32."""
    base_M: Tensor
    """fp32."""
    scale_G: Tensor
    """fp32: a factor for the gates of what is read, and one for those of what is added and of the mixing, where there
    are such."""
    magnitude: float
    """The most that a gate of what is added is, but for `eps`."""
    eps: float
    """Number that is added to every gate, with mixing to all but those of what is added."""
    norm_eps: float
    """Epsilon of the norm of all streams' features, which the product reads."""
    mixing_steps: int = 0
    """How often the columns of the mixing matrix are divided by their sums, and between two times its rows; 0: nothing
    mixes the streams."""


@dataclass(frozen=True)
class StreamMemory:
    """What a pass keeps of its streams beside them."""

    open_TS: Tensor
    """fp32: gates of what is added next."""
    part_TPX: Tensor
    """fp32: parts of sums, of one call alone."""
    mix_TSS: Tensor | None = None
    """fp32: the matrix by which the streams are mixed next, new[k] = sum over j of mix[j, k] old[j], where there is
    one."""
    read_TE: Tensor | None = None
    """Receives the sum of the streams before its norm, where somebody wants it; contiguous, in their dtype."""

    @staticmethod
    def empty(
        tokens: int, streams: int, features: int, empty: Callable[..., Tensor], *, mixing: bool = False
    ) -> StreamMemory:
        """Uninitialised; `empty(*shape, dtype=)` gives memory."""
        sums = triton.next_power_of_2((2 + streams * mixing) * streams) + 1
        return StreamMemory(
            empty(tokens, streams, dtype=torch.float32),
            empty(tokens, triton.cdiv(features, MIXED_BLOCK if mixing else BLOCK), sums, dtype=torch.float32),
            empty(tokens, streams, streams, dtype=torch.float32) if mixing else None,
        )
