"""The processes of one replica under Ray: its scheduler, one actor per rank, who stands where, and who watches them.

Ray places, watches and ends them. Their `run` methods never return while the replica lives, so awaiting them is the
watch: no Ray call is made per step or token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.environment import PROCESS_ENVIRONMENT
from deploy.config.application import LogConfig, ServeConfig
from deploy.observability import logs
from deploy.serve import prestarted
from deploy.serve.early_imports import RANK_ENVIRONMENT
from deploy.serve.ended_processes import runs
from workers.channel.ports import free_port
from workers.channel.sockets import Addresses, remove_sockets
from workers.config import EngineConfig
from workers.protocol.captures import Waiting
from workers.rank.role import Role

if TYPE_CHECKING:
    from workers.processes.scheduler_process import SchedulerProcess

logger = logging.getLogger("latentserve.replica")

FRONT_BUNDLE = 0
"""Placement-group bundle of the replica's front and scheduler; the ranks' bundles follow."""


@dataclass(frozen=True, order=True)
class Placement:
    """Node, device and address of a worker actor."""

    node: str
    """Ray's node id."""
    device: int
    """Index of its GPU among those the process sees; -1 without one."""
    bundle: int
    ip: str
    port: int
    """Port that was free there a moment ago, for the ranks' rendezvous."""
    pid: int


def placement_order(placements: Sequence[Placement], home: str) -> list[int]:
    """Indices of `placements` in rank order: ranks of one node are neighbours, the front's node first."""
    return sorted(range(len(placements)), key=lambda i: (placements[i].node != home, placements[i]))


def device_index(assigned: Sequence[str], visible: str | None) -> int:
    """Index among the visible devices of the one Ray assigned; -1 when it assigned none.

    Ray names devices as CUDA_VISIBLE_DEVICES of its node does; torch counts the entries of that list.
    """
    if not assigned:
        return -1
    if visible is None or not visible.strip():
        return int(assigned[0])
    names, name = [name.strip() for name in visible.split(",")], assigned[0].strip()
    if name not in names:
        raise RuntimeError(f"Ray assigned GPU {name}, which CUDA_VISIBLE_DEVICES = {visible} does not show")
    return names.index(name)


class SchedulerActor:
    """The replica's scheduler, in a process of its own."""

    def __init__(self, log: LogConfig, labels: dict[str, Any]) -> None:
        logs.configure(log, process="scheduler", **labels)
        self._process: SchedulerProcess | None = None

    def load_libraries(self) -> None:
        """Import what `bind` and `run` need, while nothing waits for it."""
        import workers.processes.scheduler_process

        assert workers.processes.scheduler_process

    def bind(self, config: EngineConfig, host: str | None, standby: bool) -> tuple[Addresses, int]:
        """Bind the sockets. Return the addresses to which all others connect, and the process id. `host` and `standby`:
        see `SchedulerProcess`."""
        from workers.processes.scheduler_process import SchedulerProcess

        self._process = SchedulerProcess(config, host, standby=standby)
        return self._process.addresses, os.getpid()

    def run(self) -> None:
        """Schedule until told to stop; raises the first cause."""
        from workers.processes.scheduler_process import collect_young_garbage_alone

        assert self._process is not None, "bind comes first"
        collect_young_garbage_alone()
        self._process.run()


class WorkerActor:
    """Actor of one rank."""

    def __init__(self, log: LogConfig, labels: dict[str, Any]) -> None:
        self._log, self._labels = log, labels

    def load_libraries(self) -> None:
        """Import what `run` needs, which takes seconds, while others still start."""
        from workers.rank.libraries import load_libraries

        load_libraries()

    def placement(self, bundle: int) -> Placement:
        """Return where this actor was placed."""
        context = ray.get_runtime_context()
        assigned = context.get_accelerator_ids().get("GPU", [])
        device = device_index(assigned, os.environ.get("CUDA_VISIBLE_DEVICES"))
        ip = ray.util.get_node_ip_address()
        return Placement(context.get_node_id(), device, bundle, ip, free_port(ip), os.getpid())

    def run(
        self,
        config: EngineConfig,
        rank: int,
        addresses: Addresses,
        rendezvous: str,
        device: int,
        keeper: Path | None = None,
        waiting: Waiting = None,
        role: Role = "alone",
        ahead: Path | None = None,
    ) -> None:
        """Run step plans until told to stop; raises the cause of an end. `keeper` (of weights), `waiting` and
        `role`: see `run_worker`. `ahead`: socket of a rank that started ahead of this actor, for which it stands."""
        logs.configure(self._log, process=f"rank {rank}", **self._labels)
        if ahead is not None:
            prestarted.stand_for(ahead, addresses, keeper, self._log, self._labels)
            return
        from workers.rank.worker_process import run_worker

        run_worker(config, rank, addresses, rendezvous, device if device >= 0 else None, keeper, waiting, role)


