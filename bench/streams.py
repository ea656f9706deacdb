"""Common parts of the benchmarks of decode steps: requests that keep an engine's rows busy until they are ended."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from deploy.cli.local import settled_stats
from deploy.mistakes import UsageMistake
from kernels.page import PAGE_TOKENS
from workers.processes.client import EngineClient
from workers.protocol.messages import Request

LOOK_S = 0.02
"""Seconds between two looks at what an engine does."""
PATIENCE_S = 120.0
"""Seconds until all streams must decode: a grammar may have to be compiled for a large vocabulary."""
_serial = itertools.count()


class Streams:
    """A number of requests that decode at once, until they are ended. Where one ends by itself, another takes its
    place."""

    def __init__(self, engine: EngineClient, rows: int, asked: Callable[[int, int], Request]) -> None:
        """`asked`: the request for a place, of a number that no other has."""
        self.given = [0] * rows
        """Tokens, by place."""
        self.ended = 0
        self._engine, self._asked = engine, asked
        self._tasks = [asyncio.create_task(self._one(place)) for place in range(rows)]

    async def _one(self, place: int) -> None:
        while True:
            # Who is cancelled has to leave: the engine goes on otherwise.
            async with aclosing(self._engine.generate(self._asked(place, next(_serial)))) as outputs:
                async for item in outputs:
                    self.given[place] += len(item.tokens)
            self.ended += 1

    def check(self) -> None:
        """Raise what one has failed with."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def decoding(self) -> None:
        """Wait until all have given some tokens."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while min(self.given) < 4:
            self.check()
            if loop.time() > deadline:
                raise RuntimeError(f"after {PATIENCE_S:.0f} s the streams have given {self.given} tokens")
            await asyncio.sleep(LOOK_S)

    async def end(self) -> None:
        """Cancel them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def tokens_left(engine: EngineClient, rows: int, prompt: int) -> int:
    """Return the number of tokens that each of `rows` streams may generate past its prompt: to the end of the context,
    or of its share of the cache. Beyond that, streams would wait for each other's pages. UsageMistake where next to
    nothing is left."""
    # A page less, as a step may need one for the tokens it verifies.
    share = ((await settled_stats(engine)).pages_total // rows - 1) * PAGE_TOKENS
    left = min(engine.info.max_context, share) - prompt
    if left < 2:
        raise UsageMistake(
            f"--input: of {rows} streams each may have {prompt + left} tokens, by the context and the cache, and "
            f"{prompt} are its prompt: give fewer streams or shorter prompts"
        )
    return left


@asynccontextmanager
async def decoding_streams(
    engine: EngineClient, rows: int, asked: Callable[[int, int], Request]
) -> AsyncIterator[Streams]:
    """Run `rows` streams, which decode within this context; at its end the engine has nothing to do any more."""
    streams = Streams(engine, rows, asked)
    try:
        await streams.decoding()
        yield streams
    finally:
        await streams.end()
        while engine.fault is None and (engine.stats.running or engine.stats.waiting):
            await asyncio.sleep(LOOK_S)
