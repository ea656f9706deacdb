"""What the scheduler and the ranks say to each other about pages in host memory."""

from __future__ import annotations

from typing import Final

import msgspec

MOST_SAVES: Final = 2
"""Saves under way at once: ranks have staging memory for as many."""


class Moves(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copies of whole pages, of all caches of a rank, between the device and host memory: saves or loads, never both.

    Each rank takes it in order with the step plans. Pages to save are complete, and hold what they hold until a later
    plan overwrites them. Pages to load are nobody else's: no plan has them before every rank has answered.
    """

    ticket: int
    """Names it; each rank answers with one `Moved`."""
    saves: tuple[tuple[int, int], ...] = ()
    """Page, and the slot of host memory that it is copied to."""
    loads: tuple[tuple[int, int], ...] = ()
    """Slot of host memory, and the page that it is copied to."""


class Moved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank is done with a `Moves`."""

    rank: int
    ticket: int
    lost: bool = False
    """Nobody knows what the copies hold: they are not to be used."""
    seconds: float = 0.0
    """That the copies took."""
