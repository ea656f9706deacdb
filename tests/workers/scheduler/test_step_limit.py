"""How long a step may take before it counts as hung."""

from __future__ import annotations

import pytest
from replica import Replica
from workload import config, tokens

from workers.protocol.grammar import Grammar, GrammarReady
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.report import StepTime
from workers.scheduler import Scheduler
from workers.scheduler.step_limit import DEEP, LEAST_S, TIMES, StepLimit

MEASURED = (
    StepTime(1, 1, 0.3),
    StepTime(64, 2, 0.5),
    StepTime(1, 1, 0.6, prompt_tokens=64),
    StepTime(1, 1, 2.0, prompt_tokens=8192),
)


@pytest.mark.parametrize(
    ("measured", "deepest", "prompts", "expected"),
    [
        ((), 100, False, None),
        ((), 100, True, None),
        (MEASURED, 0, False, TIMES * 0.5),
        (MEASURED, DEEP, False, TIMES * 0.5 * 2),
        (MEASURED, 0, True, TIMES * 2.0),
        (MEASURED, 7 * DEEP, True, TIMES * 2.0 * 8),
        (MEASURED[:2], 100, True, None),
        (MEASURED[2:], 100, False, None),
        ((StepTime(1, 1, 1e-3), StepTime(1, 1, 2e-3, prompt_tokens=8)), 100, True, LEAST_S),
    ],
)
def test_it_is_a_multiple_of_the_longest_step_of_its_kind_and_grows_with_contexts(
    measured: tuple[StepTime, ...], deepest: int, prompts: bool, expected: float | None
) -> None:
    assert StepLimit(measured).seconds(deepest, prompts=prompts) == (expected and pytest.approx(expected))


def test_a_scheduler_knows_the_limit_of_the_steps_in_flight() -> None:
    times = (StepTime(1, 1, 1.0), StepTime(1, 1, 8.0, prompt_tokens=60))
    replica = Replica(config(step_times=times, max_context=600, pages=100, token_budget=128))
    scheduler = replica.scheduler
    assert scheduler.step_limit_s is None
    assert replica.add("a", tokens(300, seed=1), max_tokens=50) is None
    for end in (128, 256, 300):
        replica.plan()
        assert scheduler.step_limit_s == pytest.approx(TIMES * 8.0 * (1 + end / DEEP))
        replica.apply()
    replica.plan()
    assert scheduler.step_limit_s == pytest.approx(TIMES * 1.0 * (1 + 301 / DEEP))
    replica.plan()
    assert replica.add("b", tokens(20, seed=1), max_tokens=50) is None
    replica.apply()
    replica.plan()
    assert [bool(flight.prefill) for flight in scheduler._flights] == [False, True]
    # A rank launches the second before it tells the result of the first, and may have to wait while it does.
    assert scheduler.step_limit_s == pytest.approx(TIMES * 8.0 * (1 + 302 / DEEP))
    replica.run()
    replica.check_tokens()


def test_while_graphs_are_still_to_be_captured_nobody_knows() -> None:
    times = (StepTime(1, 1, 1.0), StepTime(1, 1, 8.0, prompt_tokens=60))
    replica = Replica(config(step_times=times, portions=((2, 1),)))
    assert replica.add("a", tokens(30, seed=1), max_tokens=5) is None
    replica.plan()
    assert replica.scheduler._flights
    assert replica.scheduler.step_limit_s is None


@pytest.mark.parametrize("first", ["with a grammar", "free"])
def test_nobody_knows_how_long_the_masks_of_grammars_take(first: str) -> None:
    """Rank 0 fills them while it launches a step, behind which the result of the one before waits. Each may take a
    tenth of a second (`workers.grammar.matcher`), and a step has one for every token of its rows."""
    times = (StepTime(1, 1, 1e-3), StepTime(1, 1, 2e-3, prompt_tokens=60))
    scheduler = Scheduler(config(step_times=times))
    sampling = SamplingParams(6, grammar=Grammar("json", ""), stop_ids=(1,))
    assert scheduler.add(Request("with a grammar", (5, 6, 7), sampling)) is None
    if first == "free":
        assert scheduler.add(Request("free", (5, 6, 7), SamplingParams(6))) is None
        assert scheduler.plan() is not None
        assert scheduler.step_limit_s == LEAST_S
    scheduler.grammar_ready(GrammarReady(1))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.constrained
    assert scheduler.step_limit_s is None
