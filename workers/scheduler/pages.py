"""The pool of cache pages: which are free, and how many rows hold each of the others."""

from __future__ import annotations

from kernels.page import NULL_PAGE


class PagePool:
    """Pages 1 ... pages - 1, each free, or held by rows, or unheld but kept (by the prefix cache, for reuse).

    A page that no row holds is either in the free list or somebody else's (`drop` says that it became unheld, `free`
    puts it back). Pages may be given to another row as soon as they are free, although steps in flight still use them
    for their former row: workers execute plans in order, so the new row's writes come after.
    """

    def __init__(self, pages: int) -> None:
        """A pool of `pages` pages, the null page included, which is never given out."""
        self.total = pages - 1
        self._free = [page for page in range(pages - 1, -1, -1) if page != NULL_PAGE]
        self._holders = [0] * pages
        self._suspect: set[int] = set()
        self._zero_fill: list[int] = []

    @property
    def free_count(self) -> int:
        """Pages in the free list."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Rows that have this page in their table."""
        return self._holders[page]

    def take(self, *, overwritten: bool = False) -> int:
        """A free page, now held once. `overwritten`: all of it will be, so that nothing needs to be zeroed."""
        page = self._free.pop()
        assert self._holders[page] == 0, f"page {page} was free and held"
        self._holders[page] = 1
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
        self._holders[page] += 1

    def drop(self, page: int) -> bool:
        """Count one row less that has this page. Return True when that was the last."""
        left = self._holders[page] - 1
        assert left >= 0, f"page {page} was dropped more often than held"
        self._holders[page] = left
        return left == 0

    def free(self, page: int) -> None:
        """Put an unheld page back."""
        assert self._holders[page] == 0, f"page {page} is held and cannot be free"
        self._free.append(page)
