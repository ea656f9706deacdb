"""Constants of a launch that the experts' kernels take together, as one parameter."""

from __future__ import annotations

from typing import NamedTuple


class Choices(NamedTuple):
    """Whom tokens choose from."""

    experts: int
    """Experts that can be chosen."""
    shared: int
    """Experts of every token, whose weights lie behind the others'."""
    chosen: int
    """Experts that a token chooses."""


class Sum(NamedTuple):
    """Destination of the sum over a token's experts."""

    residual: bool
    """Whether it is added to a residual stream; else it is stored."""
    residual_stride: int
    """Elements from one token of the residual stream to the next."""
    stride: int
    """Elements from one token of the output to the next."""
    pieces: int
    """Sums of squares of a token that are written for the next norm."""
