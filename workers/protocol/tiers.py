"""What the scheduler and the ranks say to each other about pages in host memory and on disk."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

MOST_SAVES: Final = 2
"""Saves under way at once: ranks have staging memory for as many."""


def saver_of(slot: int, shards: int, savers: int) -> int:
    """Return which of the `savers` ranks that have a page copies it to this slot of host memory.

    Both slots and shards mostly go up by one from a page to the next. So slots are counted in rounds of `shards`:
    otherwise some of the ranks with a shard would copy all of its pages, where one number divides the other.
    """
    return slot // shards % savers


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


class Pinned(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How far a rank of a GPU has come with pinning host memory. What is not pinned yet, or cannot be, is not used."""

    rank: int
    slots: int
    """The first so many slots can be copied to and from; more and more of them."""


class DiskPage(msgspec.Struct, frozen=True, array_like=True):
    """A page on disk, as its header there names it, and the slot of host memory that it is copied from or to."""

    slot: int
    """On disk."""
    host: int
    key: bytes
    parent: bytes
    """Key of the page that it continues; empty where it is the first of its prompts."""
    number: int
    """Of its prompts' pages, where 1 is the first."""
    tokens: bytes
    """Packed as in `workers.protocol.request`."""
    serial: int = 0
    """Grows from one page that is saved to the next, in later processes, too."""


class DiskMoves(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Copies of whole pages between host memory and the disk: saves, loads or erasures, one of the three.

    Nobody writes a slot of host memory that is saved, and nobody reads or writes one that is loaded, before every rank
    has answered. Slots on disk are named by one message at a time.
    """

    ticket: int
    """Names it; each rank answers with one `DiskMoved`."""
    saves: tuple[DiskPage, ...] = ()
    loads: tuple[DiskPage, ...] = ()
    erased: tuple[int, ...] = ()
    """Slots on disk that nobody is to find any more, not even after another start."""


class DiskMoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A rank is done with a `DiskMoves`."""

    rank: int
    ticket: int
    bad: tuple[int, ...] = ()
    """Slots on disk that were not written, or do not hold what they should."""
    seconds: float = 0.0
    """That the copies took."""
    off: bool = False
    """Whether this rank uses the disk no more: it has failed."""


class DiskFound(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Pages that were on the disk at the start, from rank 0, some at a time."""

    packed: bytes
    """Entries of `FOUND`, each behind the one that it continues."""
    last: bool
    """Whether these are the last ones."""


FOUND: Final = struct.Struct("<IIIQ16s16s")
"""Slot, number, check of the tokens (`check_of`), serial, key, and key of the page before (zeros: there is none)."""


def check_of(tokens: bytes) -> int:
    """Return 32 bits by which packed tokens of a page are told from others: beside its key, and without a look at the
    disk."""
    return zlib.crc32(tokens)
