"""Constants of a launch that the kernels of the absorbed form take together, as one parameter."""

from __future__ import annotations

from typing import NamedTuple


class Projected(NamedTuple):
    """Location of a product's result, or of parts of it."""

    token: int
    """Elements from one token to the next."""
    head: int
    """Elements from one head of a token to the next, 0 without heads."""
    part: int
    """Elements from one part of a token to the next, 0 without parts."""
    parts: int
    """Parts in fp32 that are to be added up; 0: the result itself."""


class Matrices(NamedTuple):
    """Location of the heads' weight matrices."""

    head: int
    """Elements from one head's matrix to the next's."""
    row: int
    """Elements from one row of a matrix to the next."""


class Features(NamedTuple):
    """The heads of a query, and the features of each; blocks are padded to powers of two."""

    heads: int
    nope: int
    """Features of a head that are multiplied with W_UK."""
    nope_block: int
    latent: int
    latent_block: int
    rope: int
    rope_block: int


class AbsorbCut(NamedTuple):
    """Work of a program of `rope_absorb`, and its precision."""

    tokens: int
    """Tokens of a product."""
    columns: int
    """Latent features of a product."""
    group: int
    """Heads that are rotated together."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""
    boxed: bool
    """Whether the copy engine fetches the weights."""


class Attended(NamedTuple):
    """The sizes of attention that is multiplied with W_UV."""

    width: int
    """Tokens of a row."""
    heads: int
    latent: int
    value_features: int
    """Features of a head's result."""


class MergeCut(NamedTuple):
    """Division of `merge_tile`'s products, and their precision."""

    tokens: int
    """Tokens of a program."""
    pieces: int
    """Pieces of a token's attention that are multiplied at once."""
    columns: int
    """Value features of a program."""
    block_k: int
    """Latent features multiplied at a time."""
    stages: int
    """Steps of that in flight."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""
