"""Memory that launches which follow each other may read of each other: programmatic dependent launch, and L1.

A launch with `launch_pdl` starts when all programs of the one before have said griddepcontrol.launch_dependents or have
ended; only behind griddepcontrol.wait are the launches before complete and what they wrote visible (PTX ISA,
griddepcontrol; CUDA programming guide, programmatic dependent launch). A launch that lets its successor start before
it has waited itself leaves it beside its own predecessors, too. The wait does not empty L1, the start of a plain
launch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.ptx.values import Lanes

if TYPE_CHECKING:
    from tests.support.ptx.memory import Region


class Unordered(AssertionError):
    """A read that may give what was there before another launch wrote."""


class Order:
    """Launches in one stream with nothing between them. They are numbered from 1."""

    def __init__(self) -> None:
        self.names = [""]
        self._running_from = 1  # launches from here on may still run when the present one starts
        self._early = False
        self._emptied = 0  # the last launch before which L1 was emptied

    def begin(self, name: str, dependent: bool) -> None:
        """The next launch."""
        now = len(self.names)
        self.names.append(name)
        if not dependent:
            self._running_from, self._emptied = now, now
        elif not self._early:
            self._running_from = max(1, now - 1)
        self._early = False

    def numbers(self) -> tuple[int, int, int]:
        """The first launch that may still run, the present one, and the last before which L1 was emptied."""
        return self._running_from, len(self.names) - 1, self._emptied

    def trigger(self, waited: bool) -> None:
        """A program lets the next launch start."""
        dependent = self._running_from < len(self.names) - 1
        self._early |= dependent and not waited

    def read(self, region: Region, offset: Lanes, width: int, waited: bool, cached: bool) -> None:
        """Note a read.

        Raises:
            Unordered: it may not see what a launch before has written.
        """
        now = len(self.names) - 1
        if not waited and self._running_from < now:
            writer = int(region.written[_pieces(offset, width, 4)].max())
            if writer >= self._running_from:
                raise Unordered(f"reads {region.name} before it waits, which {self.names[writer]} writes")
        if cached:
            # A block sees what it has written itself: barriers order its threads, and stores reach its L1.
            own = (region.written[_pieces(offset, width, 4)] == now).reshape(len(offset), -1).all(1)
            offset = offset[~own]
            line = _pieces(offset + region.begin % 128, width, 128)
            since, written = region.line_cached[line], region.line_written[line]
            stale = (since >= max(self._emptied, 1)) & (since < written)
            if stale.any():
                raise Unordered(f"reads {region.name} as L1 may have it from before {self.names[int(written.max())]}")
            region.line_cached[line] = np.where(since >= max(self._emptied, 1), since, now)

    def write(self, region: Region, offset: Lanes, width: int) -> None:
        """Note a write."""
        now = len(self.names) - 1
        region.written[_pieces(offset, width, 4)] = now
        region.line_written[_pieces(offset + region.begin % 128, width, 128)] = now


def _pieces(offset: Lanes, width: int, size: int) -> Lanes:
    """The numbers of the pieces of `size` bytes in which bytes [offset, offset + width) lie; width <= 16."""
    step = np.arange(0, width, min(width, size))
    return ((offset[:, None] + step) // size).reshape(-1)
