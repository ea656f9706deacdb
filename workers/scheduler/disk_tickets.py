"""Copies under way between host memory and disk: what ranks were told, and what they have answered.

Each rank answers each ticket. None of it blocks anybody: a ticket that is never answered costs its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from workers.protocol.tiers import DiskMoved, DiskMoves, DiskPage
from workers.scheduler.host_tier import TierCounters
from workers.scheduler.prefix_summary import Copy
from workers.scheduler.read_pace import LONGEST_S
from workers.scheduler.sequence import Sequence as Row


@dataclass(slots=True, eq=False)
class DiskTicket:
    """Copies under way between host memory and disk."""

    number: int
    missing: set[int]
    """Ranks that have not answered."""
    slots: list[int]
    """On disk."""
    begun: float
    copies: list[Copy] = field(default_factory=list)
    """In host memory, slot by slot: read by saves, written by loads."""
    loads: bool = False
    behind: int = 0
    """Pages of loads that were under way before."""
    bad: set[int] = field(default_factory=set)
    """Slots on disk whose pages are not to be used."""
    unread: set[int] = field(default_factory=set)
    """Slots whose pages a rank that has given up its disk did not read: they are as good as they were."""
    seconds: float = 0.0
    """That the slowest rank took."""
    waiting: dict[Row, None] = field(default_factory=dict)
    """Requests that wait for it."""


@dataclass(slots=True)
class DiskCounters(TierCounters):
    """Those of a disk, between it and host memory."""

    late: int = 0
    """Prompts that were computed because the disk took longer than that takes."""


class DiskTickets:
    """The tickets under way. It sends nothing: `take_moves` has what ranks must be told."""

    def __init__(self, ranks: int, clock: Callable[[], float]) -> None:
        """`ranks`: all of them answer each ticket."""
        self._ranks, self._clock = ranks, clock
        self.under_way: dict[int, DiskTicket] = {}
        """By number, those that were begun first in front."""
        self._numbers = count(1)
        self._heard: dict[tuple[int, bool], float] = {}
        """When a rank last answered, by its number and whether that was a load."""
        self._outbox: list[DiskMoves] = []

    @property
    def loads(self) -> Iterator[DiskTicket]:
        """Those that read from the disk."""
        return (ticket for ticket in self.under_way.values() if ticket.loads)

    @property
    def reading(self) -> int:
        """Pages that are being read."""
        return sum(len(ticket.slots) for ticket in self.loads)

    def take_moves(self) -> list[DiskMoves]:
        """What every rank must be told now; each is given once."""
        moves, self._outbox = self._outbox, []
        return moves

    def begin_saves(self, slots: list[int], copies: list[Copy], serials: Iterator[int]) -> None:
        """Have pages of host memory written to these slots. `serials`: as `DiskPage` has them."""
        pages = [_page(slot, copy, next(serials)) for slot, copy in zip(slots, copies, strict=True)]
        ticket = self.begin(slots, copies)
        self._outbox.append(DiskMoves(ticket.number, saves=tuple(pages)))

    def begin_loads(self, slots: list[int], copies: list[Copy]) -> DiskTicket:
        """Have pages of these slots read into host memory."""
        behind = self.reading
        ticket = self.begin(slots, copies)
        ticket.loads, ticket.behind = True, behind
        pages = [_page(slot, copy) for slot, copy in zip(slots, copies, strict=True)]
        self._outbox.append(DiskMoves(ticket.number, loads=tuple(pages)))
        return ticket

    def begin_erasures(self, slots: list[int]) -> None:
        """Have the headers of these slots erased."""
        ticket = self.begin(slots, [])
        self._outbox.append(DiskMoves(ticket.number, erased=tuple(slots)))

    def begin(self, slots: list[int], copies: list[Copy]) -> DiskTicket:
        """A new ticket."""
        number = next(self._numbers)
        ticket = self.under_way[number] = DiskTicket(number, set(range(self._ranks)), slots, self._clock(), copies)
        return ticket

    def moved(self, message: DiskMoved) -> DiskTicket | None:
        """Take in that a rank is done. The ticket, where it was the last one. RuntimeError for an answer that nobody
        waits for: scheduler and rank disagree."""
        ticket = self.under_way.get(message.ticket)
        if ticket is None or message.rank not in ticket.missing:
            raise RuntimeError(f"rank {message.rank} answers disk ticket {message.ticket}, which does not wait for it")
        self._heard[message.rank, ticket.loads] = self._clock()
        ticket.missing.remove(message.rank)
        (ticket.unread if message.off and ticket.loads else ticket.bad).update(message.bad)
        ticket.seconds = max(ticket.seconds, message.seconds)
        if ticket.missing:
            return None
        return self.under_way.pop(ticket.number)

    def spoil(self, slots: Iterable[int]) -> None:
        """What is read from these slots, or written to them, is not to be used."""
        spoilt = set(slots)
        for ticket in self.under_way.values():
            ticket.bad.update(spoilt.intersection(ticket.slots))

    def silent_s(self, now: float) -> float:
        """Seconds for which a rank owes answers and has given none, the longest of them. Reads and writes count apart:
        a disk may do one and not the other."""
        silent = 0.0
        for ticket in self.under_way.values():
            if now - ticket.begun <= max(silent, LONGEST_S):
                break  # as all that follow have begun later
            for rank in ticket.missing:
                heard = self._heard.get((rank, ticket.loads), ticket.begun)
                silent = max(silent, now - max(heard, ticket.begun))
        return silent


def _page(slot: int, copy: Copy, serial: int = 0) -> DiskPage:
    parent = b"" if copy.parent is None else copy.parent.key
    return DiskPage(slot, copy.page, copy.key, parent, copy.number, copy.tokens, serial)
