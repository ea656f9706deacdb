"""Seconds from the command to the first answer, by part: those of the command, of a replica and of its rank 0 in one
table."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PROCESSES: Final = "processes"
"""Part of a front's start: until scheduler and ranks are processes, and the scheduler listens."""
FIRST_STEP: Final = "first step"
"""Part of a front's start: a step through all ranks, once they are ready."""
LIBRARIES: Final = "libraries of the ranks"
"""What is left of the time until ranks are ready: they still import, and find each other."""
FRONT: Final = "front"
"""Until Ray Serve has a process for the front, which has imported what it needs."""
ENTRANCE: Final = "entrance"
"""Until the entrance knows that the replica serves, and /health answers 200."""
SHOWN_S: Final = 0.05
"""Parts that take less are left out: the table has tenths of a second."""


def of_replica(front: Mapping[str, float], rank: Mapping[str, float]) -> dict[str, float]:
    """Put the parts of a replica's start together: of those of its front and of its rank 0, which starts while the
    front waits, make parts that follow each other. Seconds, in order."""
    waited = sum(seconds for part, seconds in front.items() if part not in (PROCESSES, FIRST_STEP))
    parts = {PROCESSES: front.get(PROCESSES, 0.0), LIBRARIES: max(waited - sum(rank.values()), 0.0), **rank}
    return {**parts, FIRST_STEP: front.get(FIRST_STEP, 0.0)}


def of_application(
    command: Mapping[str, float], waited_s: float, until_replica_s: float, replica: Mapping[str, float]
) -> dict[str, float]:
    """Put the parts of a whole start together. `command`: parts until the application was handed over to Ray Serve.
    `waited_s`: seconds from then on until it answered. `until_replica_s`: seconds from then on until the replica began,
    by the clocks of two nodes, which may differ. `replica`: its own parts."""
    front = min(max(until_replica_s, 0.0), waited_s)
    return {**command, FRONT: front, **replica, ENTRANCE: max(waited_s - front - sum(replica.values()), 0.0)}


def lines_of(parts: Mapping[str, float], ahead: Mapping[str, float] | None = None) -> list[str]:
    """Return the table: a line with the sum, then one per part that is not too short to be seen. `ahead`: parts of rank
    0 that ran beside those, as it started ahead of Ray; a line of their own."""
    shown = {part: seconds for part, seconds in parts.items() if seconds >= SHOWN_S}
    width = max(map(len, shown), default=0)
    head = f"the first answer was possible {sum(parts.values()):.1f} s after the command:"
    lines = [head, *(f"    {part:<{width}} {seconds:6.1f} s" for part, seconds in shown.items())]
    if ahead:
        beside = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in ahead.items() if seconds >= SHOWN_S)
        lines.append(f"beside them, in rank 0, which started ahead of Ray, {sum(ahead.values()):.1f} s: {beside}")
    return lines


def process_age_s() -> float:
    """Return the seconds since this process was started, most of which it may have spent with imports."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
