"""Which entries of the prefix cache have a snapshot of rings beside them (`workers.cache.snapshots`).

Where layers keep something of a row's newest tokens in its slot, a prompt can only begin behind a cached page that has
a snapshot. A snapshot takes as much as hundreds of tokens do, so there is a bounded number of them, and they are made
at two places of a prompt alone:

- **its last boundary**: whoever repeats the prompt, or goes on behind it, begins there;
- **where it leaves what is cached**: what many prompts begin with has a snapshot at its end from the second of them on.

A boundary is a number of tokens at which pages and all compressed entries end. A chunk of the prompt ends there, and
rings are copied behind its step: so no token of a draft that may be rejected is in them. Who finds the entry in a later
plan gets the copy before its own first step; workers execute plans in order, so it is there by then.

The least recently used snapshot makes room for a new one, and what is forgotten of the prefix cache takes its snapshot
with it. The soundness of a snapshot is its own (`workers.scheduler.results`): its entry may be vouched for by rows
that have read the page, and not the snapshot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kernels.page import PAGE_TOKENS
from workers.scheduler.prefix_summary import Entry


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a row's rings."""

    number: int
    """Its place in the workers' memory; -1 once it is gone."""
    entry: Entry | None = None
    """The entry that ends where it was made; None while nobody can find it."""
    sound: bool = False
    """Whether a row that had it in its rings has sampled from finite logits."""


class Snapshots:
    """Hands out the memory of snapshots and finds them."""

    def __init__(self, count: int, tokens: int) -> None:
        """`count` snapshots at most, each at a multiple of `tokens` tokens, which end a page."""
        self._free = list(range(count - 1, -1, -1))
        self._of: OrderedDict[Entry, Snapshot] = OrderedDict()  # least recently used first
        self._pages = tokens // PAGE_TOKENS

    @property
    def held(self) -> int:
        """Snapshots that can be found."""
        return len(self._of)

    def boundary(self, tokens: int) -> int:
        """The last boundary within so many tokens, in tokens."""
        unit = self._pages * PAGE_TOKENS
        return tokens // unit * unit

    def usable(self, found: Sequence[Entry]) -> int:
        """How many of these entries of a prefix a row can begin behind: up to the last that has a snapshot."""
        for pages in range(len(found) // self._pages * self._pages, 0, -self._pages):
            if found[pages - 1] in self._of:
                return pages
        return 0

    def use(self, entry: Entry) -> Snapshot:
        """The snapshot of an entry that has one, for a row that begins behind it."""
        self._of.move_to_end(entry)
        return self._of[entry]

    def take(self) -> Snapshot | None:
        """Memory for a new one, if need be that of the least recently used; None where all is being written in this
        plan."""
        if not self._free and self._of:
            self.drop(next(iter(self._of.values())))
        return Snapshot(self._free.pop()) if self._free else None

    def attach(self, snapshot: Snapshot, entry: Entry | None) -> None:
        """Let a snapshot that is made by now be found at an entry; without one, or where that has one, it goes."""
        if entry is None or entry in self._of:
            self.drop(snapshot)
            return
        snapshot.entry = entry
        self._of[entry] = snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Give its memory back, unless that was done."""
        if snapshot.number < 0:
            return
        if snapshot.entry is not None:
            del self._of[snapshot.entry]
        self._free.append(snapshot.number)
        snapshot.number, snapshot.entry = -1, None

    def forget(self, entries: Sequence[Entry]) -> None:
        """Drop those of entries that are cached no more."""
        for entry in entries:
            if (snapshot := self._of.get(entry)) is not None:
                self.drop(snapshot)
