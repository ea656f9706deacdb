"""Summary of a replica's prefix cache for routers: a bounded choice of keys, enough to tell how much of any prompt is
cached.

Cached entries form trees: an entry is only found behind the one that it continues. A router hashes a prompt into the
keys of its pages, and the deepest of them that is reported vouches for all pages before it. So few keys are needed:

- **Ends**: entries that nothing continues. They vouch for whole prompts and whole sessions, exactly.
- **Branch points**: entries that several others continue, such as the last page of a common system prompt. They vouch
  exactly for what a new session shares with old ones.
- **A grid**: entries whose page number, counted from the start of their prompt, is a multiple of some stride. A prompt
  may leave a cached one where nothing else has left it yet: a chat whose template drops the reasoning of its last turn,
  a message that was edited, a prompt of which the router knows the beginning only. It is credited up to the last
  multiple of the stride. Long prompts are cached in one piece, so a stride of a thousand tokens loses little.

Ends and branch points are kept in the order of their last use. The most recent of them fill up to half of the report,
or another share where that is asked for; the grid fills the rest, from coarse strides to fine ones, the newest entries
of the finest first; what is left is for older ends. A cache of fewer entries than the bound is reported whole.

All of it is kept up to date entry by entry: no report looks at more keys than it names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise


@dataclass(slots=True, eq=False)
class Entry:
    """A cached page: what it holds, and the entry it continues (None for the first page of a prompt)."""

    key: bytes
    tokens: bytes
    parent: Entry | None
    page: int
    sound: bool = False
    """A row that reads this page has sampled a token from finite logits, so all that the page holds is finite."""
    doubted: bool = False
    """Whether it was forgotten because a non-finite row had written or read it. Rows that had it before still have
    it."""
    children: int = 0
    """Cached entries that continue it."""
    child: Entry | None = None
    """One of them."""
    others: dict[Entry, None] | None = None
    """The rest, where there were several."""
    level: int = -1
    """Level in the grid: the number of times that its page number, in units of the finest stride, can be halved; -1 off
    the grid."""
    copy: Copy | None = None
    """Of a page of the device: the same page in host memory, where it was saved there or loaded from there."""


@dataclass(slots=True, eq=False)
class Copy(Entry):
    """A page in host memory (`workers.scheduler.host_tier`). `page` is its slot there."""

    used: int = 0
    """When it was used last, counted in uses."""
    pins: int = 0
    """Tickets under way that read or write it."""
    written: bool = False
    """All ranks have written it."""
    gone: bool = False
    """It was forgotten. Its slot is free once no ticket pins it."""
    number: int = 0
    """Of its prompts' pages, where 1 is the first."""
    on_disk: int = 0
    """When it was put on disk, as `DiskIndex.born` has it; 0: not known to be there."""


