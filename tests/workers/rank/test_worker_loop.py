"""The loop of a worker on a device that computes while the host goes on: what is launched before what is waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from workers.channel.sockets import Receiver, Sender
from workers.protocol.messages import Shutdown
from workers.rank.runner import Runner
from workers.rank.worker_process import _serve


@dataclass
class World:
    """A scheduler with two plans under way and a device that takes `duration` looks at it a step; a new plan takes
    `latency` looks. Everything is noted in `events`."""

    device: torch.device
    steps: int
    duration: int = 50
    latency: int = 10
    events: list[tuple[str, int]] = field(default_factory=list)
    now: int = 0
    free_at: int = 0
    idle: int = 0
    planned: int = 0
    coming: deque[tuple[int, int]] = field(default_factory=deque)

    def plan(self) -> None:
        if self.planned < self.steps:
            self.planned += 1
            self.coming.append((self.now + self.latency, self.planned))

    def receive(self, timeout_ms: int | None = None) -> Any:
        self.now += 1
        assert self.now < 100_000
        if self.coming and timeout_ms is None:
            self.now = max(self.now, self.coming[0][0])
        if self.coming and self.coming[0][0] <= self.now:
            return self.coming.popleft()[1]
        done = sum(what == "collect" for what, _ in self.events)
        return Shutdown() if done == self.steps else None

    def launch(self, plan: int) -> Step:
        self.events.append(("launch", plan))
        self.idle += max(self.now - self.free_at, 0) if plan > 1 else 0
        self.free_at = max(self.free_at, self.now) + self.duration
        return Step(self, plan, self.free_at)

    def collect(self, step: Step) -> int:
        self.now = max(self.now, step.end)
        self.events.append(("collect", step.plan))
        return step.plan

    def send(self, step: int) -> None:
        self.plan()


@dataclass
class Step:
    world: World
    plan: int
    end: int

    @property
    def finished(self) -> bool:
        self.world.now += 1
        return self.world.now >= self.end


def served(device: str) -> World:
    world = World(torch.device(device), steps=20)
    world.plan()
    world.plan()
    _serve(cast(Runner, world), cast(Receiver, world), cast(Sender, world), 0)
    return world


def test_a_device_never_waits_for_a_plan_that_comes_while_it_computes() -> None:
    world = served("cuda")
    assert world.idle == 0
    assert [plan for what, plan in world.events if what == "collect"] == list(range(1, 21))
    for plan in range(2, 20):
        assert world.events.index(("launch", plan + 1)) < world.events.index(("collect", plan))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_is_launched_and_collected_in_order(device: str) -> None:
    world = served(device)
    for what in ("launch", "collect"):
        assert [plan for kind, plan in world.events if kind == what] == list(range(1, 21))
    if device == "cpu":
        assert [plan for _, plan in world.events] == [plan for plan in range(1, 21) for _ in range(2)]
