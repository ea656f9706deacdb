"""Turns for work whose size clients decide: small work is done at once, larger work aside and a little at a time.

Threads share one interpreter. One that works for a second leaves the event loop its turns, but ten at once leave it one
in ten, and what they make fills the memory together. Small work waits for nothing, and other work for its like alone.
"""

from __future__ import annotations

import asyncio
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
    """Who has a turn."""

    async def __call__(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(*arguments)`, in the event loop or aside."""


class Lanes:
    """One per process."""

    def __init__(self) -> None:
        self._middle = asyncio.Semaphore(MIDDLE_AT_ONCE)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[Worker]:
        """Wait for a turn for work on `size` bytes and keep it for the block."""
        if size <= SMALL:
            yield at_once
            return
        async with self._middle if size <= MIDDLE else self._large:
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
