"""Turns for work whose size clients decide: small work is done at once, larger work aside and a little at a time.

Threads share one interpreter. One that works for a second leaves the event loop its turns, but ten at once leave it one
in ten, and what they make fills the memory together. Small work waits for nothing, and other work for its like alone,
where API keys that have names take turns.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

T = TypeVar("T")

SMALL = 16 * 1024
"""Work of up to so many bytes takes a few milliseconds, and is done in the event loop."""
MIDDLE = 512 * 1024
MIDDLE_AT_ONCE = 4
LARGE_AT_ONCE = 1


class Worker(Protocol):
    """Holder of a turn."""

    async def __call__(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(*arguments)`, in the event loop or aside."""


class _Lane:
    """A limited number of turns at one time. Keys that wait are served in turn, and the requests of each in order of
    arrival."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once  # while anybody waits, none
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._hand_on()

    async def _wait(self, key: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(key, turn)
            else:  # it has just come
                self._hand_on()
            raise

    def _leave(self, key: str, turn: asyncio.Future[None]) -> None:
        line = self._waiting.get(key, deque())
        if turn in line:
            line.remove(turn)
            if not line:
                del self._waiting[key]

    def _hand_on(self) -> None:
        while self._waiting:
            key, line = next(iter(self._waiting.items()))
            turn = line.popleft()
            if line:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            if not turn.done():  # else its task has yet to see that it was cancelled
                turn.set_result(None)
                return
        self._free += 1


class Lanes:
    """Lanes of work. There is one object per process."""

    def __init__(self) -> None:
        self._middle = _Lane(MIDDLE_AT_ONCE)
        self._large = _Lane(LARGE_AT_ONCE)

    @asynccontextmanager
    async def turn(self, size: int, key: str = "") -> AsyncIterator[Worker]:
        """Wait for a turn for work on `size` bytes, of the API key of this name, and keep it for the block."""
        if size <= SMALL:
            yield at_once
            return
        async with (self._middle if size <= MIDDLE else self._large).turn(key):
            yield aside


async def at_once(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in the event loop."""
    return function(*arguments)


async def aside(function: Callable[..., T], *arguments: object) -> T:
    """Call `function` in a thread. A thread goes on when its caller is cancelled, so the caller keeps its turn, and
    what it holds, until the thread has ended."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        with suppress(Exception):
            await working
        raise
