"""What a replica tells routers of its prefix cache: a bounded choice of keys, enough to say how much of any prompt is
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

Ends and branch points are kept in the order of their last use. The most recent of them fill up to half of the report;
the grid fills the rest, from coarse strides to fine ones, the newest entries of the finest first; what is left is for
older ends. A cache of fewer entries than the bound is reported whole.

All of it is kept up to date entry by entry: no report looks at more keys than it names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice


@dataclass(slots=True, eq=False)
class Entry:
    """A cached page: what it holds, and the entry it continues (None for the first page of a prompt)."""

    key: int
    tokens: bytes
    parent: Entry | None
    page: int
    sound: bool = False
    """A row that reads this page has sampled a token from finite logits, so all that the page holds is finite."""
    doubted: bool = False
    """It was forgotten because a non-finite row had written or read it. Rows that had it before still have it."""
    children: int = 0
    """Cached entries that continue it."""
    level: int = -1
    """Of the grid: how often its page number, in units of the finest stride, can be halved; -1 off the grid."""


class PrefixSummary:
    """Knows the ends, the branch points and the grid of the entries of a cache."""

    def __init__(self, entries: Mapping[int, Entry], pages: int, most: int) -> None:
        """`entries`: those of the cache, by key, which it keeps up to date itself. `pages`: as many as there can be.
        `most`: keys in a report."""
        self._entries = entries
        self._most = most
        self._stride = 1 << max((pages // max(most, 1)).bit_length() - 1, 0)
        """The finest: it puts no more than two times `most` of `pages` entries on the grid."""
        self._ends: OrderedDict[int, None] = OrderedDict()  # and branch points; most recently used last
        self._grid: list[dict[int, None]] = []  # by level

    def add(self, entries: Sequence[Entry], number: int) -> None:
        """These were cached, each of which continues the one before it: the first as page `number` of its prompt, where
        1 is the first. Of many at once only the last becomes an end."""
        if not entries:
            return
        if (parent := entries[0].parent) is not None:
            self._continued(parent)
        for entry in entries[:-1]:
            entry.children = 1
        self._ends[entries[-1].key] = None
        for index in range(-number % self._stride, len(entries), self._stride):
            entry, steps = entries[index], (number + index) // self._stride
            entry.level = (steps & -steps).bit_length() - 1
            while len(self._grid) <= entry.level:
                self._grid.append({})
            self._grid[entry.level][entry.key] = None

    def remove(self, entries: Sequence[Entry]) -> None:
        """These are not cached any more. A chain is quickest from its end to its beginning."""
        beginning: list[Entry] = []  # continued by one that was removed
        for entry in entries:
            if beginning and beginning[-1] is entry:
                beginning.pop()
            if entry.children != 1:
                self._ends.pop(entry.key, None)
            if entry.level >= 0:
                del self._grid[entry.level][entry.key]
            if (parent := entry.parent) is not None:
                beginning.append(parent)
        for entry in beginning:
            self._left(entry)

    def move(self, entry: Entry, parent: Entry | None) -> None:
        """A cached entry continues another one of the same key from now on: the one that it continued is gone."""
        if entry.parent is not parent:
            if entry.parent is not None:
                self._left(entry.parent)
            entry.parent = parent
            if parent is not None:
                self._continued(parent)

    def use(self, found: Sequence[Entry]) -> None:
        """A prompt begins with these cached entries."""
        for entry in found:
            if entry.children != 1:
                self._ends.move_to_end(entry.key)

    def report(self) -> list[int]:
        """Keys of entries that are cached now, each once."""
        if len(self._entries) <= self._most:
            return list(self._entries)
        recent = reversed(self._ends)
        keys = dict.fromkeys(islice(recent, self._most - self._most // 2))
        grid = chain.from_iterable(map(reversed, reversed(self._grid)))
        for key in chain(grid, recent):
            if len(keys) >= self._most:
                break
            keys[key] = None
        return list(keys)

    def _continued(self, parent: Entry) -> None:
        parent.children += 1
        if parent.children <= 2 and self._entries.get(parent.key) is parent:
            if parent.children == 1:
                del self._ends[parent.key]
            else:
                self._ends[parent.key] = None

    def _left(self, parent: Entry) -> None:
        parent.children -= 1
        if parent.children <= 1 and self._entries.get(parent.key) is parent:
            if parent.children == 1:
                del self._ends[parent.key]
            else:
                # Entries are evicted least recently used first, so this end is older than all others.
                self._ends[parent.key] = None
                self._ends.move_to_end(parent.key, last=False)
