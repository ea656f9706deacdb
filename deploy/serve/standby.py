"""Under Ray: the engine of a replica that stands by for the one that serves (`workers.processes.hot_standby`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy.config.application import ServeConfig
from deploy.serve.actors import ReplicaProcesses
from workers.processes.client import EngineClient
from workers.protocol.front import EngineFault


class StandbyProcesses:
    """Scheduler and ranks that stand by in the places of those that serve."""

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
        """Place them and set them to work; the client of them, before they are ready. EngineFault where they are on
        several nodes."""
        addresses = await self.processes.start()
        folder = self.processes.folder
        if folder is None:
            raise EngineFault("the ranks are on several nodes, or on another than their front")
        self._on_folder(folder)
        client = EngineClient(self._config.engine, addresses, self._config.model_name)
        self.processes.run(addresses, lambda cause, told: self._on_end(client, cause, told))
        return client

    def kill(self) -> None:
        """End every process at once."""
        self.processes.kill()

    async def gone(self, limit_s: float) -> bool:
        """See `ReplicaProcesses.gone`."""
        return await self.processes.gone(limit_s)
