"""Which pages are on disk: found by key, evicted by their last use, of which there may be millions.

Pages form trees, as those in host memory do: each continues one that is there, so what is there of a prompt has no
gaps. Nothing is an object of its own here: a slot is a place in some arrays, which takes some two hundred bytes of the
scheduler's memory, and nothing for Python's collector to look at.

A key of 128 bits names a whole prefix. Beside it 32 bits of a checksum of the page's tokens are compared, page by page
from the beginning of the prompt. The tokens themselves are in the headers on disk, and who reads a page compares them.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice
from typing import Final

from workers.protocol.tiers import check_of
from workers.scheduler.sequence import Tokens

NONE: Final = -1
"""No slot."""
GRID: Final = 16
"""Routers are told of every page whose number is a multiple of this, as far as the report holds them."""


class DiskIndex:
    """The slots of the disk, and what is in them. A slot is free, or written to, or complete, or left: then it is not
    found any more, and free once nobody has it pinned."""

    def __init__(self, slots: int, reported: int = 0) -> None:
        """`reported`: keys that `report` names at the most."""
        self.slots, self._most = slots, reported
        self._slots_of: list[dict[bytes, int]] = [{} for _ in range(256)]
        """By the first byte of a key: a dictionary of millions would take a tenth of a second when it grows."""
        self.held = 0
        """Pages that are found, and those that are being written."""
        self._key = [b""] * slots
        self._number = array("I", [0]) * slots
        """0 of a slot that holds nothing which is to be found."""
        self._check = array("I", [0]) * slots
        self._used = array("Q", [0]) * slots
        self._born = array("Q", [0]) * slots
        self._complete = bytearray(slots)
        self._parent, self._child, self._next, self._before = (array("i", [NONE]) * slots for _ in range(4))
        """Of a slot: the one that it continues, the first of those that continue it, and its neighbours among those
        that continue the same."""
        self._free = array("I")
        self._unsettled = slots
        """Slots before this one are not known to be free: `settle` says so."""
        self._pins: Counter[int] = Counter()
        self._clock = count(1)
        self._ends: list[tuple[int, int]] = []  # a heap of (used, slot), outdated ones among them
        self._recent: OrderedDict[int, None] = OrderedDict()  # where prompts ended, those used last behind
        self._grid: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots_of[key[0]]

    def slot(self, key: bytes) -> int:
        """The slot of the page of this key; `NONE` where there is none."""
        return self._slots_of[key[0]].get(key, NONE)

    def born(self, slot: int) -> int:
        """When the slot got its page, as a number that no other page has."""
        return self._born[slot]

    def agrees(self, slot: int, parent: int, tokens: bytes) -> bool:
        """Whether the page of a slot has these tokens and continues that of slot `parent`."""
        return self._parent[slot] == parent and self._check[slot] == check_of(tokens)

    def find(self, tokens: Tokens, keys: Sequence[bytes], most: int) -> list[int]:
        """Slots of the pages with which a prompt begins, `most` at the most, all of them complete."""
        found: list[int] = []
        parent = NONE
        for index in range(most):
            slot = self.slot(keys[index])
            if slot == NONE or not self._complete[slot] or not self.agrees(slot, parent, tokens.page(index)):
                break
            found.append(slot)
            parent = slot
        return found

    def take(self) -> int:
        """A free slot, if need be that of the end which was not used for longest; `NONE` where all are pinned."""
        pinned: list[tuple[int, int]] = []
        while not self._free and self._ends:
            used, slot = heappop(self._ends)
            if not self._number[slot] or self._child[slot] != NONE or self._used[slot] != used:
                continue
            if slot in self._pins:
                pinned.append((used, slot))
            else:
                self._leave(slot)
                self._free.append(slot)
        for item in pinned:
            heappush(self._ends, item)
        return self._free.pop() if self._free else NONE

    def put(self, slot: int, key: bytes, parent: int, number: int, check: int, *, complete: bool = False) -> None:
        """Let a slot that was taken hold a page, the `number`th of its prompt, which continues that of slot `parent`.
        The key must not be there. When all of several are put, `use_ends` is to be called with them."""
        self._slots_of[key[0]][key] = slot
        self.held += 1
        self._key[slot], self._number[slot], self._check[slot] = key, number, check
        self._complete[slot], self._born[slot] = complete, next(self._clock)
        self._parent[slot], self._before[slot], self._child[slot] = parent, NONE, NONE
        if parent != NONE:
            after = self._next[slot] = self._child[parent]
            if after != NONE:
                self._before[after] = slot
            self._child[parent] = slot
            self._recent.pop(parent, None)
        else:
            self._next[slot] = NONE
        if number % GRID == 0:
            _remember(self._grid, slot, self._most)

    def use_ends(self, slots: Iterable[int]) -> None:
        """Prompts have ended with those of these pages that nothing continues."""
        for slot in slots:
            if self._child[slot] == NONE and self._number[slot]:
                self.use(slot)

    def complete(self, slot: int) -> None:
        """The page is written, and found from now on; nothing where it has left meanwhile."""
        if self._number[slot]:
            self._complete[slot] = True

    def use(self, slot: int) -> None:
        """A prompt has ended with this page, or has begun with it and no further one."""
        self._used[slot] = next(self._clock)
        if self._child[slot] == NONE:
            self._is_end(slot)
        _remember(self._recent, slot, self._most)

    def remove(self, slot: int) -> list[int]:
        """Remove a page and all that continue it: their slots, each before the one that it continued. They stay pinned,
        once for this, until `free` is called."""
        if not self._number[slot]:
            return []
        found = [slot]
        for one in found:
            found += self._after(one)
        found.reverse()
        for one in found:
            self._leave(one)
            self._pins[one] += 1
        return found

    def pin(self, slots: Iterable[int]) -> None:
        """Nothing else is written to these slots until they are freed."""
        for slot in slots:
            self._pins[slot] += 1

    def free(self, slots: Iterable[int]) -> None:
        """One pin less; a slot that nobody has pinned any more and which holds nothing is free."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if not self._number[slot] and slot >= self._unsettled:
                    self._free.append(slot)

    def pins(self, slot: int) -> int:
        """How often a slot is pinned."""
        return self._pins.get(slot, 0)

    def adopt(self, found: Iterable[tuple[int, int, int, int, bytes, bytes]]) -> None:
        """Take in pages that were there at the start, as `workers.protocol.tiers.FOUND` has them. To be called before
        any slot is taken; `settle` then finds those that are free."""
        put: list[int] = []
        for slot, number, check, _, key, before in found:
            parent = NONE if number == 1 else self.slot(before)
            free = slot < self.slots and not self._number[slot] and key not in self and number > 0
            if free and (number == 1 or (parent != NONE and self._number[parent] == number - 1)):
                self.put(slot, key, parent, number, check, complete=True)
                put.append(slot)
        self.use_ends(put)

    def settle(self, most: int | None = None) -> bool:
        """No more are taken in: all other slots are free. `most`: slots that are looked at. Whether all are by now."""
        begin = 0 if most is None else max(self._unsettled - most, 0)
        slots = range(self._unsettled - 1, begin - 1, -1)
        self._free.extend(slot for slot in slots if not self._number[slot] and slot not in self._pins)
        self._unsettled = begin
        return begin == 0

    def report(self) -> list[bytes]:
        """Keys that tell routers what is here: those where prompts ended, the most recent ones first, and of the grid
        as many as these leave room for. A prompt that leaves one on disk in its middle is rare, and costs little: where
        host memory or the device have it, they report more of its middle. But who is not told where a session ended
        sends it to where none of it is."""
        slots = dict.fromkeys(chain(reversed(self._recent), reversed(self._grid)))
        return [self._key[slot] for slot in islice(slots, self._most)]

    def _after(self, slot: int) -> Iterator[int]:
        at = self._child[slot]
        while at != NONE:
            yield at
            at = self._next[at]

    def _is_end(self, slot: int) -> None:
        heappush(self._ends, (self._used[slot], slot))
        if len(self._ends) > 1024 + 4 * self.held:  # most of it is outdated
            live = (slot for slots in self._slots_of for slot in slots.values())
            self._ends = [(self._used[one], one) for one in live if self._child[one] == NONE]
            heapify(self._ends)

    def _leave(self, slot: int) -> None:
        """Nobody finds the page any more, which nothing continues."""
        key = self._key[slot]
        del self._slots_of[key[0]][key]
        self.held -= 1
        self._key[slot], self._number[slot], self._complete[slot] = b"", 0, False
        self._recent.pop(slot, None)
        self._grid.pop(slot, None)
        parent, before, after = self._parent[slot], self._before[slot], self._next[slot]
        if after != NONE:
            self._before[after] = before
        if before != NONE:
            self._next[before] = after
        elif parent != NONE:
            self._child[parent] = after
            if after == NONE and self._number[parent]:
                self._is_end(parent)


def _remember(those: OrderedDict[int, None], slot: int, most: int) -> None:
    those[slot] = None
    those.move_to_end(slot)
    if len(those) > most:
        those.popitem(last=False)
