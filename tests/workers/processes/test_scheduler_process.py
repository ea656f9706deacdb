"""The scheduler's process between a front and ranks that the test plays: what it waits for, and what it reports."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from workers import config
from workers.channel.heartbeats import AwakeClock
from workers.channel.sockets import connect_receiver, connect_sender, connect_subscriber
from workers.config import EngineConfig
from workers.processes.scheduler_process import EngineFailed, SchedulerProcess
from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.messages import (
    EngineStats,
    Fault,
    Heartbeat,
    Outputs,
    Ready,
    Request,
    Requests,
    Shutdown,
    TakeOver,
    ToFront,
    ToWorker,
)
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.protocol.report import StepTime
from workers.protocol.request import Prompt
from workers.protocol.tiers import Pinned
from workers.scheduler import Scheduler, step_limit


class World:
    """The ends of the channel that others hold. `silent` ranks send no heartbeats."""

    def __init__(self, process: SchedulerProcess, ranks: int) -> None:
        self.addresses = addresses = process.addresses
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

    def hears(self, kind: type, timeout_s: float = 60.0) -> Any:
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

    def goes_on(self) -> None:
        """Assert that the process gives nothing up, once it has looked at its clock some times more."""
        for _ in range(3):
            found = self.hears(EngineStats)
            assert isinstance(found, EngineStats), found.cause

    def ready(self, ranks: int, **of_last: Any) -> None:
        for rank in range(ranks):
            fields = {"pages": 9, "max_context": 200, "vocab_size": 50} | (of_last if rank == ranks - 1 else {})
            self.results.send(Ready(rank, **fields))

    def ask(self, name: str, tokens: int = 50) -> None:
        self.requests.send(Requests.of([Request(name, (1, 2, 3), SamplingParams(tokens))]))

    def plan(self) -> StepPlan:
        plan = self.plans[0].receive(timeout_ms=60_000)
        assert isinstance(plan, StepPlan)
        return plan

    def answer(self, plan: StepPlan) -> None:
        self.results.send(StepResult(plan.step, ((7,),) * plan.layout.sampled_rows, 0.001))


@contextmanager
def played(
    ranks: int = 1,
    serving: bool = True,
    standby: bool = False,
    begin: Callable[[World], None] | None = None,
    **settings: Any,
) -> Iterator[World]:
    """A world in which the process serves, or waits for its ranks. `begin`: tells it something before it starts; then
    no rank sends heartbeats."""
    defaults = {"max_rows": 1, "width": 1, "token_budget": 64, "queue_limit": 1, "tensor_parallel": ranks}
    process = SchedulerProcess(EngineConfig(model="demo", **{**defaults, **settings}), standby=standby)

    def run() -> None:
        with suppress(EngineFailed):
            process.run()

    world, thread = World(process, ranks), threading.Thread(target=run, daemon=True)
    if begin is not None:
        world.silent |= set(range(ranks))
        begin(world)
        assert process._binding.results.socket.poll(60_000)
    thread.start()
    try:
        if serving:
            world.ready(ranks)
            assert isinstance(world.hears(Ready), Ready)
        yield world
    finally:
        world.requests.send(Shutdown())
        thread.join(60)
        world.close()
    assert not thread.is_alive()


def test_a_scheduler_that_stood_by_begins_anew_when_it_takes_over() -> None:
    """What it was asked while it stood by is forgotten, and what ranks still say of that reaches nobody."""
    with played(2, standby=True) as world:
        world.ask("rehearsal")
        old = world.plan()
        world.requests.send(TakeOver())
        for plans in world.plans:
            message = plans.receive(timeout_ms=60_000)
            while isinstance(message, StepPlan):  # planned ahead
                message = plans.receive(timeout_ms=60_000)
            assert isinstance(message, TakeOver)
        world.answer(old)  # late
        world.ready(1, pages=70)
        world.results.send(Ready(1, pages=70, max_context=200, vocab_size=50))
        assert world.hears(Ready).pages == 70
        world.ask("a", tokens=1)
        plan = world.plan()
        assert plan.step == 1
        world.answer(plan)
        assert [item.request_id for item in world.hears(Outputs).items] == ["a"]
        stats = world.hears(EngineStats)
        while not stats.steps:
            stats = world.hears(EngineStats)
        assert (stats.pages_total, stats.steps) == (69, 1)
        world.requests.send(TakeOver())
        assert world.fault() == "an engine that serves was told to take the place of another"


@pytest.mark.parametrize(("fate", "step_timeout_s"), [("silence", 0.5), ("an error", 60.0)])
def test_an_engine_that_cannot_take_over_says_so(fate: str, step_timeout_s: float) -> None:
    with played(2, standby=True, step_timeout_s=step_timeout_s) as world:
        world.requests.send(TakeOver())
        assert isinstance(world.plans[0].receive(timeout_ms=60_000), TakeOver)
        if fate == "an error":
            world.results.send(Fault("rank 1: the memory of its cache is not kept any more", 1))
            assert world.fault() == "rank 1: the memory of its cache is not kept any more"
        else:
            world.ready(1)
            assert world.fault() == "ranks [1] were not ready within 0 s"


def test_ranks_that_hold_different_things_do_not_serve() -> None:
    with played(2, serving=False) as world:
        world.ready(2, pages=8)
        assert "ranks disagree on what they hold" in world.fault()


def test_ranks_that_loaded_different_models_do_not_serve() -> None:
    with played(3, serving=False) as world:
        world.ready(3, root=b"sixteen bytes...")
        fault = world.hears(Fault)
        assert "ranks [2] have loaded another model than rank 0" in fault.cause
        assert fault.lasting


def test_the_front_is_told_the_root_of_the_keys_and_reports_name_it() -> None:
    with played(2, serving=False) as world:
        for rank in range(2):
            world.results.send(Ready(rank, pages=9, max_context=200, vocab_size=50, root=b"sixteen bytes..."))
        assert world.hears(Ready).root == b"sixteen bytes..."
        assert world.hears(EngineStats).key_root == b"sixteen bytes..."


def test_the_front_is_told_what_rank_0_took_to_start() -> None:
    with played(2, serving=False) as world:
        for rank in (1, 0):
            world.results.send(Ready(rank, 9, 200, 50, start_s={"weights": 2.0 - rank, "self-test": 3.0}))
        assert list(world.hears(Ready).start_s.items()) == [("weights", 2.0), ("self-test", 3.0)]


def test_ranks_that_do_not_come_are_named() -> None:
    with played(3, serving=False, begin=lambda world: world.ready(1), start_timeout_s=1.0) as world:
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
        assert re.fullmatch(r"rank 1 has been silent for \d+\.\d s", world.fault())


def test_nobody_is_given_up_because_everything_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine that is moved, say: by the clock ranks are silent for hours then, and so is a step."""
    lost_s = 0.0
    clock = AwakeClock(lambda: time.monotonic() + lost_s)
    monkeypatch.setattr("workers.processes.scheduler_process.AwakeClock", lambda: clock)
    with played(2, heartbeat_timeout_s=60.0, step_timeout_s=60.0) as world:
        world.ask("a", tokens=1)
        plan = world.plan()
        lost_s = 7200.0
        world.goes_on()
        world.answer(plan)
        assert [item.request_id for item in world.hears(Outputs).items] == ["a"]


