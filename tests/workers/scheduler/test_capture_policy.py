"""When graphs that an engine began to serve without are captured, and what becomes of the pages meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest

from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.protocol.report import StepTime
from workers.scheduler import Scheduler, SchedulerConfig
from workers.scheduler.captures import PAUSE, QUIET_S, SPARE_PAGES

SLOTS = 3


class Replica:
    """A scheduler whose ranks answer when the test says so."""

    def __init__(self, *portions: tuple[int, int], pages: int = 101, quiet_s: float = QUIET_S, **settings: Any) -> None:
        """`quiet_s`: seconds from the start of which nothing is asked for."""
        self.now = 10.0
        config = SchedulerConfig(
            SLOTS, pages, 600, token_budget=64, width=1, queue_limit=8, portions=portions, **settings
        )
        self.scheduler = Scheduler(config, lambda: self.now)
        self.now += quiet_s

    def ask(self, name: str, tokens: int = 300, prompt: int = 3) -> None:
        assert self.scheduler.add(Request(name, tuple(range(prompt)), SamplingParams(tokens))) is None

    def step(self) -> None:
        """Plan, and answer the plan."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.answer(plan)

    def answer(self, plan: StepPlan) -> None:
        self.scheduler.apply(StepResult(plan.step, ((7,),) * plan.layout.sampled_rows, 0.001))

    def captured(self, message: CapturePortion, seconds: float = 0.2, ranks: int = 1, **more: Any) -> None:
        for rank in range(ranks):
            self.scheduler.captured(PortionCaptured(rank, message.number, seconds, **more))

    @property
    def free(self) -> int:
        return self.scheduler.stats().pages_free


def test_an_idle_engine_captures_one_portion_after_the_other() -> None:
    made = Replica((10, 5), (0, 0), (40, 5), ranks=2)
    for number, pages in enumerate((10, 0, 40), start=1):
        message = made.scheduler.capture()
        assert message is not None
        assert (message.number, len(set(message.pages)), 0 in message.pages) == (number, pages, False)
        assert made.free == 100 - pages
        assert made.scheduler.capture() is None
        made.captured(message)
        assert made.scheduler.capturing
        made.scheduler.captured(PortionCaptured(1, number, 0.2))
        assert not made.scheduler.capturing
        assert made.free == 100
    assert made.scheduler.capture() is None


def test_who_waits_for_an_engine_has_a_step_before_the_first_capture() -> None:
    made = Replica((10, 5), (0, 0), quiet_s=0.0)
    for name in "abc":
        made.ask(name)
    made.now += 100.0  # however long it took until these were taken in
    assert made.scheduler.capture() is None
    plan = made.scheduler.plan()
    assert plan is not None
    assert made.scheduler.capture() is None
    made.answer(plan)
    assert made.scheduler.capture() is not None


def test_an_engine_that_just_started_is_quiet_before_it_captures() -> None:
    """The first requests, or a health probe, are on their way to it."""
    made = Replica((0, 0), (0, 0), quiet_s=0.0)
    made.now += QUIET_S - 0.01
    assert made.scheduler.capture() is None
    made.now += 0.02
    assert made.scheduler.capture() is not None
    made = Replica((0, 0), (0, 0), quiet_s=0.0)
    made.ask("a", tokens=1)
    made.step()
    assert made.scheduler.idle
    assert made.scheduler.capture() is not None  # it has come


def test_while_rows_run_they_have_most_of_the_time() -> None:
    made = Replica((10, 5), (10, 5), (10, 5))
    made.ask("a")
    made.step()
    message = made.scheduler.capture()
    assert message is not None
    made.captured(message, seconds=0.5)
    made.step()
    made.now += PAUSE * 0.5 - 0.01
    assert made.scheduler.capture() is None
    made.now += 0.02
    message = made.scheduler.capture()
    assert message is not None
    made.captured(message, seconds=50.0)
    made.scheduler.cancel("a")
    assert made.scheduler.capture() is not None  # nobody waits


def test_rows_find_pages_while_a_portion_is_proven() -> None:
    made = Replica((90, 20), (90, 10), pages=31)
    made.ask("a")
    made.step()
    assert made.free == 29
    assert made.scheduler.capture() is None  # as long as there is anybody who may need pages
    made.scheduler.cancel("a")
    message = made.scheduler.capture()
    assert message is not None
    assert len(message.pages) == 30
    made.captured(message, seconds=0.0)
    made.ask("b", tokens=290)
    made.step()
    message = made.scheduler.capture()
    assert message is not None
    assert len(message.pages) == 29 - SPARE_PAGES * SLOTS
    for _ in range(280):
        made.step()
    assert made.scheduler.stats().preemptions == 0


