"""Engines of several ranks under random schedules: rank 0 drives, judges, and tells the others what its rank does.

The scheduler is on rank 0 alone, as in a replica. So the other ranks follow plans, copies of pages and mishaps in the
order in which rank 0 comes to them.
"""

from __future__ import annotations

import queue
from typing import Any

import torch
import torch.distributed as dist

from kernels import page
from kernels.mla_decode import invariant
from kernels.page import PAGE_TOKENS
from tests.workers.harness import InlineEngine
from workers.cache.paged import PagedCache
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.parallel.mesh import CACHE_SHARDS
from workers.protocol.plan import StepPlan
from workers.protocol.tiers import DiskMoved, Moved, Moves
from workers.rank.rank import Rank
from workers.rank.runner import PlanError
from workers.scheduler import pages as placing

CPU = torch.device("cpu")
TIMEOUT_S = 120.0


def strike(cache: PagedCache, page: int, offset: int) -> None:
    """Let an entry be NaN in every layer, on the ranks that have it. `page`: by its global id."""
    for layer, spec in zip(cache.layers, cache.specs, strict=True):
        entries = layer.shape[1]
        chosen_PK = (torch.arange(entries) == offset * entries // PAGE_TOKENS).unsqueeze(0)
        _, places = cache.places([page], spec)
        for place in map(int, places):
            spec.poison(layer[place : place + 1], chosen_PK)


def cut_small_pieces() -> None:
    """Let pieces of rows in invariant mode have one page, for as long as this process lives: rows of a schedule have a
    few pages, and are to have some on each rank."""
    for module in (page, placing, invariant):
        module.PIECE_PAGES = 1  # type: ignore[misc]


def groups_of(group: Group) -> dict[int, Group]:
    """The group with each number of shards that its ranks may have; all ranks together."""
    ranks = group.mesh.world.size
    return {count: group.sharing_out(count, CPU, TIMEOUT_S) for count in CACHE_SHARDS if ranks % count == 0}


class Ranks:
    """All ranks, as rank 0 has them."""

    def __init__(self, group: Group) -> None:
        """`group`: connected, and without shards."""
        cut_small_pieces()
        self.size, self._groups = group.mesh.world.size, groups_of(group)

    def engine(self, config: EngineConfig) -> InlineEngine:
        """A fresh replica on all ranks."""
        assert config.cache_shards != "auto"
        self.tell("start", config)
        engine = InlineEngine(config, group=self._groups[config.cache_shards])
        honest = engine.runner.execute

        def execute(plan: StepPlan) -> Any:
            self.tell("plan", plan)
            return honest(plan)

        engine.runner.execute = execute  # type: ignore[method-assign]
        return engine

    def tell(self, what: str, *of: Any) -> None:
        """Have the other ranks do something."""
        dist.broadcast_object_list([(what, *of)], src=0)

    def answers(self, own: Moved | DiskMoved) -> list[Moved | DiskMoved]:
        """What all ranks say of copies that they were told to make."""
        found: list[Any] = [None] * self.size
        dist.gather_object(own, found, dst=0)
        return found


def follow(group: Group) -> None:
    """Do what rank 0 says, until it says that this is all."""
    cut_small_pieces()
    groups, moved = groups_of(group), queue.Queue[Moved | DiskMoved]()
    rank: Rank | None = None
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        what, *of = told[0]
        if what == "end":
            return
        if what == "start":
            (config,) = of
            rank = Rank(config, groups[config.cache_shards], CPU, on_moved=moved.put)
            continue
        assert rank is not None
        if what == "plan":
            try:
                rank.runner.execute(of[0])
            except PlanError:  # which rank 0 says
                continue
        elif what == "moves":
            mover = rank.mover if isinstance(of[0], Moves) else rank.disk
            assert mover is not None
            mover.move(of[0])
            dist.gather_object(moved.get(timeout=TIMEOUT_S), None, dst=0)
        elif what == "strike":
            strike(rank.runner.parts.cache, *of)
        elif what == "close" and rank.disk is not None:
            rank.disk.close()
