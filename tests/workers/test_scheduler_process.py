"""The scheduler's process between a front and ranks that the test plays: what it waits for, and what it reports."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from workers.channel import connect_receiver, connect_sender
from workers.config import EngineConfig
from workers.messages import EngineStats, Fault, Heartbeat, Outputs, Ready, Request, Shutdown, ToFront, ToWorker
from workers.plan import SamplingParams, StepPlan, StepResult
from workers.scheduler_process import EngineFailed, SchedulerProcess


class World:
    """The ends of the channel that others hold. `silent` ranks send no heartbeats."""

    def __init__(self, process: SchedulerProcess, ranks: int) -> None:
        addresses = process.addresses
        self.requests = connect_sender(addresses.requests, addresses.keys)
        self.outputs = connect_receiver(addresses.outputs, ToFront, addresses.keys)
        self.results = connect_sender(addresses.results, addresses.keys)
        self.plans = [connect_receiver(address, ToWorker, addresses.keys) for address in addresses.plans]
        self.silent: set[int] = set()
        self._ended = threading.Event()
        beating = connect_sender(addresses.results, addresses.keys)

        def beat() -> None:
            while not self._ended.wait(0.05):
                for rank in set(range(ranks)) - self.silent:
                    beating.send(Heartbeat(rank))
            beating.close(linger_ms=0)

        self._thread = threading.Thread(target=beat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        for end in (self.requests, self.results):
            end.close(linger_ms=0)
        for end in (self.outputs, *self.plans):
            end.close()

    def hears(self, kind: type, timeout_s: float = 5.0) -> Any:
        """The front's next message of this kind, or a fault that comes instead."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.outputs.receive(timeout_ms=int(left * 1000) + 1)
            if isinstance(message, kind | Fault):
                return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def fault(self) -> str:
        found = self.hears(Fault)
        return str(found.cause)

    def ready(self, ranks: int, **of_last: int) -> None:
        for rank in range(ranks):
            fields = {"pages": 9, "max_context": 200, "vocab_size": 50} | (of_last if rank == ranks - 1 else {})
            self.results.send(Ready(rank, **fields))

    def ask(self, name: str, tokens: int = 50) -> None:
        self.requests.send(Request(name, (1, 2, 3), SamplingParams(tokens)))

    def plan(self) -> StepPlan:
        plan = self.plans[0].receive(timeout_ms=5000)
        assert isinstance(plan, StepPlan)
        return plan

    def answer(self, plan: StepPlan) -> None:
        self.results.send(StepResult(plan.step, ((7,),) * plan.layout.sampled_rows, 0.001))


@contextmanager
def played(ranks: int = 1, serving: bool = True, **settings: Any) -> Iterator[World]:
    """A world in which the process serves, or waits for its ranks."""
    defaults = {"max_rows": 1, "width": 1, "token_budget": 64, "queue_limit": 1, "tensor_parallel": ranks}
    process = SchedulerProcess(EngineConfig(model="demo", **{**defaults, **settings}))

    def run() -> None:
        with suppress(EngineFailed):
            process.run()

    world, thread = World(process, ranks), threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if serving:
            world.ready(ranks)
            assert isinstance(world.hears(Ready), Ready)
        yield world
    finally:
        world.requests.send(Shutdown())
        thread.join(10)
        world.close()
    assert not thread.is_alive()


def test_ranks_that_hold_different_things_do_not_serve() -> None:
    with played(2, serving=False) as world:
        world.ready(2, pages=8)
        assert "ranks disagree on what they hold" in world.fault()


def test_ranks_that_do_not_come_are_named() -> None:
    with played(3, serving=False, start_timeout_s=1.0) as world:
        world.ready(1)
        assert world.fault() == "ranks [1, 2] were not ready within 1 s"


@pytest.mark.parametrize("serving", [False, True])
def test_the_cause_behind_a_failed_collective_is_what_is_told(serving: bool) -> None:
    with played(2, serving=serving) as world:
        world.results.send(Fault("rank 0: PeerLost", 0, secondary=True))
        world.results.send(Fault("rank 1: out of memory", 1, lasting=True))
        found = world.hears(Fault)
        assert (found.cause, found.lasting) == ("rank 1: out of memory", True)


def test_a_failed_collective_is_told_when_nothing_else_is() -> None:
    with played(2) as world:
        world.results.send(Fault("rank 0: PeerLost", 0, secondary=True))
        assert world.fault() == "rank 0: PeerLost"


@pytest.mark.alone
def test_a_silent_rank_is_named_though_others_speak() -> None:
    with played(2, heartbeat_timeout_s=1.5) as world:
        world.silent.add(1)
        assert re.fullmatch(r"rank 1 has been silent for [12]\.\d s", world.fault())


@pytest.mark.alone
def test_a_step_that_hangs_is_named() -> None:
    with played(step_timeout_s=0.5) as world:
        world.ask("a")
        world.plan()
        assert re.fullmatch(r"step 1 made no progress for [01] s", world.fault())


@pytest.mark.alone
def test_the_time_of_a_step_begins_when_the_one_before_it_ends() -> None:
    """Two are launched at once: the second waits for as long as the first runs, and does not hang."""
    with played(step_timeout_s=2.0) as world:
        world.ask("a", tokens=5)
        for plan in [world.plan(), world.plan()]:
            time.sleep(1.2)
            world.answer(plan)
            found = world.hears(Outputs)
            assert isinstance(found, Outputs), found.cause


def test_a_full_queue_is_told_apart_from_what_is_impossible() -> None:
    with played() as world:
        world.requests.send(Request("impossible", (), SamplingParams(1)))
        [refused] = world.hears(Outputs).items
        assert (refused.request_id, refused.overloaded) == ("impossible", False)
        for name in ("runs", "waits", "too many"):
            world.ask(name)
        [refused] = world.hears(Outputs).items
        assert (refused.request_id, refused.overloaded) == ("too many", True)
        assert world.hears(EngineStats).queue_limit == 1


def test_ranks_are_told_to_end_whenever_the_front_says_so() -> None:
    for serving in (False, True):
        with played(2, serving=serving) as world:
            world.requests.send(Shutdown())
            for plans in world.plans:
                assert isinstance(plans.receive(timeout_ms=5000), Shutdown)
