"""A second engine of a replica that stands by, whole: it takes the place of the one that serves when that has died.

It has loaded everything, captured its graphs and proven itself, and does nothing. What is large is there once: it maps
the weights that serve, and of the cache it has addresses (`workers.memory.cache_memory`). Nobody asks anything of it
but rehearsals, each of which takes one token through all of its ranks, on pages of its own.

An engine that stands by can do no harm to the one that serves: nothing of it is waited for, what it says concerns
nobody, and the memory of the other's cache is mapped only once all processes that had it have ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from workers.processes.client import EngineClient, tell
from workers.protocol.front import EngineFault

logger = logging.getLogger("latentserve.standby")

REHEARSAL_S: Final = 600.0
"""Seconds between two rehearsals."""
REHEARSAL_LIMIT_S: Final = 30.0
"""Seconds that one may take: the GPU may be busy with the engine that serves."""
BACKOFF_S: Final = 5.0
"""Seconds before another engine is started in the place of one that stood by and died; twice as long each time that one
does not get to stand by, or dies soon."""
LONGEST_BACKOFF_S: Final = 600.0
LASTED_S: Final = 600.0
"""Seconds: what stood by for so long had not failed to start."""
LASTING_STARTS: Final = 3
"""Starts in a row that end in a fault that another start would only repeat, as far as the engine can know; then none is
started any more. More than one: memory that others had for a moment looks the same to it."""
CALM_S: Final = 5.0
"""Seconds for which nothing may wait before an engine is started that is to stand by: that takes time of processors and
GPUs from those who wait."""
CALM_LIMIT_S: Final = 60.0
"""Seconds after which it is started all the same."""
GONE_S: Final = 30.0
"""Seconds in which killed processes end, and give the memory of GPUs and node back: the driver needs some for a full
GPU."""
TAKE_OVER_S: Final = 30.0
"""Seconds that taking the place of another engine may take."""
_LOOK_S: Final = 0.25


class Ended(Protocol):
    """Scheduler and ranks of an engine that is to end, or has died."""

    def kill(self) -> None:
        """End them at once; harmless when repeated."""

    async def gone(self, limit_s: float) -> bool:
        """Wait until those that were killed have ended, with all that they had open, but no longer than so many
        seconds; whether they have."""


class Processes(Ended, Protocol):
    """Scheduler and ranks of an engine that is to stand by."""

    async def connect(self) -> EngineClient:
        """Start them, and connect to them. They load meanwhile."""


class NothingShared(EngineFault):
    """The engine that serves has nothing that another one could share, and will not have it."""


P = TypeVar("P", bound=Processes)


class HotStandby(Generic[P]):
    """Keeps one engine standing by, and lets it take the place of the one that serves."""

    def __init__(
        self,
        make: Callable[[], P],
        serving: Callable[[], EngineClient | None],
        unshared: Callable[[], Awaitable[str]],
        start_timeout_s: float,
        rehearsal_s: float = REHEARSAL_S,
        backoff_s: float = BACKOFF_S,
        calm_s: float = CALM_S,
    ) -> None:
        """`make` prepares processes that are to stand by; nothing of them starts yet. `serving`: the engine that
        serves; None while none does. `unshared`: why another engine cannot share weights and cache of that one, as long
        as it serves; empty where it can. It may raise OSError where that cannot be found out."""
        self._make, self._serving, self._unshared = make, serving, unshared
        self._start_timeout_s = start_timeout_s
        self._rehearsal_s, self._backoff_s, self._calm_s = rehearsal_s, backoff_s, calm_s
        self._standing: tuple[P, EngineClient] | None = None
        self._newest: P | None = None
        """Processes that stand by, or are about to."""
        self._taken: P | None = None
        """Processes that stood by, and are somebody else's now."""
        self._taking: tuple[P, EngineClient] | None = None
        """What is about to take the place of a dead engine, and is nobody else's yet."""
        self._stood_since: float | None = None
        """When what was started last began to stand by."""
        self._keeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """They end what stood by, and wait until its memory is free."""
        self.on_change: list[Callable[[str], None]] = []
        """Functions that are told, in a line, when an engine stands by and when one does not any more."""
        self.on_progress: list[Callable[[str], None]] = []
        """Functions that are told what an engine says while it starts in order to stand by."""

    @property
    def ready(self) -> bool:
        """Whether an engine stands by."""
        return self._standing is not None and self._standing[1].serves

    def begin(self) -> None:
        """Keep an engine standing by from now on; there is never more than one. In the running event loop."""
        if self._keeping is None:
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def kill(self) -> None:
        """End what stands by, is about to, or takes over, and start nothing more; harmless when repeated."""
        self._stop_keeping()
        if self._taking is not None:
            processes, client = self._taking
            processes.kill()
            client.fail("it was ended while it took over")
        self._standing = None
        if self._newest is not None:
            self._newest.kill()
            self._newest = None

    async def take_over(self, dead: Ended) -> tuple[P, EngineClient] | None:
        """Let the engine that stands by take the place of the one of these processes, which are ended. Return its
        processes and its client, ready to serve. None where none stands by, or it cannot. Then what stood by is ended,
        and has let go its memory unless that takes longer than `GONE_S`; another engine can be started. None stands by
        from now on, until `begin`, which waits for the memory."""
        standing = self._take()
        dead.kill()
        if standing is None:
            self.kill()
            await self._wait_for_ends()
            return None
        processes, client = self._taking = standing
        try:
            # Before that, a kernel of a dead rank may still write to the cache that this engine is about to use.
            if not await dead.gone(GONE_S):
                raise EngineFault(f"processes of the engine that died have not ended for {GONE_S:.0f} s")
            await client.take_over(TAKE_OVER_S)
            async with asyncio.timeout(TAKE_OVER_S):
                await client.health_check()
        except BaseException as error:
            processes.kill()
            self._note_ending(asyncio.get_running_loop().create_task(self._end(processes, client)))
            if not isinstance(error, Exception):
                raise
            logger.warning("the engine that stood by cannot take the place of the one that died", exc_info=True)
            tell(self.on_change, f"the engine that stood by cannot serve: {error or type(error).__name__}")
            await self._wait_for_ends()
            return None
        finally:
            self._taking = None
        return standing

    def _take(self) -> tuple[P, EngineClient] | None:
        """Take the engine that stands by away from who keeps it, if it lives."""
        standing = self._standing
        if standing is None or not standing[1].serves:
            return None
        self._standing = self._newest = None
        self._taken = standing[0]
        self._stop_keeping()
        return standing

    def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._note_ending(self._keeping)
            self._keeping = None

    def _note_ending(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _wait_for_ends(self) -> None:
        """Wait until the memory of what is ended is free, but not for ever."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GONE_S):
                await self._all_ended()

    async def _all_ended(self) -> None:
        while self._ending:
            await asyncio.wait(set(self._ending))

    async def _keep(self) -> None:
        await self._all_ended()
        loop, failures, lasting, pause = asyncio.get_running_loop(), 0, 0, 0.0
        while True:
            await self._calm(pause)
            self._stood_since = None
            try:
                await self._stand_by()
            except Exception as error:
                cause = str(error) or type(error).__name__
                lasting = lasting + 1 if isinstance(error, EngineFault) and error.lasting else 0
                hopeless = isinstance(error, NothingShared) or lasting >= LASTING_STARTS
            self._go_on()
            if hopeless:
                self._keeping = None
                tell(self.on_change, f"no engine stands by: {cause}; none will before the next engine serves")
                return
            # One that lasted was no failure of its start.
            lasted = self._stood_since is not None and loop.time() - self._stood_since > LASTED_S
            failures = 0 if lasted else failures + 1
            pause = min(self._backoff_s * 2 ** (failures - 1), LONGEST_BACKOFF_S) if failures else self._backoff_s
            tell(self.on_change, f"no engine stands by: {cause}; another one is started in {pause:.0f} s")

    def _go_on(self) -> None:
        """Raise CancelledError in a task that was stopped: what it waited for may have failed in the same moment, and
        then it is not told before it waits again."""
        if self._keeping is not asyncio.current_task():
            raise asyncio.CancelledError

    async def _stand_by(self) -> None:
        """Start an engine, and keep it until it dies, fails a rehearsal or could not take over; raises why."""
        await self._check_shared()
        processes = self._newest = self._make()
        client: EngineClient | None = None
        try:
            client = await processes.connect()
            client.on_progress.append(lambda line: tell(self.on_progress, line))
            await client.ready(self._start_timeout_s)
            serving = self._serving()
            if serving is None:
                raise EngineFault("the engine for which it is to stand by is away")
            if client.info.root != serving.info.root:
                raise EngineFault("it has other weights than the engine that serves, or computes otherwise")
            async with asyncio.timeout(REHEARSAL_LIMIT_S):
                await client.health_check()
            self._standing = processes, client
            self._stood_since = asyncio.get_running_loop().time()
            tell(self.on_change, "an engine stands by")
            await self._rehearse(client)
        finally:
            if self._taken is not processes:
                if self._newest is processes:
                    self._standing = self._newest = None
                # Whoever stops this does not stop that.
                ending = asyncio.get_running_loop().create_task(self._end(processes, client))
                self._note_ending(ending)
                await asyncio.shield(ending)

    async def _rehearse(self, client: EngineClient) -> None:
        died = asyncio.Event()
        client.on_fault.append(lambda cause: died.set())
        while client.fault is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rehearsal_s):
                    await died.wait()
                break
            async with asyncio.timeout(REHEARSAL_LIMIT_S):
                await client.health_check()
            await self._check_shared()
        raise EngineFault(client.fault or "it ended", client.fault_is_lasting)

    async def _check_shared(self) -> None:
        """Raise `NothingShared` where an engine that stands by would have nothing to share."""
        if why := await self._unshared():
            raise NothingShared(why)

    @staticmethod
    async def _end(processes: P, client: EngineClient | None) -> None:
        """End processes that stood by, and wait for the memory that they had, lest the next ones find none."""
        processes.kill()
        if client is not None:
            await client.close()
        while not await processes.gone(GONE_S):
            logger.warning("processes that stood by have not ended for %.0f s", GONE_S)

    async def _calm(self, pause: float) -> None:
        """Wait so many seconds, and until nothing has waited at the engine that serves for a while."""
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        begin = calm = loop.time()
        while loop.time() - begin < CALM_LIMIT_S:
            serving = self._serving()
            if serving is None or serving.stats.waiting or serving.stats.prefill_backlog:
                calm = loop.time()
            elif loop.time() - calm >= self._calm_s:  # by a look: a loop that was late has not seen what waited
                return
            await asyncio.sleep(_LOOK_S)
