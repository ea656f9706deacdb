"""Under Ray: what stands by for the engine of a replica, as `health.standby` says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import ray

from deploy.config.application import ServeConfig
from deploy.serve.actors import ReplicaProcesses
from workers.memory.keeper import WeightKeeper, cache_slot
from workers.processes.client import EngineClient
from workers.processes.hot_standby import HotStandby

logger = logging.getLogger("latentserve.replica")


class StandbyProcesses:
    """Scheduler and ranks of a second engine, in the places of those that serve."""

    def __init__(
        self,
        processes: ReplicaProcesses,
        config: ServeConfig,
        on_end: Callable[[EngineClient, str, bool], None],
        on_folder: Callable[[Path], None],
    ) -> None:
        """`on_end` is told of each process that ends, of whose engine it is, why, and whether it could say so itself;
        `on_folder` where their socket files are."""
        self.processes, self._config = processes, config
        self._on_end, self._on_folder = on_end, on_folder

    async def connect(self) -> EngineClient:
        """Place them and set them to work; the client of them, before they are ready. OSError where there is no weight
        keeper."""
        addresses = await self.processes.start()
        folder = self.processes.folder
        assert folder is not None, "all are on one node, as those that serve are"
        self._on_folder(folder)
        client = EngineClient(self._config.engine, addresses, self._config.model_name)
        try:
            self.processes.run(addresses, lambda cause, told: self._on_end(client, cause, told))
        except BaseException:
            await client.close()
            raise
        return client

    def kill(self) -> None:
        """End every process at once."""
        self.processes.kill()

    async def gone(self, limit_s: float) -> bool:
        """Wait until every process has ended, for at most `limit_s` seconds; whether all have."""
        return await self.processes.gone(limit_s)


class Standby:
    """What stands by for the engine of one replica: nothing, processes that have imported what they need, or a second
    engine."""

    def __init__(
        self,
        config: ServeConfig,
        make: Callable[..., ReplicaProcesses],
        processes: Callable[[], ReplicaProcesses],
        serving: Callable[[], EngineClient | None],
        keeper: WeightKeeper | None,
        on_end: Callable[[EngineClient, str, bool], None],
        on_folder: Callable[[Path], None],
        say: Callable[[str], None],
    ) -> None:
        """`make` prepares processes with given seats (`ReplicaProcesses`). `processes` and `serving`: of the engine
        that serves. `keeper`: of its weights and caches. `on_end` and `on_folder`: see `StandbyProcesses`. `say` is
        told, in a line, when an engine stands by and when one does not any more."""
        self._config, self._make, self._processes, self._keeper = config, make, processes, keeper
        self._on_end, self._on_folder = on_end, on_folder
        self._imported: ReplicaProcesses | None = None
        self._importing: asyncio.Task[None] | None = None
        self.hot: HotStandby[StandbyProcesses] | None = None
        """What keeps a second engine standing by."""
        if config.health.standby == "hot":
            self.hot = HotStandby(self._engine, serving, self._unshared, config.engine.start_timeout_s)
            self.hot.on_change.append(say)
            self.hot.on_change.append(lambda line: logger.info(line))
            self.hot.on_progress.append(lambda line: logger.debug("standby: %s", line))

    @property
    def ready(self) -> bool:
        """Whether a second engine stands by."""
        return self.hot is not None and self.hot.ready

    def begin(self) -> None:
        """Start what is to stand by for the engine that has begun to serve."""
        if self.hot is not None:
            self.hot.begin()
        if self._config.health.standby == "imported" and self._config.health.patience_s > 0:
            self._imported = self._make(seats=self._processes().placements)
            self._importing = asyncio.ensure_future(self._import(self._imported))

    async def take_over(self, dead: ReplicaProcesses) -> tuple[ReplicaProcesses, EngineClient] | None:
        """Let the second engine take the place of one that died: see `HotStandby.take_over`."""
        taken = None if self.hot is None else await self.hot.take_over(dead)
        return None if taken is None else (taken[0].processes, taken[1])

    def imported(self) -> ReplicaProcesses | None:
        """Give away the processes that have imported what they need; None where there are none."""
        imported, self._imported = self._imported, None
        return imported

    def kill(self) -> None:
        """End all that stands by, and start nothing more."""
        if self._importing is not None:
            self._importing.cancel()
        if self._imported is not None:
            self._imported.kill()
        if self.hot is not None:
            self.hot.kill()

    def _engine(self) -> StandbyProcesses:
        processes = self._make(seats=self._processes().placements)
        return StandbyProcesses(processes, self._config, self._on_end, self._on_folder)

    async def _unshared(self) -> str:
        """Why a second engine could not share memory with the one that serves; "" where it can."""
        if self._processes().folder is None:
            return "the ranks are on several nodes, or on another than their front"
        assert self._keeper is not None, "the settings demand one"
        slots = [cache_slot(rank) for rank in range(self._config.engine.mesh().world.size)]
        return await asyncio.to_thread(self._keeper.lacks, slots)  # others may be asking it

    async def _import(self, processes: ReplicaProcesses) -> None:
        try:
            await processes.stand_by()
            logger.info("processes stand by")
        except ray.exceptions.RayError:
            logger.warning("no processes stand by", exc_info=True)
            processes.kill()
            if self._imported is processes:
                self._imported = None
