"""Experts that tokens do not choose.

Shape legend: T tokens, Y rows of a table, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GivenExperts:
    """The experts of tokens, by a table: those of DeepSeek V4's first layers follow from the token's id."""

    expert_YK: Tensor
    """int32 or int64, contiguous."""
    row_T: Tensor
    """int64, contiguous: the row of each token, which there is."""
