"""Constants of a launch that the kernels of few tokens take together, as one parameter."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """Size of a weight matrix."""

    rows: int
    """Output features; of a gate and an up matrix in one, those of each."""
    features: int
    """Input features."""


class Strides(NamedTuple):
    """Elements from one row of a tensor to the next, and from one head's part to the next's."""

    x: int
    weight: int
    out: int
    x_head: int = 0
    weight_head: int = 0
    out_head: int = 0
    residual: int = 0


class Pieces(NamedTuple):
    """The sums of squares of a pending norm, see `kernels.pending_norm`."""

    scaled: bool
    """Whether there is one: whether results are divided by the root mean square."""
    sums: int
    """Sums of a token."""
    block: int
    """Number of these sums, padded to a power of two."""


class Epilogue(NamedTuple):
    """Treatment of a product's result."""

    kind: int
    """STORE, RESIDUAL or NORMED of `stream`."""
    norm_features: int = 0
    """The first so many columns are multiplied by a norm's weight."""
    pieces: int = 1
    """Sums of squares of a token that are written for the next norm."""
    token_scaled: bool = False
    """Whether the same columns, in NORMED, are multiplied by a factor of the token as well."""


class BehindPieces(NamedTuple):
    """What `pieces_norm` does with a token's sum beside its norm."""

    add: bool
    """Whether it is added to a residual, whose norm is made then."""
    stride: int
    """Elements from one row of the residual to the next."""
    scaled: bool
    """Whether the norm is multiplied by a factor of the token."""
    twice: bool
    """Whether scales of the rounded norm are kept token by token, too."""


class Streams(NamedTuple):
    """Division of the features of a product, and how much of them is in flight."""

    tokens: int
    """Columns: the tokens, padded."""
    width: int
    """Features of a warp at a time."""
    warps: int
    ahead: int
    """Times all warps' features that are asked for ahead: chunks in registers, or stages of a ring."""


class Blocks(NamedTuple):
    """Division of a product with MXFP8 weights in blocks of 64 times `groups` times `chunks` weight rows."""

    groups: int
    """Groups of four warps that multiply: 2 or 4."""
    chunks: int
    """Chunks of 64 weight rows that each of them has: 1 or 2."""
    stages: int
    """Stages of the ring."""


class Units(NamedTuple):
    """The experts that a token's sum is over; as many as none for a product with one matrix."""

    listed: bool = False
    """Whether there are experts."""
    experts: int = 0
    """Experts that can be chosen."""
    shared: int = 0
    """Experts of every token, whose weights lie behind the others'."""
    chosen: int = 0
    """Experts that a token chooses."""
