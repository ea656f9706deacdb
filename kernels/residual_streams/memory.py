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

FEWEST_TILED: Final = 9
"""Fewest tokens that share the weights of gates in tiles of tokens, whose products are those of tensor cores."""
FEWEST_LONG: Final = 513
"""Fewest tokens with long parts of sums: of fewer there would be too few programs."""
_ALONE: Final = {False: 512, True: 128}
"""Features of every stream that a program takes of one token: where streams are mixed, which takes so many gates that
sums of more would not find registers, fewer."""
_TILE_BLOCK: Final = 32
"""Features of every stream that a program has at a time of a tile."""
_LONG: Final = {False: 16, True: 8}
"""Such blocks of a long part of sums: where streams are mixed, and otherwise."""


@dataclass(frozen=True)
class StreamPath:
    """How tokens share programs, and how many features of a stream a program adds up, which the order of sums follows
    from."""

    tiled: bool
    """Whether tokens share the weights of gates."""
    block: int
    """Features of every stream that a program has at a time."""
    blocks: int = 1
    """Blocks of a program."""

    @staticmethod
    def alone(mixed: bool) -> StreamPath:
        """Each token has programs of its own; `mixed`: whether streams are."""
        return StreamPath(False, _ALONE[mixed])

    @staticmethod
    def of(tokens: int, mixed: bool) -> StreamPath:
        """The fastest for so many tokens."""
        if tokens < FEWEST_TILED:
            return StreamPath.alone(mixed)
        return StreamPath(True, _TILE_BLOCK, 1 if tokens < FEWEST_LONG else _LONG[mixed])

    @property
    def features(self) -> int:
        """Features of every stream whose products are one part of a token's sums."""
        return self.block * self.blocks

    @property
    def many(self) -> bool:
        """Whether there are so many tokens that a thread makes a whole mixing matrix."""
        return self.tiled and self.blocks > 1


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
        shortest = min(StreamPath.of(tokens, mixing).features, StreamPath.alone(mixing).features)
        # Of sums and one more number, of squares; kernels load four at once.
        sums = 4 * triton.cdiv((2 + streams * mixing) * streams + 1, 4)
        return StreamMemory(
            empty(tokens, streams, dtype=torch.float32),
            empty(tokens, triton.cdiv(features, shortest), sums, dtype=torch.float32),
            empty(tokens, streams, streams, dtype=torch.float32) if mixing else None,
        )