@pytest.mark.alone
def test_a_step_that_hangs_is_named() -> None:
    with played(step_timeout_s=0.5) as world:
        world.ask("a")
        world.plan()
        assert re.fullmatch(r"step 1 made no progress for \d+ s", world.fault())


class StillClock:
    """A clock that stands still until the test sets it."""

    def __init__(self) -> None:
        self.time, self._looks = 0.0, 0

    def look(self) -> float:
        self._looks += 1
        return self.time

    def set(self, seconds: float) -> None:
        """Set it once whoever looks at it has seen what goes on at the time that it shows."""
        looks, deadline = self._looks, time.monotonic() + 60
        while self._looks < looks + 2:
            assert time.monotonic() < deadline, "nobody looks at the clock"
            time.sleep(0.01)
        self.time = seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StillClock:
    """By which the process measures silence and steps."""
    made = StillClock()
    monkeypatch.setattr("workers.processes.scheduler_process.AwakeClock", lambda: made)
    return made


@pytest.mark.parametrize(
    ("least_s", "measured_s", "limit_s"), [(0.4, 0.01, 0.4), (0.1, 0.03, 0.6), (0.1, None, 2.0), (0.1, 9.0, 2.0)]
)
def test_a_step_that_takes_many_times_what_it_should_is_given_up_sooner(
    least_s: float, measured_s: float | None, limit_s: float, monkeypatch: pytest.MonkeyPatch, clock: StillClock
) -> None:
    """And never later than any other: where nothing was measured, or steps are very long."""
    monkeypatch.setattr(step_limit, "LEAST_S", least_s)
    monkeypatch.setattr(config, "LONGEST_STEP_S", 2.0)
    times = () if measured_s is None else (StepTime(1, 1, measured_s), StepTime(1, 1, measured_s, prompt_tokens=60))
    with played(serving=False) as world:
        world.ready(1, step_times=times)
        assert isinstance(world.hears(Ready), Ready)
        world.ask("a")
        plan = world.plan()
        clock.set(0.9 * limit_s)
        world.goes_on()  # a slow step is none that hangs
        world.answer(plan)
        assert isinstance(world.hears(Outputs), Outputs)
        clock.set(1.8 * limit_s)
        world.goes_on()
        clock.set(2.0 * limit_s)
        assert re.fullmatch(r"step 2 made no progress for \d+ s", world.fault())


