"""The pool of cache pages: which are free, and how many rows hold each of the others; and where rows get theirs.

Rows get free pages of the pool, and where there is none, those that only the prefix cache holds. These are evicted in
their order, the least recently used first, until a page that is wanted is free. Where ranks share out the cache, a page
of one owner is wanted; and where rows' pieces go round these ranks without exceptions, no other will do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kernels.page import NULL_PAGE, PAGE_TOKENS, PIECE_PAGES, GlobalPage, Shards
from workers.scheduler.prefix_summary import Entry

SPARE: Final = 8
"""Most pages for every rank that shares out the cache, beyond those that are needed, that are evicted so that a row
gets a page of the owner whose turn it is. Otherwise a full cache would hand out pages of whatever owner its order of
eviction has, and ranks would read more or less than their share of the rows."""
SPARE_PART: Final = 128
"""And no more than one in so many of the cache's pages."""


class PagePool:
    """Pages 1 ... pages - 1, by their global ids, each free, or held by rows, or unheld but kept (by the prefix cache,
    for reuse).

    A page that no row holds is either in the free list or somebody else's (`drop` says that it became unheld, `free`
    puts it back). Pages may be given to another row as soon as they are free, although steps in flight still use them
    for their former row: workers execute plans in order, so the new row's writes come after.

    Where ranks share out the cache, a row's pages lie on them in turns, so that all read about as much of every row.
    Rows behind one prompt begin where most is available, and not all on the same rank. In invariant mode a row's pieces
    (`kernels.page.PIECE_PAGES`) go round the ranks without exceptions: who takes a page says whose it is to be.
    """

    def __init__(self, pages: int, shards: int = 1, *, in_pieces: bool = False) -> None:
        """A pool of `pages` pages, the null page included, which is never given out. `shards`: ranks that share them
        out. `in_pieces`: whether rows' pieces go round these without exceptions."""
        self.total = pages - 1
        self.in_pieces = in_pieces and shards > 1
        self._shards = Shards(shards)
        self._free = [list(range(pages - 1 - (pages - 2 - owner) % shards, 0, -shards)) for owner in range(shards)]
        self._free_count = self.total
        self._available = [len(free) for free in self._free]
        """Of every owner the pages that no row holds, free ones and others."""
        self._holders = [0] * pages
        self._suspect: set[int] = set()
        self._zero_fill: list[int] = []

    @property
    def free_count(self) -> int:
        """Pages in the free list."""
        return self._free_count

    def holders(self, page: int) -> int:
        """Rows that have this page in their table."""
        return self._holders[page]

    @property
    def owners(self) -> int:
        """Ranks that share out the pages."""
        return self._shards.count

    def owner_of(self, first: int, column: int) -> int:
        """The owner of page number `column` of a row whose first page this is, where pieces go round."""
        return (self._shards.owner(first) + column // PIECE_PAGES) % self._shards.count

    def fits_behind(self, first: int, column: int, page: int) -> bool:
        """Whether a page may be number `column` of a row whose first page this is."""
        return not self.in_pieces or self._shards.owner(page) == self.owner_of(first, column)

    def begin(self, count: int) -> int:
        """The owner with whom a row of `count` pages is to begin, where pieces go round: of those with whom most is
        left of every owner's pages, the first."""

        def least_left(owner: int) -> int:
            needed = self._shards.in_turns(owner, 0, count)
            return min(left - some for left, some in zip(self._available, needed, strict=True))

        return max(range(self._shards.count), key=least_left)

    def has(self, owner: int, column: int, count: int, spare: Sequence[int] = ()) -> bool:
        """Whether every owner has its part of `count` more pages of a row, from its page number `column` on, and these
        `spare` ones besides. `owner`: that of the row's first page."""
        needed = self._shards.in_turns(owner, column, count)
        return all(
            some + more <= left
            for some, more, left in zip(needed, spare or [0] * len(needed), self._available, strict=True)
        )

    def has_free(self, owner: int) -> bool:
        """Whether a page of this owner is in the free list."""
        return bool(self._free[owner])

    def owner(self, page: int) -> int:
        """The owner of a page."""
        return self._shards.owner(page)

    def wanted(self, after: int) -> int:
        """The owner who is to have the page behind page `after` of a row's table: the neighbour of that one's; behind
        the null page whoever has most available pages."""
        return self._shards.owner(after + 1) if after else self._available.index(max(self._available))

    def take(self, after: int = NULL_PAGE, *, owner: int | None = None, overwritten: bool = False) -> GlobalPage:
        """A free page, now held once. `after`: the page that it follows in the row's table, which says whose page is
        `wanted`; an owner without free pages is passed over. `owner`: whose page it is to be, in place of that.
        `overwritten`: all of the page will be, so that nothing needs to be zeroed."""
        if not self._free_count:
            raise IndexError("no page is free")
        owners = len(self._free)
        if owner is None:
            owner = self.wanted(after)
            while not self._free[owner]:
                owner = (owner + 1) % owners
        page = GlobalPage(self._free[owner].pop())
        assert self._holders[page] == 0, f"page {page} was free and held"
        self._holders[page] = 1
        self._free_count -= 1
        self._available[owner] -= 1
        if page in self._suspect:
            self._suspect.remove(page)
            if not overwritten:
                self._zero_fill.append(page)
        return page

    def mark_suspect(self, page: int) -> None:
        """Mark a page whose contents may not be finite: it must be zeroed before another request gets it."""
        self._suspect.add(page)

    def to_zero_fill(self) -> tuple[int, ...]:
        """Pages taken since the last call that must be zeroed before whoever has them now uses them."""
        pages = tuple(dict.fromkeys(self._zero_fill))
        self._zero_fill.clear()
        return pages

    def hold(self, page: int) -> None:
        """Count one more row that has this page."""
        if self._holders[page] == 0:
            self._available[self._shards.owner(page)] -= 1
        self._holders[page] += 1

    def drop(self, page: int) -> bool:
        """Count one row less that has this page. Return True when that was the last."""
        left = self._holders[page] - 1
        assert left >= 0, f"page {page} was dropped more often than held"
        self._holders[page] = left
        if left == 0:
            self._available[self._shards.owner(page)] += 1
        return left == 0

    def free(self, page: int) -> None:
        """Put an unheld page back."""
        assert self._holders[page] == 0, f"page {page} is held and cannot be free"
        self._free[self._shards.owner(page)].append(page)
        self._free_count += 1


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
        pool, taken, spare = self._pool, list[int](), self._spare
        self._evict_until(lambda: pool.free_count >= count)
        for left in range(count, 0, -1):
            if spare and not pool.has_free(owner := pool.wanted(after)):
                self._evict_for(owner, left + spare)
            after = pool.take(after, overwritten=overwritten)
            taken.append(after)
        row.pages.extend(taken)
        return tuple(taken)

    @property
    def _spare(self) -> int:
        """Pages that are evicted at the most, beyond those that are needed, for one of an owner's."""
        owners = self._pool.owners
        return min(SPARE * owners, self._pool.total // SPARE_PART) if owners > 1 else 0

    def _evict_for(self, owner: int, most: int) -> None:
        """Evict cached pages until one of this owner's is free, or so many pages are."""
        pool = self._pool
        self._evict_until(lambda: pool.has_free(owner) or pool.free_count >= most)

    def _evict_until(self, done: Callable[[], bool]) -> None:
        """Evict cached pages, in their order, until it is `done` or there is none."""
        evicted: list[Entry] = []
        while self.unheld and not done():
            page, entry = self.unheld.popitem(last=False)
            evicted.append(entry)
            self._pool.free(page)
        if evicted:
            self._forget(evicted)

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
            self._evict_for(owner, pool.total + 1)
            row.pages.append(pool.take(owner=owner, overwritten=overwritten))
        return tuple(row.pages[begun:])
