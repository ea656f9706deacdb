"""Where rows get their pages: free ones of the pool, and where there is none, those that only the prefix cache holds.

These are evicted in their order, the least recently used first, until a page that is wanted is free. Where rows' pieces
go round the ranks that share out the cache, a page of one owner is wanted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kernels.page import NULL_PAGE, PAGE_TOKENS
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix_summary import Entry


@dataclass(slots=True)
class RowPages:
    """The pages of one row, in table order, each held once by the row."""

    pages: list[int] = field(default_factory=list)
    chain: list[Entry] = field(default_factory=list)
    """Entries of the row's complete pages. Where another row was first with the same tokens, that row's entry, which
    has another page."""
    duplicates: bool = False
    """Whether `chain` names pages that are not the row's."""

    @property
    def capacity(self) -> int:
        """Cache entries that the pages hold."""
        return len(self.pages) * PAGE_TOKENS


class PageSupply:
    """Gives rows pages, evicting cached ones if need be."""

    def __init__(self, pool: PagePool, forget: Callable[[Sequence[Entry]], None]) -> None:
        """`forget`: hears which entries are evicted, whose pages are given away."""
        self._pool = pool
        self._forget = forget
        self.unheld: OrderedDict[int, Entry] = OrderedDict()
        """Entries that only the prefix cache holds, by page, the next to be evicted first."""

    @property
    def available(self) -> int:
        """Pages that could be taken now: free ones and those that only the cache holds."""
        return self._pool.free_count + len(self.unheld)

    def needed(self, found: Sequence[Entry], pages: int) -> int:
        """Return the number of available pages that a row of `pages` pages uses up if `found` are its first pages."""
        return pages - len(found) + sum(entry.page in self.unheld for entry in found)

    def has_room(self, found: Sequence[Entry], pages: int, left_over: int, growing: Sequence[RowPages] = ()) -> bool:
        """Whether a row of `pages` pages, the first of which are `found`, finds the others, and so many are left over.
        `growing`: rows that those are for, the last ones, as far as it matters whose pages they are."""
        pool = self._pool
        if not pool.in_pieces:
            return self.needed(found, pages) + left_over <= self.available
        spare = [-(-(left_over - len(growing)) // pool.owners)] * pool.owners
        for row in growing:
            spare[pool.owner_of(row.pages[0], len(row.pages))] += 1
        for entry in found:
            spare[pool.owner(entry.page)] += entry.page in self.unheld
        owner = pool.owner(found[0].page) if found else pool.begin(pages)
        return pool.has(owner, len(found), pages - len(found), spare)

    def can_extend(self, row: RowPages, count: int) -> bool:
        """Whether `count` more pages for the row are available."""
        if not self._pool.in_pieces or not row.pages:
            return count <= self.available
        return self._pool.has(self._pool.owner(row.pages[0]), len(row.pages), count)

    def extend(self, row: RowPages, count: int) -> tuple[int, ...]:
        """`count` more pages for the row, evicting cached ones if need be; they must be available (`can_extend`)."""
        if self._pool.in_pieces:
            return self._extend_in_pieces(row, count)
        return self._extend(row, count, row.pages[-1] if row.pages else NULL_PAGE)

    def begin(self, row: RowPages, count: int, *, overwritten: bool, scattered: bool) -> None:
        """Give a new row `count` pages behind those that it shares. `overwritten`, `scattered`: see
        `PrefixCache.open`."""
        if self._pool.in_pieces and not scattered:
            self._extend_in_pieces(row, count, overwritten=overwritten)
        else:
            self._extend(row, count, NULL_PAGE, overwritten=overwritten)

    def _extend(self, row: RowPages, count: int, after: int, *, overwritten: bool = False) -> tuple[int, ...]:
        """`after`: see `PagePool.take`, for the first of them; each of the others follows the one before."""
        if count > self.available:
            raise RuntimeError(f"{count} pages wanted, {self.available} available: the scheduler must ask first")
        evicted: list[Entry] = []
        while self._pool.free_count < count:
            page, entry = self.unheld.popitem(last=False)
            evicted.append(entry)
            self._pool.free(page)
        self._forget(evicted)
        taken: list[int] = []
        for _ in range(count):
            after = self._pool.take(after, overwritten=overwritten)
            taken.append(after)
        row.pages.extend(taken)
        return tuple(taken)

    def _extend_in_pieces(self, row: RowPages, count: int, *, overwritten: bool = False) -> tuple[int, ...]:
        """As `_extend`, each page of the owner whose turn it is. So that a page is still evicted before the one it
        continues, those of other owners are evicted that come before one of his."""
        if not count:
            return ()
        pool, begun = self._pool, len(row.pages)
        first = pool.owner(row.pages[0]) if begun else pool.begin(count)
        if not pool.has(first, begun, count):
            raise RuntimeError(f"an owner has too few of {count} pages: the scheduler must ask first")
        for column in range(begun, begun + count):
            owner = pool.owner_of(row.pages[0], column) if column else first
            evicted: list[Entry] = []
            while not pool.has_free(owner):
                page, entry = self.unheld.popitem(last=False)
                evicted.append(entry)
                pool.free(page)
            self._forget(evicted)
            row.pages.append(pool.take(owner=owner, overwritten=overwritten))
        return tuple(row.pages[begun:])