@pytest.mark.parametrize("settings", [{"graphs": False}, {"standby": True}])
def test_a_step_has_as_long_as_ever_where_it_may_take_longer_than_was_measured(
    settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch, clock: StillClock
) -> None:
    """Without graphs nothing compiles its kernels ahead, and the self-test has measured a few steps whose kernels were
    compiled. Of an engine that stands by the GPU may be busy with the one that serves."""
    monkeypatch.setattr(step_limit, "LEAST_S", 0.1)
    monkeypatch.setattr(config, "LONGEST_STEP_S", 2.0)
    with played(serving=False, **settings) as world:
        world.ready(1, step_times=(StepTime(1, 1, 0.01), StepTime(1, 1, 0.01, prompt_tokens=60)))
        assert isinstance(world.hears(Ready), Ready)
        world.ask("a")
        world.plan()
        clock.set(1.9)
        world.goes_on()
        clock.set(2.1)
        assert re.fullmatch(r"step 1 made no progress for \d+ s", world.fault())


def test_the_time_of_a_step_begins_when_the_one_before_it_ends(clock: StillClock) -> None:
    """Two are launched at once: the second waits for as long as the first runs, and does not hang."""
    with played(step_timeout_s=2.0) as world:
        world.ask("a", tokens=5)
        for number, plan in enumerate([world.plan(), world.plan()]):
            clock.set(1.9 * (number + 1))
            world.goes_on()
            world.answer(plan)
            found = world.hears(Outputs)
            assert isinstance(found, Outputs), found.cause


def test_a_full_queue_is_told_apart_from_what_is_impossible() -> None:
    with played() as world:
        world.requests.send(Requests.of([Request("impossible", (), SamplingParams(1))]))
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
                assert isinstance(plans.receive(timeout_ms=60_000), Shutdown)


def test_requests_that_come_together_are_taken_in_between_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many and however long they are: what they would take in one iteration holds up everybody else."""
    turns: list[list[Prompt]] = [[]]
    add, plan = Scheduler.add, Scheduler.plan

    def adding(scheduler: Scheduler, request: Request) -> Any:
        assert isinstance(request.prompt, Prompt)
        turns[-1].append(request.prompt)
        return add(scheduler, request)

    def planning(scheduler: Scheduler) -> Any:
        turns.append([])
        return plan(scheduler)

    monkeypatch.setattr(Scheduler, "add", adding)
    monkeypatch.setattr(Scheduler, "plan", planning)
    with played(queue_limit=10_000) as world:
        # What cannot be served is looked at no less: its ids are, and it is answered.
        strangers = [Prompt.of([index, *range(30_000)]) for index in range(20)]
        shared = Prompt.of(range(30_000))
        for index, prompt in enumerate(strangers):
            world.requests.send(Requests.of([Request(f"stranger {index}", prompt, SamplingParams(1))]))
        choices = [Request(f"choice {index}", shared, SamplingParams(1)) for index in range(600)]
        world.requests.send(Requests.of(choices))
        world.ask("last", tokens=1)
        world.answer(world.plan())
        assert len(turns[0]) < 10
        refused: set[str] = set()
        while len(refused) < 620:
            refused |= {item.request_id for item in world.hears(Outputs).items if item.refused}
    taken = [turn for turn in turns if turn]
    assert sum(map(len, taken)) == 621
    seen: set[int] = set()
    for turn in taken:
        prompts = {id(prompt): prompt.length for prompt in turn}
        assert sum(length for prompt, length in prompts.items() if prompt not in seen) < 100_000 + 30_001
        assert len(turn) <= 401
        seen |= prompts.keys()
    assert len({id(prompt) for turn in taken for prompt in turn if prompt.length == 30_000}) == 1


def test_a_loop_that_is_busy_for_longer_than_silence_may_last_is_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that is stuck is not alive. One iteration is as long as the pulse's clock says, on whatever machine."""
    add, busy, over = Scheduler.add, threading.Event(), threading.Event()
    clock = StillClock()

    def adding(scheduler: Scheduler, request: Request) -> Any:
        busy.set()
        while not over.is_set():
            sum(range(1000))
        return add(scheduler, request)

    def beats(count: int) -> None:
        while pulse.receive(timeout_ms=0) is not None:
            pass
        for _ in range(count):
            assert pulse.receive(timeout_ms=60_000) == Heartbeat(-1)

    monkeypatch.setattr(Scheduler, "add", adding)
    monkeypatch.setattr("workers.channel.heartbeats.AwakeClock", lambda: clock)
    with played(heartbeat_timeout_s=60.0) as world:
        pulse = connect_subscriber(world.addresses.pulse, Heartbeat, None)
        try:
            assert pulse.receive(timeout_ms=60_000) == Heartbeat(-1)
            world.ask("a", tokens=1)
            assert busy.wait(60)
            clock.set(179.0)
            beats(4)
            clock.set(181.0)
            deadline = time.monotonic() + 60
            while "the scheduler's loop has not turned for 180.0 s" not in caplog.text:
                assert time.monotonic() < deadline, "a loop that stands still is vouched for"
                time.sleep(0.01)
            while pulse.receive(timeout_ms=500) is not None:  # those that were on their way
                assert time.monotonic() < deadline, "a loop that stands still is vouched for"
            over.set()
            beats(2)
            world.answer(world.plan())
            assert isinstance(world.hears(Outputs), Outputs)
        finally:
            over.set()
            pulse.close()


