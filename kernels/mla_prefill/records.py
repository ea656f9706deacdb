"""Constants of a launch that the prefill kernels take together, as one parameter."""

from __future__ import annotations

from typing import NamedTuple


class Strides(NamedTuple):
    """Elements from one head, or one token, of a tensor to the next."""

    q_head: int
    k_head: int
    v_head: int
    out_token: int
    out_head: int
    lse_token: int


class TokenStrides(NamedTuple):
    """Elements from one token to the next of what the portable kernel reads."""

    q: int
    k: int
    k_rope: int
    v: int


class Features(NamedTuple):
    """The features of queries, keys and values, and how the portable kernel multiplies them. Lanes are features padded
    to powers of two."""

    nope: int
    nope_lanes: int
    rope: int
    rope_lanes: int
    v: int
    v_lanes: int
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""


class Tile(NamedTuple):
    """Tile that a program works on at a time."""

    queries: int
    """Queries, which are the same ones all the time."""
    keys: int
