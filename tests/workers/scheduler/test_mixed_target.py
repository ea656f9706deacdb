"""Mixed steps take as long as they may, in simulated time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from math import ceil, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculation import MILLISECONDS, measured, step_seconds
from workload import config

from workers.protocol.messages import Request
from workers.protocol.plan import PrefillRow, SamplingParams, StepPlan, StepResult, token_buckets
from workers.protocol.report import StepTime
from workers.scheduler import Scheduler, SchedulerConfig
from workers.scheduler.prompt_budget import AIM, DECODE_STEPS, FEWEST, PIECE, TAIL, Measured, MixedTarget, padded
from workers.scheduler.step_times import StepTimes

BUDGET, ROWS = 2048, 16
WOKEN = step_seconds("experts", 64, 1)
"""Seconds of a step whose prompts have woken every expert."""
Cost = Callable[[StepPlan], float]
"""Seconds that the prompt tokens of a step take besides."""


def tokens_of(plan: StepPlan) -> int:
    return sum(len(row.tokens) for row in plan.prefill)


def plain(plan: StepPlan) -> float:
    """Return the seconds of a step, some of which are the same for any number of tokens."""
    return 1e-3 + 11e-6 * tokens_of(plan)


def deep(plan: StepPlan) -> float:
    """Tokens far behind in a prompt have more to attend to: up to three times as much."""
    return sum(len(row.tokens) * (8e-6 + 16e-6 * row.start / 8192) for row in plan.prefill)


def begun(plan: StepPlan) -> float:
    """Most of it is the same for any number of tokens: a step with prompts is no single graph."""
    return 5e-3 + 11e-6 * tokens_of(plan)


def noisy(plan: StepPlan) -> float:
    """Return the seconds of a step on a machine that is busy now and then."""
    return plain(plan) * random.Random(plan.step).choice([0.9, 1.0, 1.0, 1.1, 1.0, 0.95, 1.05, 1.0, 1.0, 12.0])


class Served:
    """Streams that never end, and prompts that come behind one another."""

    def __init__(
        self,
        times: tuple[StepTime, ...],
        cost: Cost,
        target: float | None,
        *,
        width: int = 1,
        buckets: tuple[int, ...] = (),
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                slots=ROWS + 4,
                pages=8000,
                max_context=20_000,
                token_budget=BUDGET,
                width=width,
                queue_limit=99,
                step_times=times,
                mixed_step_target_s=target,
                token_buckets=buckets,
            )
        )
        self.cost, self.taken = cost, []
        self.flights: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.count = 0

    def add(self, prompt: int, output: int) -> None:
        rng, self.count = random.Random(self.count), self.count + 1
        ids = tuple(rng.randrange(1000) for _ in range(prompt))
        assert self.scheduler.add(Request(f"r{self.count}", ids, SamplingParams(output))) is None

    def seconds(self, plan: StepPlan) -> float:
        decode = step_seconds("experts", len(plan.decode_slots), plan.width) if plan.decode_slots else 0.0
        return max(decode, WOKEN) + self.cost(plan) if plan.prefill else decode

    def step(self) -> StepPlan:
        while (plan := self.scheduler.plan()) is not None:
            self.flights.append(plan)
        plan = self.flights.popleft()
        tokens = tuple((9,) for _ in range(plan.layout.sampled_rows))
        self.scheduler.apply(StepResult(plan.step, tokens, self.seconds(plan)))
        self.plans.append(plan)
        return plan

    def streams(self) -> None:
        for _ in range(ROWS):
            self.add(3, 15_000)
        while len(self.step().decode_slots) < ROWS:
            pass

    def mixed(self, steps: int, prompt: int = 8000) -> list[StepPlan]:
        """Run `steps` mixed steps, while prompts keep coming."""
        found: list[StepPlan] = []
        while len(found) < steps:
            if self.scheduler.stats().prefill_backlog < BUDGET:
                self.add(prompt, 1)
            plan = self.step()
            if plan.prefill and len(plan.decode_slots) >= ROWS:
                found.append(plan)
        return found


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("target", [None, 0.02, 0.012])
@pytest.mark.parametrize("cost", [plain, deep, noisy])
def test_mixed_steps_take_as_long_as_they_may(cost: Cost, target: float | None, width: int) -> None:
    run = Served(measured("experts"), cost, target, width=width)
    run.streams()
    run.mixed(100)
    plans = [plan for plan in run.mixed(150) if len(plan.prefill) == 1 and not plan.prefill[0].final]
    allowed = AIM * (target or DECODE_STEPS * step_seconds("experts", ROWS, width))
    took = sorted(run.seconds(plan) / allowed for plan in plans if cost is not noisy or cost(plan) < 2 * plain(plan))
    assert took[len(took) // 2] == pytest.approx(1, rel=0.02)
    assert took[int(0.99 * len(took))] < (1.1 if cost is not noisy else 1.25)


def test_the_first_mixed_steps_are_near_the_target_already() -> None:
    run = Served(measured("experts"), plain, None)
    run.streams()
    for plan in run.mixed(5):
        assert run.seconds(plan) < 1.35 * DECODE_STEPS * step_seconds("experts", ROWS, 1)


def mixed_times(cost: Cost, *, held_up: int = -1) -> tuple[StepTime, ...]:
    """Return times of mixed steps as the self-test measures them, with few decode rows; one of them while the machine
    was busy."""
    return tuple(
        StepTime(rows, 1, WOKEN + cost(chunk(tokens)) + 0.05 * (index == held_up), tokens)
        for index, (rows, tokens) in enumerate([(1, 60), (6, 120), (3, 250), (2, 500), (4, 1000), (5, 2000)])
    )


def chunk(tokens: int) -> StepPlan:
    return StepPlan(1, 1, 0, (), (PrefillRow(0, 0, (1,) * tokens, 0, True, -1),))


@pytest.mark.parametrize("cost", [plain, begun])
@pytest.mark.parametrize("held_up", [-1, 0, 3, 5])
def test_what_was_measured_is_met_from_the_first_step_on(cost: Cost, held_up: int) -> None:
    run = Served((*measured("experts"), *mixed_times(cost, held_up=held_up)), cost, 0.04)
    run.streams()
    for plan in run.mixed(5):
        if not any(row.final for row in plan.prefill) and tokens_of(plan) < BUDGET - 100:
            # Nobody measured what entries before tokens cost; they are taken to cost something.
            assert 0.85 * AIM * 0.04 < run.seconds(plan) < 1.05 * AIM * 0.04


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3000), st.floats(1e-6, 10.0)), max_size=12),
    st.sampled_from([(), token_buckets(BUDGET)]),
)
def test_more_tokens_count_no_less_whatever_was_measured(
    steps: list[tuple[int, int, float]], buckets: tuple[int, ...]
) -> None:
    found = Measured.of([StepTime(rows, 1, seconds, tokens) for rows, tokens, seconds in steps], buckets)
    if found is not None:
        assert 0 <= found.start < inf
        assert 0 < found.cost < inf
        counted = [found.counts(tokens) for tokens in range(0, 4000, 8)]
        assert counted[0] == 0 or found.points[0][0] == 0
        assert all(less <= more + 1e-9 * max(counted) for less, more in pairwise(counted))


def measured_on_a_gpu(plan: StepPlan) -> float:
    """Return the seconds that an H200 takes for the DeepSeek-V2-Lite shape beside 32 rows, less than what the
    self-test's short steps say; entries before a chunk cost something for however few tokens of it."""
    entries = sum(row.start for row in plan.prefill)
    deep = sum(len(row.tokens) * (row.start + len(row.tokens) / 2) for row in plan.prefill)
    tokens = padded(plan.layout.tokens, token_buckets(BUDGET)) - plan.layout.decode_tokens
    pieces = sum(ceil(row.start / PIECE) for row in plan.prefill)
    return 0.6e-3 + 5.3e-6 * tokens + 0.76e-3 * pieces + 0.25e-6 * entries + 0.42e-9 * deep


