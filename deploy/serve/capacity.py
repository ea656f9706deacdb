"""Whether the nodes of a Ray have room for an application, and what its replicas wait for where they do not.

Ray itself waits, for as long as it takes, and says so in the logs of its own processes alone.

Written for Ray 2.60.0, whose Serve has a private prefix for the names of what it asks places for. Without it a line is
logged, and the prefix of that version is looked for.
"""

from __future__ import annotations

import math
import time
from typing import Final

import ray

from deploy.config.application import ServeConfig
from deploy.serve.application import bundles, settled
from kernels.private_api import PrivateApi

_NAMES: Final = PrivateApi(
    "ray",
    ("ray.serve._private.common.REPLICA_ID_FULL_ID_STR_PREFIX",),
    "a start may not say for what its replicas wait; `ray status` does",
)
PATIENCE_S = 5.0
"""Seconds a replica may be without a place before that is news: Ray looks for one every second."""
LOOK_PERIOD_S = 1.0


def needs(config: ServeConfig, replicas: int) -> dict[str, float]:
    """GPUs and cores that so many replicas of `settled` settings take. A rank's share is of one GPU: several ranks need
    whole ones."""
    ranks, gpus = replicas * config.engine.mesh().world.size, config.gpus_per_rank or 0.0
    cores = replicas * sum(bundle["CPU"] for bundle in bundles(config))
    return {"GPU": gpus if ranks == 1 or not gpus else math.ceil(ranks / math.floor(1 / gpus + 1e-9)), "CPU": cores}


def shortage(config: ServeConfig, *, all_at_once: bool = True) -> str:
    """Return the resources that replicas need and the nodes of this Ray lack; empty if they have them. `all_at_once`:
    for as many replicas as there may ever be, else for those of a start."""
    replicas = config.most_replicas if all_at_once else config.least_replicas
    there = ray.cluster_resources()
    short = [
        f"{_counted(needed, name)} where there are {there.get(name, 0):g}"
        for name, needed in needs(settled(config), replicas).items()
        if needed > there.get(name, 0)
    ]
    if not short:
        return ""
    name = "replicas"
    if config.autoscaling.max_replicas is not None:
        name = "autoscaling.max_replicas" if all_at_once else "autoscaling.min_replicas"
    return f"{name} = {replicas}, tensor_parallel = {config.engine.tensor_parallel} take {', '.join(short)}"


class WaitingReplicas:
    """Watches for replicas that Ray has found no place for."""

    def __init__(self, application: str, config: ServeConfig) -> None:
        self._prefix = f"{_replica_prefix()}{application}#"
        self._config = settled(config)
        self._takes = {name: needed for name, needed in needs(self._config, 1).items() if needed}
        self._since: dict[str, float] = {}
        self._capacity_since = math.inf
        self._told, self._looked = 0, -math.inf
        self.line = ""
        """Resources that are waited for; empty while every replica has its place."""

    def news(self) -> list[str]:
        """`line`, if the number of replicas that wait has changed since the last call."""
        now = time.monotonic()
        if now - self._looked < LOOK_PERIOD_S:
            return []
        self._looked, groups = now, ray.util.placement_group_table().values()
        waiting = [g["name"] for g in groups if g["state"] == "PENDING" and g["name"].startswith(self._prefix)]
        self._since = {name: self._since.get(name, now) for name in waiting}
        count = sum(now - since >= PATIENCE_S for since in self._since.values())
        free = ray.available_resources() if waiting else {}
        # Room that has just come, from replicas that are replaced for example, is about to be given out.
        capacity = bool(waiting) and all(needed <= free.get(name, 0) for name, needed in self._takes.items())
        self._capacity_since = min(self._capacity_since, now) if capacity else math.inf
        if count == self._told or (capacity and now - self._capacity_since < PATIENCE_S):
            return []
        self._told = count
        self.line = self._describe(count, free, capacity) if count else ""
        return [self.line] if count else []

    def _describe(self, count: int, free: dict[str, float], capacity: bool) -> str:
        takes, there = self._takes, ray.cluster_resources()
        have = ", ".join(f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}s" for name in takes)
        most = "" if self._config.autoscaling.max_replicas is None else "at most "
        line = f"{count} of {most}{self._config.most_replicas} replicas wait for room"
        line = f"{line}: one takes {_all(takes)}, free are {have}"
        if capacity:
            front, rank = bundles(self._config)[:2]
            return f"{line}, but no node has {_all(front)} for its front, or enough have not {_all(rank)} for a rank"
        return f"{line} (`ray status` shows what the nodes have)"


def _replica_prefix() -> str:
    if not _NAMES.there():
        return "SERVE_REPLICA::"
    from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX

    return str(REPLICA_ID_FULL_ID_STR_PREFIX)


def _all(resources: dict[str, float]) -> str:
    return " and ".join(_counted(number, name) for name, number in sorted(resources.items(), reverse=True))


def _counted(number: float, name: str) -> str:
    return f"{number:g} {name}{'' if number == 1 else 's'}"
