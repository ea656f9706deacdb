"""What scheduler and ranks tell each other of graphs that are captured while the engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import msgspec

from workers.protocol.report import StepTime

Waiting: TypeAlias = "int | Literal['auto'] | None"
"""Which graphs an engine captures before it serves. A number: the first portion, as so many rows wait for it. None:
all. auto: the first portion where all were proven on this device before (`workers.rank.proven_before`), else all."""
FIRST_ENGINE: Final[Mapping[str, Waiting]] = {"auto": "auto", "all": None, "few": 0}
"""Which graphs a replica's first engine captures before it serves, by `graphs_at_start`."""


class CapturePortion(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Every rank captures its next portion of graphs now, behind the plans before this message, and proves it."""

    number: int
    """Counts from 1 without gaps."""
    pages: tuple[int, ...]
    """Global ids of pages that nobody else has meanwhile: what steps are proven on overwrites them."""


class PortionCaptured(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank has captured a portion, and takes its graphs from the next plan on. The pages are zeroed."""

    rank: int
    number: int
    seconds: float
    """Time that it took, for which the rank ran no step."""
    step_times: tuple[StepTime, ...] = ()
    """With the last portion, from rank 0: times of all steps; empty where nothing was proven."""