class PrefixSummary:
    """Knows the ends, the branch points and the grid of the entries of a cache, and what continues each of them.

    Entries refer to those that continue them only while these are cached, so that no entry that is gone waits for the
    collector of cyclic garbage.
    """

    def __init__(self, entries: Mapping[bytes, Entry], pages: int, most: int, ends: float = 0.5) -> None:
        """`entries`: those of the cache, by key, which it keeps up to date itself. `pages`: as many as there can be.
        `most`: keys in a report. `ends`: the share of them that is for ends and branch points before any of the
        grid."""
        self._entries = entries
        self._most = most
        self._most_ends = math.ceil(ends * most)
        self._stride = 1 << max((pages // max(most, 1)).bit_length() - 1, 0)
        """The finest: it puts no more than two times `most` of `pages` entries on the grid."""
        self._ends: OrderedDict[bytes, None] = OrderedDict()  # and branch points; most recently used last
        self._grid: list[dict[bytes, None]] = []  # by level
        self._orphans: dict[Entry, None] = {}  # cached, and what they continue is not: pages of rows with twins

    def add(self, entries: Sequence[Entry], number: int) -> None:
        """Add entries that were cached, each of which continues the one before it: the first as page `number` of its
        prompt, where 1 is the first. Of many at once only the last becomes an end."""
        if not entries:
            return
        if (parent := entries[0].parent) is not None:
            self._continued(parent, entries[0])
            if self._entries.get(parent.key) is not parent:
                self._orphans[entries[0]] = None
        for entry, after in pairwise(entries):
            entry.children = 1
            entry.child = after
        self._ends[entries[-1].key] = None
        for index in range(-number % self._stride, len(entries), self._stride):
            entry, steps = entries[index], (number + index) // self._stride
            entry.level = (steps & -steps).bit_length() - 1
            while len(self._grid) <= entry.level:
                self._grid.append({})
            self._grid[entry.level][entry.key] = None

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove entries that are not cached any more. A chain is quickest from its end to its beginning."""
        first: list[Entry] = []  # those removed of which the one before was not, so far
        for entry in entries:
            if first and first[-1].parent is entry:
                _unlink(entry, first.pop())
            if entry.children != 1:
                self._ends.pop(entry.key, None)
            if entry.level >= 0:
                del self._grid[entry.level][entry.key]
            if entry.parent is not None:
                first.append(entry)
        for entry in first:
            assert entry.parent is not None
            self._left(entry.parent, entry)
        if self._orphans:
            for entry in entries:
                self._orphans.pop(entry, None)
        for entry in entries:
            if entry.child is not None:
                self._orphans.update(dict.fromkeys(_after(entry)))

    def behind(self, entry: Entry) -> list[Entry]:
        """This cached entry and all that continue it, each before the one that it continues. Takes no more time than
        there are such, but for entries whose beginning was evicted before them."""
        found = _tree(entry)
        if self._orphans:
            inside = set(found)
            for orphan in [*self._orphans]:
                if orphan not in inside and any(one in inside for one in _before(orphan)):
                    more = _tree(orphan)
                    inside.update(more)
                    found += more
        return found[::-1]

    def move(self, entry: Entry, parent: Entry | None) -> None:
        """A cached entry continues another one of the same key from now on: the one that it continued is gone."""
        if entry.parent is not parent:
            if entry.parent is not None:
                self._left(entry.parent, entry)
            self._orphans.pop(entry, None)
            entry.parent = parent
            if parent is not None:
                self._continued(parent, entry)

    def use(self, found: Sequence[Entry]) -> None:
        """A prompt begins with these cached entries."""
        for entry in found:
            if entry.children != 1:
                self._ends.move_to_end(entry.key)

    def report(self) -> list[bytes]:
        """Keys of entries that are cached now, each once."""
        if len(self._entries) <= self._most:
            return list(self._entries)
        recent = reversed(self._ends)
        keys = dict.fromkeys(islice(recent, self._most_ends))
        grid = chain.from_iterable(map(reversed, reversed(self._grid)))
        for key in chain(grid, recent):
            if len(keys) >= self._most:
                break
            keys[key] = None
        return list(keys)

    def _continued(self, parent: Entry, entry: Entry) -> None:
        _link(parent, entry)
        parent.children += 1
        if parent.children <= 2 and self._entries.get(parent.key) is parent:
            if parent.children == 1:
                del self._ends[parent.key]
            else:
                self._ends[parent.key] = None

    def _left(self, parent: Entry, entry: Entry) -> None:
        _unlink(parent, entry)
        parent.children -= 1
        if parent.children <= 1 and self._entries.get(parent.key) is parent:
            if parent.children == 1:
                del self._ends[parent.key]
            else:
                # Entries are evicted least recently used first, so this end is older than all others.
                self._ends[parent.key] = None
                self._ends.move_to_end(parent.key, last=False)


def _link(parent: Entry, entry: Entry) -> None:
    if parent.child is None:
        parent.child = entry
    elif parent.others is None:
        parent.others = {entry: None}
    else:
        parent.others[entry] = None


def _unlink(parent: Entry, entry: Entry) -> None:
    if parent.child is not entry:
        assert parent.others is not None
        del parent.others[entry]
    elif parent.others:
        parent.child, _ = parent.others.popitem()
    else:
        parent.child = None


def _after(entry: Entry) -> Iterator[Entry]:
    """The cached entries that continue it."""
    if entry.child is not None:
        yield entry.child
    yield from entry.others or ()


def _before(entry: Entry) -> Iterator[Entry]:
    """The entries that it continues, cached or not, the last one first."""
    while (parent := entry.parent) is not None:
        yield parent
        entry = parent


def _tree(entry: Entry) -> list[Entry]:
    """An entry and all that continue it, each behind the one that it continues."""
    found = [entry]
    for one in found:
        found.extend(_after(one))
    return found
