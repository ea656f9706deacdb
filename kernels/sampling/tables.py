"""State of sampling for every slot, as device tensors: nothing here is a host value that a captured graph would freeze.

Shape legend: S slots (the last one belongs to nobody), V vocabulary, K most stop ids, B most bias entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Final

import torch

from kernels.sampling.filters import FLOORS

# Columns of `SlotTables.real_SF` that the kernels read.
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
# The same of `SlotTables.whole_SI`.
SEED, TOP_K, MIN_TOKENS, BIASED, GENERATED = range(5)
NEUTRAL_REAL: Final[Mapping[str, float]] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Names of these columns, and a row of `real_SF` that leaves the logits as they are and takes their argmax."""
NEUTRAL_WHOLE: Final = (0, 0, 0, 0, 0)


class Feature(IntFlag):
    """Features that a row needs beyond the argmax of its logits. Computing more than a row needs changes nothing in its
    result."""

    PENALTIES = 1
    BIAS = 2
    MIN_TOKENS = 4
    NOISE = 8
    """Temperature above 0. The filters below count only together with it: they never remove the argmax."""
    TOP_K = 16
    TOP_P = 32
    FLOOR = 64
    """A filter of `filters.FLOORS`, min_p among them."""


ALL_FEATURES = Feature(sum(Feature))
LOGIT_FEATURES = Feature.PENALTIES | Feature.BIAS | Feature.MIN_TOKENS
"""Features that change logits before the argmax."""
FILTERS = Feature.TOP_K | Feature.TOP_P | Feature.FLOOR
"""Features that leave only some ids to draw from."""


def real_columns() -> tuple[str, ...]:
    """Names of all columns of `SlotTables.real_SF`: those that the kernels read come first."""
    return (*NEUTRAL_REAL, *(name for name in FLOORS if name not in NEUTRAL_REAL))


@dataclass(frozen=True)
class SlotTables:
    """Sampling parameters and history of every slot. Slot index -1 reads the last row, which stays neutral."""

    real_SF: torch.Tensor
    """float32 [S, F]: temperature, top_p, min_p, repetition, frequency and presence penalty; behind them the columns of
    `filters.FLOORS` that no kernel reads (none, unless a filter acts on a CPU alone)."""
    whole_SI: torch.Tensor
    """int64 [S, 5]: seed (its 64 bits), top_k (0: all), min_tokens (0 without stop ids), biases in use, and tokens
    generated so far."""
    stop_SK: torch.Tensor
    """int64 [S, K]: stop ids, the free columns filled with the first one (any id where min_tokens is 0)."""
    bias_id_SB: torch.Tensor
    """int64 [S, B]: ids whose logits are biased, in ascending order; free columns have bias 0."""
    bias_SB: torch.Tensor
    """float32 [S, B]."""
    seen_SV: torch.Tensor
    """int32 [S, V], or [S, 0] while no slot has penalties: 2 * (times the id was generated) + (1 if it is in the
    prompt)."""

    def __post_init__(self) -> None:
        slots = self.real_SF.shape[0]
        assert self.real_SF.shape == (slots, len(real_columns()))
        assert self.real_SF.dtype == torch.float32
        assert self.whole_SI.shape == (slots, len(NEUTRAL_WHOLE))
        assert self.whole_SI.dtype == torch.int64
        assert self.stop_SK.shape[0] == self.bias_SB.shape[0] == self.seen_SV.shape[0] == slots
        assert self.bias_id_SB.shape == self.bias_SB.shape
        assert self.seen_SV.dtype == torch.int32

    def real(self, name: str) -> torch.Tensor:
        """A column of `real_SF`: float32 [S]. ValueError where there is none of this name."""
        return self.real_SF[:, real_columns().index(name)]

    @staticmethod
    def allocate(
        slots: int, stop_ids: int, bias: int, device: torch.device, more: Mapping[str, float] | None = None
    ) -> SlotTables:
        """Neutral tables for `slots` slots, the one of nobody included; `seen_SV` comes later, if at all. `more`:
        neutral values of the columns of `real_SF` that no kernel reads."""
        real = {**NEUTRAL_REAL, **(more or {})}
        neutral = [real[name] for name in real_columns()]
        return SlotTables(
            real_SF=torch.tensor([neutral] * slots, dtype=torch.float32, device=device),
            whole_SI=torch.zeros(slots, len(NEUTRAL_WHOLE), dtype=torch.int64, device=device),
            stop_SK=torch.zeros(slots, stop_ids, dtype=torch.int64, device=device),
            bias_id_SB=torch.zeros(slots, bias, dtype=torch.int64, device=device),
            bias_SB=torch.zeros(slots, bias, dtype=torch.float32, device=device),
            seen_SV=torch.zeros(slots, 0, dtype=torch.int32, device=device),
        )
