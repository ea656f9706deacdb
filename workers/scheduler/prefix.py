"""The prefix cache: full pages of equal token prefixes are computed once and shared.

A page is found by its key (`workers.protocol.request`), which names a whole prefix. Keys only find candidates: an entry
also keeps its tokens and the entry it continues, and both are compared, so that colliding keys cost a miss and never a
wrong page.

Which pages are complete. Workers execute plans in order, so the pages of a prompt are complete for every later plan as
soon as the chunk that fills them is planned. What is generated is known later: after a result is applied the row has
`length` cache entries of accepted tokens (all its known tokens but the newest, which is not fed yet), so page k is
complete in the target layers once 64 * (k + 1) <= length. The draft layer's entry j pairs the hidden state of token
j - 1 with token j and is written in the step that feeds token j - 1 (`PrefillRow.next_token` closes a chunk, the
sampled token a prompt or a verified row): its entries 1 ... length are written by then, one more than the target's, so
the same pages are complete there. Later steps of the row, those in flight included, write only at `length` and above
(the draft layer above `length`): a registered page is never written.

A hit of n tokens leaves at least the last prompt token to compute. With a draft layer the prefill starts at n - 1 with
write_from = n: recomputing token n - 1 gives the hidden state for the draft layer's entry n; its own target entry is
shared and not written.

Eviction: pages that only the cache holds are in least-recently-used order, and a row gives its pages up deepest first,
so a page is always evicted before the page it continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from workers.scheduler.pages import PagePool, PageSupply, RowPages
from workers.scheduler.prefix_summary import Entry, PrefixSummary
from workers.scheduler.sequence import Tokens
from workers.scheduler.snapshots import Snapshots


class Tier(Protocol):
    """Keeps copies of pages elsewhere (`workers.scheduler.host_tier`)."""

    def offer(self, entry: Entry, number: int) -> None:
        """Hear that an entry, page `number` of its prompt where 1 is the first, is complete and vouched for."""

    def evicted(self, entries: Sequence[Entry]) -> None:
        """Hear that these are not cached any more, because their pages are needed for something else."""

    def doubt(self, entries: Sequence[Entry]) -> None:
        """Hear that these may hold no numbers, and are not cached any more."""


class PrefixCache:
    """Hands out the pool's pages and keeps the complete ones for reuse until they are needed for something else."""

    def __init__(self, pool: PagePool, enabled: bool = True, reported: int = 0) -> None:
        """`reported`: keys that `report` names at the most."""
        self._pool = pool
        self._enabled = enabled
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # by key, most recently used last
        self._summary = PrefixSummary(self._entries, pool.total, reported)
        self._of_page: dict[int, Entry] = {}
        self._supply = PageSupply(pool, self._evict)
        self._unheld = self._supply.unheld
        self.tier: Tier | None = None
        """Where copies of its pages are kept."""
        self.snapshots: Snapshots | None = None
        """Snapshots of rings beside its entries, where pages alone are not enough to go on behind them."""

    @property
    def available(self) -> int:
        """Pages that could be taken now: free ones and those that only the cache holds."""
        return self._supply.available

    @property
    def free(self) -> int:
        """Pages that could be taken now and that nobody would find again."""
        return self._pool.free_count

    @property
    def cached(self) -> int:
        """Pages with an entry."""
        return len(self._entries)

    def is_cached(self, page: int) -> bool:
        """Whether other rows may find this page: then nobody may write it."""
        return page in self._of_page

    def has(self, entry: Entry) -> bool:
        """Whether the entry is still cached."""
        return self._of_page.get(entry.page) is entry

    def report(self) -> list[bytes]:
        """Keys that tell routers what is cached (`PrefixSummary`)."""
        return self._summary.report()

    def match(self, tokens: Tokens, keys: Sequence[bytes], most: int) -> list[Entry]:
        """Entries of the longest cached prefix, `most` pages at the most. `keys` are the page keys of `tokens`."""
        found: list[Entry] = []
        parent: Entry | None = None
        for index in range(most if self._enabled else 0):
            entry = self._entries.get(keys[index])
            if entry is None or entry.parent is not parent or entry.tokens != tokens.page(index):
                break
            # Another row's, which had the same tokens before it and other pages of them.
            if found and not self._pool.fits_behind(found[0].page, index, entry.page):
                break
            found.append(entry)
            parent = entry
        return found

    def needed(self, found: Sequence[Entry], pages: int) -> int:
        """Return the number of available pages that a row of `pages` pages uses up if `found` are its first pages."""
        return self._supply.needed(found, pages)

    def has_room(self, found: Sequence[Entry], pages: int, left_over: int, growing: Sequence[RowPages] = ()) -> bool:
        """Whether a row of `pages` pages, the first of which are `found`, finds the others (`PageSupply.has_room`)."""
        return self._supply.has_room(found, pages, left_over, growing)

    def can_extend(self, row: RowPages, count: int) -> bool:
        """Whether `count` more pages for the row are available."""
        return self._supply.can_extend(row, count)

    def open(
        self, found: Sequence[Entry], pages: int, *, overwritten: bool = False, scattered: bool = False
    ) -> RowPages:
        """A new row of `pages` pages, the first of them shared. The others must be there (`has_room`). `overwritten`:
        all of them will be, so that none needs to be zeroed. `scattered`: they may lie on any rank, because nobody
        attends to them as to a row; then so many must be available."""
        row = RowPages()
        for entry in found:
            self._unheld.pop(entry.page, None)
            self._pool.hold(entry.page)
            self._entries.move_to_end(entry.key)
            row.pages.append(entry.page)
        self._summary.use(found)
        row.chain.extend(found)
        self._supply.begin(row, pages - len(found), overwritten=overwritten, scattered=scattered)
        return row

    def extend(self, row: RowPages, count: int) -> tuple[int, ...]:
        """`count` more pages for the row, evicting cached ones if need be; they must be available (`can_extend`)."""
        return self._supply.extend(row, count)

    def register(self, row: RowPages, tokens: Tokens, full: int) -> None:
        """Make the first `full` pages of the row, complete with `tokens`, findable."""
        if not self._enabled or (row.chain and row.chain[-1].doubted):
            return
        cached: list[Entry] = []
        while len(row.chain) < full:
            index = len(row.chain)
            parent = row.chain[-1] if row.chain else None
            packed = tokens.page(index)
            key = tokens.key(index, packed, parent.key if parent else tokens.root)
            entry = self._entries.get(key)
            if entry is None:
                entry = Entry(key, packed, parent, row.pages[index])
                self._remember(entry)
                cached.append(entry)
            elif entry.parent is not parent or entry.tokens != packed:
                break  # a key collided: nothing behind it can be cached while the other is
            elif not self._put_in_place(row, entry):
                row.duplicates = True
            row.chain.append(entry)
        # What continues a new entry is new, too.
        self._summary.add(cached, len(row.chain) - len(cached) + 1)

    def _put_in_place(self, row: RowPages, entry: Entry) -> bool:
        """Give an entry the row's own page in place of one that no prompt finds, because it lies elsewhere than what it
        continues has it, if the row's own lies there: or all who come behind would compute it. Return whether it did.
        """
        index, pool = len(row.chain), self._pool
        if not index or pool.fits_behind(row.chain[0].page, index, entry.page):
            return False
        page = row.pages[index]
        if not pool.fits_behind(row.chain[0].page, index, page):
            return False
        del self._of_page[entry.page]
        if self._unheld.pop(entry.page, None) is not None:
            pool.free(entry.page)
        # Who still has the old page has other rows' entries before it, too: `duplicates` says so already.
        entry.page, entry.sound = page, False
        self._of_page[page] = entry
        return True

    def vouch(self, row: RowPages, first: int = 0, unread: int | None = None) -> None:
        """The row has sampled from finite logits: so the complete pages that it reads, from its `first` on, are. It has
        not read all of its page `unread` yet."""
        for index, (entry, page) in islice(enumerate(zip(row.chain, row.pages, strict=False)), first, None):
            if entry.page == page and index != unread and not entry.sound:
                entry.sound = True
                if self.tier is not None:
                    self.tier.offer(entry, index + 1)

    def distrust(self, row: RowPages) -> None:
        """The row gives its pages up before anybody can say whether it is bad: nobody gets what it alone vouches for
        without that being zeroed, though its complete pages stay to be found."""
        for page in row.pages:
            entry = self._of_page.get(page)
            if entry is None or not entry.sound:
                self._pool.mark_suspect(page)

    def mark_suspect(self, row: RowPages) -> None:
        """The row was bad: what it wrote or read for which nobody has vouched is not found any more, nor what continues
        that, and its pages are zeroed before they are taken again. The row itself must be closed next."""
        for index, page in enumerate(row.pages):
            entry = self._of_page.get(page)
            if entry is None or not entry.sound:
                self._pool.mark_suspect(page)
                if entry is not None:
                    self._doubt(entry)
            if entry is not None and not entry.sound and index < len(row.chain):
                del row.chain[index:]

    def mark_given_up_suspect(self, pages: Sequence[int]) -> None:
        """Mark pages suspect that a row has given up already, as far as nobody has them now."""
        for page in pages:
            entry = self._of_page.get(page)
            if self._pool.holders(page) == 0 and (entry is None or not entry.sound):
                self._pool.mark_suspect(page)
                if entry is not None:
                    self._doubt(entry)

    def _doubt(self, entry: Entry) -> None:
        """Forget an entry and all that continue it."""
        found = self._summary.behind(entry)
        self._forget(found)
        for one in found:
            one.doubted = True
            self._pool.mark_suspect(one.page)
            if self._unheld.pop(one.page, None) is not None:
                self._pool.free(one.page)
        if self.tier is not None:
            self.tier.doubt(found)

    def abandon(self, row: RowPages) -> None:
        """Close a row of whose own pages nobody knows what they hold."""
        for page in row.pages[len(row.chain) :]:
            self._pool.mark_suspect(page)
        self.close(row)

    def close(self, row: RowPages) -> None:
        """The row gives all its pages up, deepest first: cached ones stay for reuse, the others become free."""
        if row.duplicates:
            self._mend(row)
        for index in range(len(row.pages) - 1, -1, -1):
            page = row.pages[index]
            if self._pool.drop(page):
                entry = self._of_page.get(page)
                if entry is None:
                    self._pool.free(page)
                else:
                    self._unheld[page] = entry
            if index < len(row.chain) and (twin := row.chain[index].page) in self._unheld:
                # Keep the order when the cached page is another row's: it must outlive the pages that continue it.
                self._unheld.move_to_end(twin)
        row.pages.clear()
        row.chain.clear()

    def _mend(self, row: RowPages) -> None:
        """Mend this row's chain. Another row's entry in it may have been evicted while deeper pages of this row were
        held. This row's own pages are put in the gaps, so that every entry continues an entry that is there."""
        chain: list[Entry] = []
        parent: Entry | None = None
        for index, known in enumerate(row.chain):
            if known.doubted:
                break
            entry = self._entries.get(known.key)
            if entry is None:
                entry = Entry(known.key, known.tokens, parent, row.pages[index])
                self._remember(entry)
                self._summary.add([entry], index + 1)
            elif entry.tokens != known.tokens or (entry.parent is not parent and entry.page != row.pages[index]):
                break  # a collision took the place: what lies behind is unreachable
            self._summary.move(entry, parent)
            chain.append(entry)
            parent = entry
        behind = map(self._of_page.get, reversed(row.pages[len(chain) :]))
        self._forget([entry for entry in behind if entry is not None])
        row.chain = chain

    def _remember(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._of_page[entry.page] = entry

    def _evict(self, entries: Sequence[Entry]) -> None:
        self._forget(entries)
        if self.tier is not None:
            self.tier.evicted(entries)

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            del self._entries[entry.key]
            del self._of_page[entry.page]
        if self.snapshots is not None:
            self.snapshots.forget(entries)
        self._summary.remove(entries)