def test_portions_that_take_no_page_come_while_rows_have_all_pages() -> None:
    made = Replica((0, 0), (10, 5), (0, 0), pages=11)
    made.ask("a")
    made.step()
    assert made.free == 9 < SPARE_PAGES * SLOTS
    message = made.scheduler.capture()
    assert message is not None
    assert message.pages == ()
    made.captured(message, seconds=0.0)
    assert made.scheduler.capture() is None  # this one is to be proven


def answer_all(made: Replica) -> None:
    while (plan := made.scheduler.plan()) is not None:
        made.answer(plan)


@pytest.mark.parametrize("running", [False, True])
def test_a_proof_takes_free_pages_and_as_few_cached_ones_as_will_do(running: bool) -> None:
    made = Replica((90, 20), (90, 30), pages=46)
    made.ask("a", tokens=2, prompt=599)  # nine complete pages, which stay cached
    answer_all(made)
    cached, free = 9, 45 - 9
    if running:
        made.ask("b")
        made.step()
        free = min(free - 1, 45 - 1 - SPARE_PAGES * SLOTS)
    message = made.scheduler.capture()
    assert message is not None
    assert len(message.pages) == free
    made.captured(message, seconds=0.0)
    message = made.scheduler.capture()
    assert message is not None
    assert len(message.pages) == max(30, free)
    made.captured(message, seconds=0.0)
    made.scheduler.cancel("b")
    made.ask("c", tokens=2, prompt=599)
    answer_all(made)
    assert made.scheduler.stats().cached_tokens == 64 * cached


def test_cached_pages_give_way_where_too_few_are_free_and_nobody_finds_them_then() -> None:
    made = Replica((90, 25), pages=31)
    made.ask("a", tokens=2, prompt=599)
    answer_all(made)
    message = made.scheduler.capture()
    assert message is not None
    assert len(message.pages) == 25  # of which 21 were free
    made.captured(message)
    made.ask("b", tokens=2, prompt=599)
    made.step()
    assert made.scheduler.stats().cached_tokens == 64 * (9 - 4)


def test_times_of_all_steps_replace_those_of_the_first_ones() -> None:
    first = (StepTime(1, 1, 0.001), StepTime(3, 1, 0.002))
    made = Replica((0, 0), step_times=first)
    message = made.scheduler.capture()
    assert message is not None
    times = made.scheduler._speculation.times
    made.captured(message, step_times=(StepTime(1, 1, 0.004), StepTime(2, 1, 0.005), StepTime(3, 1, 0.006)))
    assert times.seconds(2, 1) == 0.002
    assert made.scheduler._speculation.times.seconds(2, 1) == 0.005
    assert made.scheduler._mixed._times is made.scheduler._speculation.times


def test_an_answer_that_nobody_waits_for_is_a_defect() -> None:
    made = Replica((0, 0))
    with pytest.raises(RuntimeError, match="nobody waits for"):
        made.scheduler.captured(PortionCaptured(0, 1, 0.1))


def test_random_requests_end_while_portions_come_and_go() -> None:
    chance = random.Random(5)
    made = Replica(*[(chance.randrange(40), chance.randrange(1, 9)) for _ in range(200)], pages=25)
    under_way: CapturePortion | None = None
    asked = 0
    for _ in range(4000):
        made.now += 0.01
        if under_way is not None and chance.random() < 0.3:
            made.captured(under_way, seconds=0.01)
            under_way = None
        if asked < 60 and chance.random() < 0.05 and made.scheduler.stats().waiting < 4:
            made.ask(f"r{asked}", tokens=chance.randrange(1, 200), prompt=chance.randrange(1, 300))
            asked += 1
        under_way = made.scheduler.capture() or under_way
        if (plan := made.scheduler.plan()) is not None:
            granted = {page for grant in plan.grants for page in grant.pages}
            assert not granted & set(under_way.pages if under_way else ())
            made.answer(plan)
    if under_way is not None:
        made.captured(under_way)
    assert made.scheduler.idle
    assert asked == 60
    assert made.free == 24
