"""Engines of one replica without Ray, as its front starts them: one that serves, and one that stands by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from workers.config import EngineConfig
from workers.memory.keeper import WeightKeeper, cache_slot
from workers.processes.client import EngineClient
from workers.processes.failover import FailoverEngine
from workers.processes.hot_standby import HotStandby
from workers.processes.launch import LocalReplica
from workers.rank.role import Role

START_S = 300.0


class LocalProcesses:
    """Scheduler and ranks as child processes: `workers.processes.hot_standby.Processes`."""

    def __init__(self, settings: EngineConfig, keeper: Path, role: Role) -> None:
        self._settings, self._keeper, self._role = settings, keeper, role
        self.replica: LocalReplica | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.told: list[str] = []
        """What they said while they started."""

    def start(self) -> LocalReplica:
        """Start them; they import what they need, and wait for `connect`."""
        if self.replica is None:
            self.replica = LocalReplica(self._settings, self._keeper, self._role)
        return self.replica

    async def connect(self, waiting: int | None = None) -> EngineClient:
        """The client of these processes, which are set to work. `waiting`: streams that wait for them."""
        replica = self.start()
        client = EngineClient(self._settings, await asyncio.to_thread(replica.connect, waiting), "it")
        client.on_progress.append(self.told.append)
        self._watcher = asyncio.create_task(self._watch(replica, client))
        return client

    @staticmethod
    async def _watch(replica: LocalReplica, client: EngineClient) -> None:
        while not (dead := replica.dead()):
            await asyncio.sleep(0.02)
        client.fail(dead)

    def pid(self, name: str) -> int:
        assert self.replica is not None
        [pid] = [process.pid for process in self.replica.processes if process.name == name]
        assert pid is not None
        return pid

    def kill(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self.replica is not None:
            self.replica.kill()

    async def gone(self, limit_s: float) -> bool:
        return self.replica is None or all(process.exitcode is not None for process in self.replica.processes)


class LocalFront:
    """What a replica's front does about its engines."""

    def __init__(
        self,
        settings: EngineConfig,
        *,
        hot: bool = True,
        imported: bool = False,
        rehearsal_s: float = 600.0,
        calm_s: float = 0.1,
    ) -> None:
        """`hot`: whether an engine is to stand by; `imported`: or processes that have imported what they need. The
        other arguments: see `HotStandby`."""
        self._settings, self._hot = settings, hot
        self.imports = imported
        self.keeper = WeightKeeper()
        self.current = self.make("primary" if hot else "alone")
        self.made: list[LocalProcesses] = []
        """All that were to stand by."""
        self.told: list[str] = []
        """What became of those that stand by, and what they said."""
        self.starts = 0
        """Engines that were started while streams waited for them, the first one included."""
        self.parts: list[dict[str, float]] = []
        """Of each of these its seconds by part: processes, what ranks still imported, what rank 0 did, first step."""
        self.imported: LocalProcesses | None = None
        self.change: Callable[[LocalProcesses], None] = lambda processes: None
        """Called with processes that are about to be started to stand by."""
        self.engine: FailoverEngine | None = None
        times = {"rehearsal_s": rehearsal_s, "backoff_s": 0.1, "calm_s": calm_s}
        self.standby = HotStandby(self._next, self._serving, self._unshared, START_S, **times)
        self.standby.on_change.append(self.told.append)
        self.standby.on_progress.append(self.told.append)

    def make(self, role: Role) -> LocalProcesses:
        return LocalProcesses(self._settings, self.keeper.path(), role)

    def _next(self) -> LocalProcesses:
        processes = self.make("standby")
        self.made.append(processes)
        self.change(processes)
        return processes

    def _serving(self) -> EngineClient | None:
        return None if self.engine is None else self.engine.serving

    async def _unshared(self) -> str:
        slots = [cache_slot(rank) for rank in range(self._settings.mesh().world.size)]
        return await asyncio.to_thread(self.keeper.lacks, slots)

    async def start(self) -> FailoverEngine:
        self.engine = FailoverEngine(await self._start(), self._start_again, START_S)
        self.engine.on_return.append(lambda seconds: self.stand_by())
        self.stand_by()
        return self.engine

    def stand_by(self) -> None:
        """Start what is to stand by; harmless when repeated."""
        if self._hot:
            self.standby.begin()
        if self.imports and self.imported is None:
            self.imported = self.make("alone")
            self.imported.start()

    async def _start(self) -> EngineClient:
        self.starts += 1
        begin = time.monotonic()
        client = await self.current.connect(None if self.engine is None else self.engine.waiting)
        placed = time.monotonic()
        await client.ready(START_S)
        ready = time.monotonic()
        await client.health_check()
        rank = client.start_s
        parts = {"processes": placed - begin, "libraries": ready - placed - sum(rank.values()), **rank}
        self.parts.append({**parts, "first step": time.monotonic() - ready})
        return client

    async def _start_again(self) -> EngineClient:
        taken = await self.standby.take_over(self.current)
        if taken is not None:
            self.current, client = taken
            return client
        self.current = self.imported or self.make("primary" if self._hot else "alone")
        self.imported = None
        return await self._start()

    async def stands_by(self) -> None:
        """Wait until an engine stands by, or processes that have imported what they need."""
        deadline = time.monotonic() + START_S
        while not (self.imported.start().imported if self.imported is not None else self.standby.ready):
            assert time.monotonic() < deadline, self.told
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        self.standby.kill()
        if self.imported is not None:
            self.imported.kill()
        self.current.kill()
        self.keeper.close()