@pytest.mark.parametrize("prompt", [8000, 3000, 15_000])
def test_what_the_self_test_does_not_measure_is_learnt_by_the_first_prompt(prompt: int) -> None:
    """Streams wait little longer than is aimed at from the first step on, and then prompts get what there is."""
    mixed = mixed_times(lambda plan: 3e-3 + 7e-6 * tokens_of(plan))
    run = Served((*measured("experts"), *mixed), measured_on_a_gpu, 0.018, buckets=token_buckets(BUDGET))
    run.streams()
    first = [run.seconds(plan) for plan in run.mixed(100, prompt)]
    later = [run.seconds(plan) for plan in run.mixed(100, prompt) if not plan.prefill[-1].final]
    assert max(first) < 1.04 * 0.018
    assert max(later) < 0.018
    assert sorted(later)[len(later) // 2] > 0.95 * AIM * 0.018  # buckets are some percent apart


@pytest.mark.parametrize("seed", range(6))
def test_steps_whose_first_tokens_cost_little_keep_to_twice_a_decode_step(seed: int) -> None:
    """Weights are read for any number of tokens; what is beyond a thousand costs as much as its products. A line
    through what was measured says too little of large steps, and those of one size never tell what all cost whatever
    their number from what each of their tokens does."""
    rng = random.Random(seed)

    def cost(plan: StepPlan) -> float:
        tokens = padded(plan.layout.tokens, token_buckets(BUDGET))
        entries = sum(row.start for row in plan.prefill)
        deep = sum(len(row.tokens) * (row.start + len(row.tokens) / 2) for row in plan.prefill)
        return 1.8e-3 + 1.2e-6 * tokens + 6e-6 * max(0, tokens - 1100) + 0.1e-6 * entries + 0.75e-9 * deep

    mixed = tuple(StepTime(1, 1, WOKEN + cost(chunk(step - 1)), step - 1) for step in token_buckets(BUDGET))
    run = Served(
        (*measured("experts"), *mixed),
        lambda plan: cost(plan) + rng.gauss(0, 0.01) * WOKEN,
        None,
        buckets=token_buckets(BUDGET),
    )
    run.streams()
    target = DECODE_STEPS * step_seconds("experts", ROWS, 1)
    run.mixed(20)
    took = [WOKEN + cost(plan) for plan in run.mixed(200) if not plan.prefill[-1].final]
    assert max(took) < 1.03 * target
    assert sorted(took)[len(took) // 2] == pytest.approx(AIM * target, rel=0.03)


def test_a_prompt_whose_beginning_is_cached_costs_what_it_attends_to() -> None:
    run = Served(measured("experts"), deep, 0.03)
    run.streams()
    run.mixed(100)
    while run.scheduler.stats().prefill_backlog:
        run.step()
    ids, found = tuple(range(12_000)), list[StepPlan]()
    for turn, length in enumerate((8000, 12_000)):
        assert run.scheduler.add(Request(f"turn {turn}", ids[:length], SamplingParams(1))) is None
        begin = len(run.plans)
        while run.scheduler.stats().running + run.scheduler.stats().waiting > ROWS:
            run.step()
        found = [plan for plan in run.plans[begin:] if plan.prefill]
    assert found[0].prefill[0].start > 7900
    assert run.seconds(found[0]) == pytest.approx(AIM * 0.03, rel=0.05)


def trickle(run: Served, tokens: int, steps: int, *, priority: int = 0) -> None:
    """Run `steps` steps, before each of which an urgent prompt comes."""
    for _ in range(steps):
        run.count += 1
        ids = tuple(random.Random(run.count).randrange(1000) for _ in range(tokens))
        assert run.scheduler.add(Request(f"u{run.count}", ids, SamplingParams(1), priority=priority)) is None
        run.step()


@pytest.mark.parametrize("target", [None, 0.018, 1e-6])
@pytest.mark.parametrize("tokens", [20, pytest.param(55, marks=pytest.mark.long)])
def test_small_urgent_prompts_do_not_keep_a_long_one_out_of_the_time_that_they_leave(
    tokens: int, target: float | None
) -> None:
    run = Served((*measured("experts"), *mixed_times(begun)), measured_on_a_gpu, target, buckets=token_buckets(BUDGET))
    run.streams()
    assert run.scheduler.add(Request("long", tuple(range(10_000)), SamplingParams(1), priority=1)) is None
    trickle(run, tokens, 1500)
    assert sum(row.start + len(row.tokens) == 10_000 for plan in run.plans for row in plan.prefill) == 1


def test_a_newcomer_with_a_cached_prefix_does_not_join_for_a_token() -> None:
    run = Served((*measured("experts"), *mixed_times(begun)), measured_on_a_gpu, 0.018, buckets=token_buckets(BUDGET))
    run.streams()
    known = tuple(range(15_000))
    assert run.scheduler.add(Request("known", known, SamplingParams(1))) is None
    while run.scheduler.stats().prefill_backlog:
        run.step()
    for number, length in enumerate(range(600, 1500, 50)):
        begin = len(run.plans)
        run.add(length, 1)
        again = (*known[:14_990], *[number] * 300)
        assert run.scheduler.add(Request(f"again {number}", again, SamplingParams(1))) is None
        while run.scheduler.stats().prefill_backlog:
            run.step()
        assert all(run.seconds(plan) < 1.05 * 0.018 for plan in run.plans[begin:])


def test_steps_shorter_than_those_of_their_rows_say_that_these_take_less() -> None:
    """Estimates do not shrink for ever, and a long prompt finds its room."""
    times = StepTimes((), 1)
    mixed = MixedTarget(config(mixed_step_target_s=0.02), times)
    for _ in range(300):
        times.observe(16, 1, 0.04)
    for _ in range(6000):
        mixed.observe(1, 1, [(0, 20)], 0.004)
    assert times.seconds(1, 1) == pytest.approx(0.004, rel=0.1)
    for _ in range(60):
        count = mixed.prompt_budget(1, 1, BUDGET).tokens(0, BUDGET)
        mixed.observe(1, 1, [(0, count)], 0.004 + 11e-6 * count)
    assert 11e-6 * count == pytest.approx(AIM * 0.02 - 0.004, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_steps_take_everybody_is_served(seed: int) -> None:
    """Any times, targets, priorities and prompts, of which some begin alike."""
    rng = random.Random(seed)
    times = rng.choice([(), measured("experts"), (*measured("dense"), *mixed_times(begun))])
    run = Served(
        times,
        lambda plan: 10 ** rng.uniform(-7, 2),
        rng.choice([None, 1e-6, 0.02, 1e3]),
        width=rng.choice([1, 3]),
        buckets=rng.choice([(), token_buckets(BUDGET)]),
    )
    for number in range(25):
        beginning = random.Random(rng.randrange(3))
        ids = tuple(beginning.randrange(1000) for _ in range(rng.randrange(1, 15_000)))
        request = Request(f"any {number}", ids, SamplingParams(rng.randrange(1, 60)), priority=rng.randrange(3))
        assert run.scheduler.add(request) is None
        for _ in range(rng.randrange(40)):
            if not run.scheduler.idle:
                assert run.step().layout.tokens <= BUDGET
    for _ in range(30_000):
        if run.scheduler.idle:
            return
        run.step()
    raise AssertionError("somebody waits for ever")


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_few_streams_do_not_hold_prompts_up(factor: float) -> None:
    """A step of one row is shorter than what prompts add whatever their number: they get as much again for tokens."""
    alone = step_seconds("experts", 1, 1)
    assert (DECODE_STEPS - 1) * alone < WOKEN - alone + 5e-3
    run = Served((*measured("experts"), *mixed_times(begun)), lambda plan: factor * begun(plan), None)
    run.add(3, 15_000)
    run.step()
    took, longest = [], []
    for _ in range(12):
        run.add(8000, 1)
        begin = len(run.plans)
        while run.scheduler.stats().prefill_backlog:
            run.step()
        took.append(sum(run.seconds(plan) for plan in run.plans[begin:]))
        longest.append(max(run.seconds(plan) for plan in run.plans[begin:]))
    # About twice the time of the tokens, and the stream's own. Some prompts tell what entries cost, which is nothing
    # here, and that all costs three times as much.
    known, tokens, fixed = 6, factor * 8000 * 11e-6, WOKEN - alone + factor * 5e-3
    assert max(longest[known:]) < alone + fixed + 1.25 * TAIL * fixed
    assert max(took[known:]) < 1.15 * (tokens + ceil(tokens / fixed) * (fixed + alone))


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_wrong_guess_is_left_in_some_steps(factor: float) -> None:
    run = Served(measured("experts"), lambda plan: factor * plain(plan), 0.03)
    run.streams()
    run.mixed(25)
    for plan in run.mixed(10):
        if not any(row.final for row in plan.prefill):
            assert run.seconds(plan) == pytest.approx(0.03, rel=0.25) or tokens_of(plan) > BUDGET - 100


def budgets(run: Served) -> set[int]:
    run.streams()
    return {tokens_of(plan) + len(plan.decode_slots) for plan in run.mixed(20) if not plan.prefill[-1].final}


def test_without_times_or_without_a_target_prompts_get_what_is_left() -> None:
    assert budgets(Served((), plain, None)) == {BUDGET}
    assert budgets(Served(measured("experts"), plain, 0.0)) == {BUDGET}


def test_a_target_is_met_where_nobody_measured_anything() -> None:
    run = Served((), plain, 0.02)
    run.streams()
    for _ in range(200):
        run.step()
    run.mixed(30)
    for plan in run.mixed(20):
        if not any(row.final for row in plan.prefill):
            assert run.seconds(plan) == pytest.approx(0.02, rel=0.25)


def test_prompts_never_starve() -> None:
    run = Served(measured("experts"), plain, 1e-6)
    run.streams()
    assert all(tokens_of(plan) == FEWEST for plan in run.mixed(20) if not any(row.final for row in plan.prefill))


def test_steps_without_streams_have_the_whole_budget() -> None:
    run = Served(measured("experts"), plain, None)
    run.add(8000, 1)
    assert tokens_of(run.step()) == BUDGET


@pytest.mark.parametrize("kind", MILLISECONDS)
def test_what_a_token_costs_is_guessed_from_the_largest_steps(kind: str) -> None:
    run = Served(measured(kind), plain, None)
    guess = run.scheduler._mixed._cost
    largest = MILLISECONDS[kind][-1] - MILLISECONDS[kind][-2]
    assert guess == pytest.approx(1e-3 * largest / 128, rel=0.5)