class ReplicaProcesses:
    """Scheduler and ranks of one replica, in its placement group."""

    scheduler_class: type = SchedulerActor
    worker_class: type = WorkerActor

    def __init__(
        self,
        config: ServeConfig,
        group: PlacementGroup,
        labels: dict[str, Any],
        keeper: Callable[[], Path | None] = lambda: None,
        seats: Sequence[Placement] = (),
        *,
        early: bool = False,
        ahead: Path | None = None,
    ) -> None:
        """Prepare the processes; nothing starts yet. `labels` become part of every log line. `keeper` gives the place
        of the weight keeper on this node when ranks begin to load. `seats`: places of other ranks, for which these
        stand by: they reserve nothing, and get the devices of those that they take the place of. `early`: ranks take
        processes that have imported what they need (`early_imports`). `ahead`: folder of ranks that started ahead of
        Ray, which these take if they can (`prestarted`)."""
        self._keeper, self._seats = keeper, {seat.bundle: seat for seat in seats}
        self._rank_environment = RANK_ENVIRONMENT if early else {}
        hot = config.health.standby == "hot"
        self._role: Role = ("standby" if seats else "primary") if hot else "alone"
        self._settings, self._config, self._log, self._labels = config, config.engine, config.log, labels
        self._ahead, self._claimed = ahead, list[prestarted.Claimed]()
        self.not_ahead = ""
        """Why ranks that started ahead could not be taken; empty where none had, and where they were."""
        self._group, self._cpus, self._gpus = group, config.cpus_per_process, config.gpus_per_rank or 0.0
        self._scheduler: Any = None
        self._workers: list[Any] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._local_pids: list[int] = []
        self._addresses: Addresses | None = None
        self._rendezvous = ""
        self.placements: list[Placement] = []
        """Placements of the workers, in rank order."""

    def _create(self) -> None:
        """Start every process. All start at once: each takes a second or two to come up."""
        self._scheduler = self._actor(self.scheduler_class, FRONT_BUNDLE, 0, {}).remote(self._log, self._labels)
        self._workers = [
            self._actor(self.worker_class, FRONT_BUNDLE + 1 + rank, self._gpus, self._rank_environment).remote(
                self._log, self._labels
            )
            for rank in range(self._config.mesh().world.size)
        ]

    async def stand_by(self) -> None:
        """Start every process, and wait until each has imported what it needs. Before `start`, and `start` does not
        wait for it."""
        self._create()
        await asyncio.gather(*(actor.load_libraries.remote() for actor in [self._scheduler, *self._workers]))

    async def start(self) -> Addresses:
        """Place every process and set it running; returns where the front connects."""
        home = ray.get_runtime_context().get_node_id()
        created = self._scheduler is None
        if created:
            self._create()
        actors = self._workers
        finding = [actor.placement.remote(FRONT_BUNDLE + 1 + rank) for rank, actor in enumerate(actors)]
        if created and self._ahead is None:
            self._load_libraries()
        placements = [self._seated(placement) for placement in await asyncio.gather(*finding)]
        order = placement_order(placements, home)
        self.placements = [placements[i] for i in order]
        self._workers = [actors[i] for i in order]
        one_node = all(placement.node == home for placement in placements)
        host = None if one_node else ray.util.get_node_ip_address()
        addresses: Addresses
        addresses, scheduler_pid = await self._scheduler.bind.remote(self._config, host, self._role == "standby")
        self._local_pids = [scheduler_pid, *(placement.pid for placement in placements if placement.node == home)]
        await self._claim(one_node=one_node)
        self._addresses = addresses
        self._rendezvous = f"tcp://{'127.0.0.1' if one_node else self.placements[0].ip}:{self.placements[0].port}"
        return addresses

    def _load_libraries(self) -> None:
        for actor in self._workers:
            actor.load_libraries.remote()

    async def _claim(self, *, one_node: bool) -> None:
        """Take ranks that started ahead, where there are any. Otherwise the actors become the ranks."""
        if self._ahead is None:
            return
        try:
            if not one_node:
                raise prestarted.NotClaimed("its actors are on several nodes")
            devices = [placement.device for placement in self.placements]
            self._claimed = await asyncio.to_thread(prestarted.claim, self._ahead, self._settings, devices)
        except prestarted.NotClaimed as error:
            self.not_ahead = str(error)
            self._load_libraries()
        else:
            self._local_pids += [rank.pid for rank in self._claimed]

    @property
    def asks_ahead(self) -> bool:
        """Whether there may be ranks that started ahead of Ray, before `start`."""
        return self._ahead is not None

    @property
    def ahead(self) -> bool:
        """Whether its ranks are such that started ahead of Ray, after `start`."""
        return bool(self._claimed)

    @property
    def folder(self) -> Path | None:
        """Folder of the channel's socket files; None before `start`, and if the channel goes over TCP."""
        return None if self._addresses is None else self._addresses.folder

    def _seated(self, placement: Placement) -> Placement:
        """Return the placement of a rank, with the device of the one that it takes the place of."""
        seat = self._seats.get(placement.bundle)
        return placement if seat is None else replace(placement, device=seat.device)

    def _actor(self, cls: type, bundle: int, gpus: float, environment: dict[str, str]) -> Any:
        options = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        # Asking for variables that are set already would cost the actor a fresh process instead of a waiting one.
        lacking = {name: value for name, value in PROCESS_ENVIRONMENT.items() if os.environ.get(name) != value}
        asked = lacking | environment
        return ray.remote(cls).options(
            num_cpus=0 if self._seats else self._cpus,
            num_gpus=0 if self._seats else gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=options,
            runtime_env={"env_vars": asked} if asked else None,
        )

    def run(self, addresses: Addresses, on_end: Callable[[str, bool], None], waiting: Waiting = None) -> None:
        """Let them work; `on_end` is told of each process that ends: why, and whether it could say so itself.
        `waiting`: streams that wait for them; None where nobody does, and all graphs are captured before they serve;
        see `Waiting`.
        OSError where they stand by and there is no weight keeper."""
        # Ranks load together or not at all, and those of other nodes would find nothing kept.
        keeper = None
        if self.folder is not None:
            try:
                keeper = self._keeper()
            except OSError:
                if self._role == "standby":
                    raise  # what it would share is kept there
                logger.warning("no weight keeper could be started: weights will not be kept", exc_info=True)
        refs = {"scheduler": self._scheduler.run.remote()}
        ahead = [rank.path for rank in self._claimed]
        for rank, (worker, placement) in enumerate(zip(self._workers, self.placements, strict=True)):
            refs[f"rank {rank}"] = worker.run.remote(
                *(self._config, rank, addresses, self._rendezvous, placement.device),
                *(keeper, waiting, self._role, ahead[rank] if ahead else None),
            )
        self._watchers = [asyncio.ensure_future(self._watch(name, ref, on_end)) for name, ref in refs.items()]

    @staticmethod
    async def _watch(name: str, ref: Any, on_end: Callable[[str, bool], None]) -> None:
        try:
            await ref
        except asyncio.CancelledError:
            raise
        except ray.exceptions.RayTaskError as error:
            on_end(f"{name}: {error.cause}", True)
        except ray.exceptions.OutOfMemoryError:
            on_end(f"{name} died: Ray ended it because its node ran out of memory", False)
        except ray.exceptions.RayError:
            on_end(f"{name} died: its process was killed or crashed (its log is among Ray's worker logs)", False)
        else:
            on_end(f"{name} ended", True)

    async def gone(self, limit_s: float) -> bool:
        """Wait until the processes of this node that were killed have ended, and given back what they had of the memory
        of GPUs and node, but no longer than so many seconds. Return whether they have."""
        deadline = time.monotonic() + limit_s
        while any(runs(pid) for pid in self._local_pids):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.01)
        return True

    def kill(self) -> None:
        """End every process at once; those of this node even if they are stopped or hang."""
        for watcher in self._watchers:
            watcher.cancel()
        for rank in self._claimed:
            rank.kill()
        for pid in self._local_pids:
            _kill_actor_process(pid)
        for actor in [self._scheduler, *self._workers]:
            if actor is not None:
                ray.kill(actor)
        if self._addresses is not None:
            remove_sockets(self._addresses)


def _kill_actor_process(pid: int) -> None:
    """SIGKILL, if the process id still names a Ray actor. A stopped process obeys nothing else."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read(5) == b"ray::":
                os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass
