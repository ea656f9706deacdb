"""The rule by which tokens choose experts, for all kernels that let them. No torch, because configurations have one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True)
class RoutingRule:
    """Rule by which a token's router logits become experts and weights.

    Source: DeepSeek-V2 (2024), section 2.2 (softmax, a group's best score), DeepSeek-V3 (2024), section 2.1.2 (sigmoid,
    bias), DeepSeek-V4 (2026), section 2.1 (square root of softplus).
    """

    scoring: Scoring
    """Function from logits to scores; sqrt_softplus is the square root of softplus, which `kernels.few_experts` does
    not know. A bias, where there is one, is added to them for the choice only, never to the weights."""
    groups: int
    """Number of groups. With more than 1 the experts form equal groups of neighbours."""
    top_groups: int
    """Number of groups whose experts may be chosen: the best by their best score, or by the sum of their two best where
    there is a bias."""
    normalize: bool
    """Divide a token's weights by their sum (+ 1e-20)."""
    scale: float
    """Factor on all weights, behind that."""
    closed_at_zero: bool = False
    """Whether an expert of another group counts as 0 in the choice, with a bias, instead of being out: it is chosen
    where too few experts of the best groups are above 0. `kernels.few_experts` knows of no such rule."""