def test_graphs_that_are_left_are_captured_between_plans_by_all_ranks() -> None:
    """Every rank hears of plans and portions in the same order, while streams begin and end."""
    portions = ((5, 2), (0, 0), (3, 2), (0, 0))
    heard: list[list[StepPlan | CapturePortion]] = [[], []]
    with played(2, serving=False, max_rows=3) as world:
        for rank in range(2):
            world.results.send(Ready(rank, 60, 200, 50, portions=portions))
        assert isinstance(world.hears(Ready), Ready)
        for name in "ab":
            world.ask(name, tokens=150)
        captured = 0
        while captured < len(portions):
            message = world.plans[0].receive(timeout_ms=60_000)
            assert isinstance(message, StepPlan | CapturePortion)
            heard[0].append(message)
            if isinstance(message, StepPlan):
                world.answer(message)
                continue
            # The other rank answers a while later, and nothing is captured before it has.
            world.results.send(PortionCaptured(0, message.number, 0.0))
            world.ask(f"at {message.number}", tokens=1)
            for _ in range(2):
                plan = world.plan()
                heard[0].append(plan)
                world.answer(plan)
            world.results.send(PortionCaptured(1, message.number, 0.0))
            captured += 1
        for _ in heard[0]:
            other = world.plans[1].receive(timeout_ms=60_000)
            assert isinstance(other, StepPlan | CapturePortion)
            heard[1].append(other)
    assert heard[0] == heard[1]
    told = [message for message in heard[0] if isinstance(message, CapturePortion)]
    assert [(message.number, len(message.pages)) for message in told] == [(1, 5), (2, 0), (3, 3), (4, 0)]
    assert isinstance(heard[0][0], StepPlan)  # the streams' first step


def test_a_capture_that_never_ends_is_noticed() -> None:
    with played(serving=False, step_timeout_s=0.5) as world:
        world.ready(1, portions=((0, 0),))
        assert isinstance(world.hears(Ready), Ready)
        assert isinstance(world.plans[0].receive(timeout_ms=60_000), CapturePortion)
        assert re.fullmatch(r"a capture of graphs has not ended for \d+ s", world.fault())


def test_host_memory_is_used_as_far_as_all_ranks_have_pinned_it() -> None:
    with played(ranks=2, serving=False) as world:

        def usable() -> int:
            found = world.hears(EngineStats)
            assert isinstance(found, EngineStats), found
            return found.host_pages_total

        world.results.send(Pinned(1, 5))  # before it is ready
        for rank in range(2):
            world.results.send(Ready(rank, 9, 200, 50, host_pages=20, pins_pages=True))
        assert usable() == 0
        world.results.send(Pinned(0, 10))
        deadline = time.monotonic() + 60
        while (held := usable()) == 0:
            assert time.monotonic() < deadline
        assert held == 5
        world.results.send(Pinned(1, 20))
        while (held := usable()) == 5:
            assert time.monotonic() < deadline
        assert held == 10
