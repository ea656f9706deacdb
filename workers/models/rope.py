"""Computations that depend on positions: rotary position embedding with YaRN, the softmax scale, and the scale of
queries.

Shape legend: P positions, O rope features, I = O / 2 angles.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from workers.models.config import ModelConfig, QueryScaling, Rope, Yarn

LOOKAHEAD: Final = 16
"""Positions past the longest context that may be looked up: drafts of a row that is about to end, and the draft layer,
whose positions are one ahead."""


def rotation_table(rope: Rope, features: int, positions: int, device: torch.device) -> Tensor:
    """Rotations of every position, fp32 [positions + LOOKAHEAD, O]: (cos, sin) of the i-th angle at (2i, 2i + 1).

    Angles are products of fp32 numbers, as in the published implementations the models were trained with.
    """
    frequency_I, magnitude = frequencies(rope, features)
    angle_PI = torch.arange(positions + LOOKAHEAD, dtype=torch.float32).unsqueeze(-1) * frequency_I
    table_PI2 = torch.stack([angle_PI.cos(), angle_PI.sin()], dim=-1) * magnitude
    return table_PI2.flatten(1).to(device)


def query_scale_table(
    scaling: QueryScaling | None, positions: int, device: torch.device, *, ahead: int = 0
) -> Tensor | None:
    """Compute the factor of the query at each position, fp32 [positions + LOOKAHEAD]; None if there is no scaling.
    `ahead`: positions by which a query stands further than the one that its factor is of."""
    if scaling is None:
        return None
    return query_scale(scaling, (torch.arange(positions + LOOKAHEAD) - ahead).clamp_(min=0)).to(device)


def query_scale(scaling: QueryScaling | None, position_T: Tensor) -> Tensor:
    """Compute the factors of the queries at these positions (integers), fp32 [T]; 1 without a `scaling`."""
    if scaling is None:
        return torch.ones(position_T.shape, dtype=torch.float32, device=position_T.device)
    # The quotient's floor is exact in integers; others take it of an fp32 quotient, which is the same below 2^24.
    return 1 + scaling.beta * torch.log1p((position_T // scaling.original_positions).float())


def frequencies(rope: Rope, features: int) -> tuple[Tensor, float]:
    """Radians a position of each of the `features` / 2 angles (fp32), and the factor on cosines and sines."""
    period_I = torch.pow(rope.theta, torch.arange(0, features, 2, dtype=torch.float32) / features)
    kept_I = 1.0 / period_I
    if rope.yarn is None:
        return kept_I, 1.0
    yarn = rope.yarn
    interpolated_I = 1.0 / (yarn.factor * period_I)
    low, high = _interpolated_band(rope.theta, features, yarn)
    ramp_I = ((torch.arange(features // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return interpolated_I * ramp_I + kept_I * (1 - ramp_I), _magnitude(yarn)


def softmax_scale(config: ModelConfig) -> float:
    """Factor on attention scores: 1 / sqrt(query features), times mscale_all_dim's correction squared under YaRN."""
    scale = 1 / math.sqrt(config.qk_head_dim)
    yarn = config.rope.yarn
    if yarn is not None and yarn.mscale_all_dim:
        scale *= _temperature(yarn.factor, yarn.mscale_all_dim) ** 2
    return scale


def _interpolated_band(theta: float, features: int, yarn: Yarn) -> tuple[float, float]:
    """Angles below `low` are kept, above `high` interpolated, between them blended (YaRN, section 3.2)."""

    def angle_of(rotations: float) -> float:
        return features * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = angle_of(yarn.beta_fast), angle_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    return low, high + 0.001 if low == high else high


def _temperature(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def _magnitude(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _temperature(yarn.factor, yarn.mscale) / _temperature(yarn.factor, yarn.mscale_all_dim)
    return _temperature(yarn.factor, 1.0)
