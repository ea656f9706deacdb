"""Global memory, which is the storages of the tensors a launch was given, and a block's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.ptx import core
from tests.support.ptx.order import Order
from tests.support.ptx.values import Lanes, any_of

POISON = 0xFF
"""Byte of memory that nobody has written: it makes NaN of every float."""
_UP_TO = [np.arange(i) for i in range(17)]
"""Numbers from 0 on."""


_SHIFTS = {(1 << i, size): np.dtype(f"u{size}").type(i) for i in range(5) for size in (4, 8)}
"""Bits by which an address of so many bytes is shifted, to divide it by a power of two."""


class Fault(AssertionError):
    """A kernel did what no kernel may do."""


@dataclass
class Region:
    """One storage; who writes and caches it, for `order`."""

    name: str
    begin: int
    bytes: Lanes

    def __post_init__(self) -> None:
        self.words = self.bytes[: self.bytes.size // 4 * 4].view(np.uint32)
        self.written = np.zeros(self.bytes.size // 4 + 1, np.int32)
        lines = (self.begin % 128 + self.bytes.size) // 128 + 1
        self.line_written, self.line_cached = np.zeros(lines, np.int32), np.zeros(lines, np.int32)

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.begin + self.bytes.size


class GlobalMemory:
    """Loads and stores at addresses; outside a storage, or at no multiple of their width, they fail."""

    def __init__(self, regions: list[Region], order: Order | None) -> None:
        self.regions, self.order = regions, order
        self._last = regions[:1]
        self.stored = False
        """Whether anything was."""

    def load(self, address: Lanes, width: int, *, waited: bool, cached: bool) -> Lanes:
        """Bytes [n, width] at n addresses.

        `waited`: whether the warp has waited for the launch before; `cached`: whether L1 may give them, and keep them.
        """
        places = self._places(address, width, "load")
        found = np.empty((address.size, width), np.uint8)
        for chosen, region, offset in places:
            if width % 4 == 0:  # word by word: other processes may write them meanwhile
                read = region.words[(offset[:, None] >> 2) + _UP_TO[width // 4]].view(np.uint8)
            else:
                read = region.bytes[offset[:, None] + _UP_TO[width]]
            if self.order is not None:
                self.order.read(region, offset, width, waited, cached)
            if len(places) == 1:
                return np.asarray(read)
            found[chosen] = read
        return found

    def store(self, address: Lanes, values: Lanes) -> None:
        """Write bytes [n, width]."""
        self.stored |= address.size > 0
        for chosen, region, offset in self._places(address, values.shape[1], "store"):
            width = values.shape[1]
            if width % 4 == 0:
                words = np.ascontiguousarray(values[chosen]).view(np.uint32)
                region.words[(offset[:, None] >> 2) + _UP_TO[width // 4]] = words
            else:
                region.bytes[offset[:, None] + _UP_TO[width]] = values[chosen]
            if self.order is not None:
                self.order.write(region, offset, values.shape[1])

    def hold(self, address: int, size: int) -> None:
        """Fault unless one storage has all of so many bytes, of which nobody reads or writes any yet."""
        if not any(region.begin <= address and address + size <= region.end for region in self.regions):
            raise Fault(f"{size} bytes that are asked for lie in no argument")

    def state(self, waits: bool) -> tuple[core.LaunchState, Any]:
        """For `core.c`, and what must live as long. `waits`: whether programs must wait before they store."""
        known = []
        for region in self.regions:
            notes = map(core.pointer, (region.written, region.line_written, region.line_cached))
            known.append((region.begin, region.bytes.size, *notes))
        regions = np.array(known, core.REGION)
        state = core.LaunchState(regions=core.pointer(regions), regions_count=len(regions), waits=waits)
        if self.order is not None:
            state.ordered = True
            state.running_from, state.now, state.emptied = self.order.numbers()
        return state, regions

    def _places(self, address: Lanes, width: int, what: str) -> list[tuple[Any, Region, Lanes]]:
        _check_aligned(address, width)
        # Nearly always all lie in one storage, and in that of the last access as often as not.
        for region in (*self._last, *self.regions):
            offset = address - np.uint64(region.begin)  # huge of one that lies before it
            if offset.max() <= region.bytes.size - width:
                self._last = [region]
                return [(slice(None), region, offset.view(np.int64))]
        places: list[tuple[Any, Region, Lanes]] = []
        left = np.ones(address.shape, bool)
        for region in self.regions:
            inside = left & (address >= np.uint64(region.begin)) & (address <= np.uint64(max(region.end - width, 0)))
            if inside.any():
                places.append((inside, region, (address[inside] - np.uint64(region.begin)).astype(np.int64)))
                left &= ~inside
                if not left.any():
                    return places
        first = int(address[left][0])
        near = min(self.regions, key=lambda region: min(abs(first - region.begin), abs(first - region.end)))
        raise Fault(
            f"{what} of {width} bytes outside the arguments; the nearest is {near.name}, of {near.bytes.size} bytes, "
            f"at byte {first - near.begin}"
        )


class SharedMemory:
    """A block's shared memory, poisoned until it is written.

    Products and copies of boxes go through the asynchronous proxy. They see what threads have stored only behind a
    fence.proxy.async, of the thread that stored or of the one that reads (PTX ISA: memory consistency model, proxies),
    which is checked with `fences`.
    """

    def __init__(self, size: int, fences: bool) -> None:
        self.fences, self.size = fences, size
        self.bytes = np.full(-(-size // 16) * 16, POISON, np.uint8)
        """Whole granules; what lies past `size` is never read or written."""
        self._pairs = self.bytes[: size // 2 * 2].view(np.uint16)
        self._rows = {width: self.bytes.reshape(-1, width) for width in (1, 2, 4, 8, 16)}
        self._stored_at = np.zeros(size // 16 + 1, np.int64)
        self._storer = np.zeros(size // 16 + 1, np.int64)
        self._fenced_at = np.zeros(32, np.int64)
        self._now = np.zeros(1, np.int64)
        self.state = core.SharedState(
            bytes=core.pointer(self.bytes),
            size=size,
            stored_at=core.pointer(self._stored_at),
            storer=core.pointer(self._storer),
            fenced_at=core.pointer(self._fenced_at),
            now=core.pointer(self._now),
            fences=fences,
        )
        """For `core.c`."""

    def load(self, address: Lanes, width: int) -> Lanes:
        """Bytes [n, width] at n addresses; `width` is a power of two up to 16."""
        return self._rows[width].take(self._places(address, width), axis=0)

    def store(self, address: Lanes, values: Lanes, warp: int) -> None:
        """Write bytes [n, width] as a thread of `warp` does."""
        self._now += 1
        width = values.shape[1]
        self._rows[width][self._places(address, width)] = values
        if self.fences:
            granule = address.astype(np.int64) >> 4
            self._stored_at[granule], self._storer[granule] = self._now[0], warp

    def fence(self, warp: int) -> None:
        """Let products and copies see what was stored so far."""
        self._now += 1
        self._fenced_at[warp] = self._now[0]

    def load_behind_fence(self, pair: Lanes, granule: Lanes, warp: int) -> Lanes:
        """Pairs of bytes, uint16, as the asynchronous proxy reads them.

        `pair`: their numbers, none below 0; `granule`: the numbers of the 16 bytes in which they lie.
        """
        try:
            found = self._pairs.take(pair)
        except IndexError:
            raise Fault(f"shared memory at byte {2 * pair.max()}, width 2, of {self.size}") from None
        if self.fences:
            stored, fenced = self._stored_at.take(granule), self._fenced_at
            if any_of(stored > np.maximum(fenced[warp], fenced.take(self._storer.take(granule)))):
                raise Fault("reads shared memory that threads have stored to, without fence.proxy.async")
        return found

    def deliver(self, address: Lanes, values: Lanes) -> None:
        """Write bytes [n, width] through the asynchronous proxy."""
        width = values.shape[1]
        self._rows[width][self._places(address, width)] = values
        self._stored_at[np.asarray(address, np.int64) >> 4] = 0

    def poison(self, address: Lanes, width: int) -> None:
        """Poison memory that a copy under way may write any time."""
        self._rows[width][self._places(address, width)] = POISON

    def _places(self, address: Lanes, width: int) -> Lanes:
        """The rows of `width` bytes at addresses."""
        _check_aligned(address, width)
        unsigned = address.view(np.uint64) if address.dtype == np.int64 else address
        if address.size and unsigned.max() > self.size - width:  # huge of one below 0
            raise Fault(f"shared memory at byte {address.astype(np.int64).max()}, width {width}, of {self.size}")
        return (unsigned >> _SHIFTS[width, address.itemsize]).astype(np.int64)


def _check_aligned(address: Lanes, width: int) -> None:
    """`width` is a power of two."""
    if int(np.bitwise_or.reduce(address, axis=None)) & (width - 1):
        raise Fault(f"an address is no multiple of {width}")
