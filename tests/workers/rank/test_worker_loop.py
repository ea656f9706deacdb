"""The loop of a worker on a device that computes while the host goes on: what is launched before what is waited for,
and what waiting costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from simulated_device import LOOK_S, Device, Host

from workers.channel.sockets import Receiver, Sender
from workers.protocol.captures import CapturePortion
from workers.protocol.messages import Shutdown
from workers.rank.captures import Captures
from workers.rank.runner import Runner
from workers.rank.waiting import SLICES, StepEnd, Waiting
from workers.rank.worker_process import _serve

LAUNCH_S, RECEIVE_S, WAKE_S = 400e-6, 5e-6, 10e-6


@dataclass
class World:
    """A scheduler with `ahead` plans under way and a device that takes `duration` for each; a new plan comes `latency`
    after a result. Everything is noted in `events`."""

    device: torch.device
    steps: int
    duration: Callable[[int], float] = lambda step: 10e-3
    latency: Callable[[int], float] = lambda step: 1e-3
    ahead: int = 2
    shutdown_at: float | None = None
    capture_before: int = 0
    """Number of the plan before which graphs are to be captured; 0: none are."""
    events: list[tuple[str, int]] = field(default_factory=list)
    host: Host = field(default_factory=Host)
    planned: int = 0
    done: int = 0
    coming: deque[tuple[float, int]] = field(default_factory=deque)
    overslept: list[float] = field(default_factory=list)
    """Seconds that each plan lay there before it was received, but for those that came while the host was at work."""
    late: list[float] = field(default_factory=list)
    """Seconds after its step's end at which each result was sent."""
    slept_until: float = -1.0

    def __post_init__(self) -> None:
        self.gpu = Device(self.host)
        self.waiting = Waiting(self.host.clock, self.host.sleep)

    def plan(self) -> None:
        if self.planned < self.steps:
            self.planned += 1
            self.coming.append((self.host.now + self.latency(self.planned), self.planned))

    def next_message(self) -> float:
        """Return the time at which the next message comes."""
        shutdown = float("inf") if self.shutdown_at is None else self.shutdown_at
        return min(self.coming[0][0] if self.coming else float("inf"), shutdown)

    def wait(self, seconds: float) -> None:
        asked = self.host.now
        self.host.sleep(seconds)
        if (comes := self.next_message()) < self.host.now:
            self.host.now = max(comes, asked) + WAKE_S
        self.slept_until = self.host.now

    def capture(self, message: CapturePortion) -> Captured:
        """Capture graphs, which takes a while."""
        self.events.append(("capture", message.number))
        self.host.work(0.3)
        return Captured(message.number)

    def receive(self, timeout_ms: int | None = None) -> Any:
        just_slept = self.slept_until == self.host.now
        self.host.work(RECEIVE_S)
        assert self.host.now < 100
        if timeout_ms is None and self.done < self.steps:
            self.host.now = max(self.host.now, self.next_message())
        if self.shutdown_at is not None and self.shutdown_at <= self.host.now:
            return Shutdown()
        if self.coming and self.coming[0][0] <= self.host.now:
            if self.coming[0][1] == self.capture_before:
                self.capture_before = 0
                return CapturePortion(1, ())
            comes, plan = self.coming.popleft()
            if just_slept:
                self.overslept.append(self.host.now - comes)
            return plan
        return Shutdown() if self.done == self.steps else None

    def launch(self, plan: int) -> Step:
        self.events.append(("launch", plan))
        begun = self.host.now
        if self.device.type == "cpu":
            self.host.work(self.duration(plan))
            return Step(plan, None, self.host.now)
        end = self.gpu.launch(self.duration(plan))
        self.host.work(LAUNCH_S)
        return Step(plan, self.waiting.launched("decode", end, begun), end.at)

    def collect(self, step: Step) -> Step:
        if step.done is not None:
            step.done.wait()
        self.events.append(("collect", step.plan))
        return step

    def send(self, step: Step | Captured) -> None:
        if isinstance(step, Captured):
            self.events.append(("captured", step.number))
            return
        self.late.append(self.host.now - step.end)
        self.done += 1
        self.plan()

    @property
    def share(self) -> float:
        """Share of a processor."""
        return self.host.busy / self.host.now


@dataclass
class Captured:
    number: int


@dataclass
class Step:
    plan: int
    done: StepEnd | None
    end: float

    @property
    def finished(self) -> bool:
        return self.done is None or self.done.passed


def served(device: str = "cuda", steps: int = 100, **fields: Any) -> World:
    world = World(torch.device(device), steps, **fields)
    for _ in range(world.ahead):
        world.plan()
    captures = cast(Captures, world)
    _serve(cast(Runner, world), cast(Receiver, world), cast(Sender, world), captures=captures, samples=True)
    return world


@pytest.mark.parametrize("duration", [1.6e-3, 10e-3, 30e-3])
def test_a_device_never_waits_for_a_plan_that_comes_while_it_computes(duration: float) -> None:
    world = served(duration=lambda step: duration)
    assert world.gpu.idle == 0
    assert [plan for what, plan in world.events if what == "collect"] == list(range(1, 101))
    for plan in range(2, 100):
        assert world.events.index(("launch", plan + 1)) < world.events.index(("collect", plan))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_is_launched_and_collected_in_order(device: str) -> None:
    world = served(device)
    for what in ("launch", "collect"):
        assert [plan for kind, plan in world.events if kind == what] == list(range(1, 101))
    if device == "cpu":
        assert [plan for _, plan in world.events] == [plan for plan in range(1, 101) for _ in range(2)]
        assert not world.host.sleeps


def test_results_do_not_wait_for_a_capture() -> None:
    world = served(capture_before=7)
    at = world.events.index(("capture", 1))
    assert world.events[at + 1] == ("captured", 1)
    assert ("collect", 6) in world.events[:at]
    assert ("launch", 7) in world.events[at:]
    assert max(world.late) < 0.1
    assert [plan for what, plan in world.events if what == "collect"] == list(range(1, 101))


@pytest.mark.parametrize(("milliseconds", "most"), [(10, 0.25), (30, 0.12), (100, 0.07)])
def test_steps_leave_the_processor_alone_and_their_results_are_not_late(milliseconds: float, most: float) -> None:
    world = served(duration=lambda step: 1e-3 * milliseconds)
    assert world.share < most
    assert max(world.late) < 20e-6


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_plan_wakes_the_loop_and_results_are_not_late(ahead: int) -> None:
    """Be it that the plan is late, or that the scheduler makes only one at a time: then nothing else is launched."""
    world = served(ahead=ahead, latency=lambda step: 6.3e-3, duration=lambda step: 20e-3)
    assert len(world.overslept) > 90 or ahead == 1
    assert max(world.overslept, default=0.0) < 20e-6
    assert max(world.late) < 20e-6
    assert world.share < 0.12


def test_results_of_short_steps_are_as_early_as_without_any_sleep() -> None:
    world = served(duration=lambda step: 1e-3)
    assert max(world.late[1:-1]) <= 1e-3  # a step behind is launched first
    assert not world.host.sleeps


def test_a_step_that_is_shorter_than_those_before_is_collected_soon() -> None:
    for ahead in (1, 2):
        world = served(ahead=ahead, duration=lambda step: 12e-3 if step == 50 else 40e-3)
        assert world.late[49] < 12e-3 / SLICES + 0.1e-3
        assert max(world.late[:49] + world.late[50:]) < 20e-6


def test_a_shutdown_ends_the_loop_while_a_step_is_under_way() -> None:
    """The scheduler has no plan for a while after some steps: the loop sleeps, and is told to end."""
    world = served(
        ahead=1, steps=30, latency=lambda step: 1e-3, duration=lambda step: 1.0 if step == 20 else 0.1, shutdown_at=2.0
    )
    assert ("launch", 20) in world.events
    assert ("collect", 20) not in world.events
    assert 2.0 <= world.host.now < 2.0 + 20e-6 + 2 * LOOK_S


def test_the_first_steps_are_not_late_either() -> None:
    world = served(steps=5)
    assert max(world.late) < 20e-6
