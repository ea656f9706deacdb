"""Requests wait for their grammars, and for nobody else's; a grammar that fails or is late refuses those who wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workers.protocol.grammar import (
    COMPILED_AT_ONCE,
    CompileGrammar,
    ForgetGrammar,
    Grammar,
    GrammarProgress,
    GrammarReady,
)
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.scheduler import Scheduler, SchedulerConfig
from workers.scheduler.results import DEAD_END

A, B = Grammar("regex", "a+"), Grammar("regex", "b+")
CONFIG = SchedulerConfig(slots=3, pages=40, max_context=400, token_budget=80, width=2, queue_limit=8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduler(clock: Clock | None = None) -> Scheduler:
    made = Scheduler(CONFIG)
    if clock is not None:
        made._grammars._clock = clock
    return made


def request(name: str, grammar: Grammar | None, **sampling: object) -> Request:
    return Request(name, (5, 6, 7), SamplingParams(6, grammar=grammar, stop_ids=(1,), **sampling))  # type: ignore[arg-type]


def result(plan: StepPlan, **fields: object) -> StepResult:
    sampled = plan.layout.sampled_rows
    tokens = [() if row in fields.get("dead_ends", ()) else (9,) for row in range(sampled)]  # type: ignore[operator]
    return StepResult(plan.step, tuple(tokens), 0.001, **fields)  # type: ignore[arg-type]


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    run = scheduler()
    for name, grammar in (("first", A), ("second", None), ("third", A), ("fourth", B)):
        assert run.add(request(name, grammar)) is None
    assert run.grammar_work() == [CompileGrammar(1, A), CompileGrammar(2, B)]
    assert run.grammar_work() == []
    assert run.stats().waiting == 4
    plan = run.plan()
    assert plan is not None
    assert [admission.grammar for admission in plan.admissions] == [0]
    assert plan.constrained == ()
    assert run.grammar_ready(GrammarReady(1)) == ()
    plan = run.plan()
    assert plan is not None
    assert [admission.grammar for admission in plan.admissions] == [1, 1]
    assert all(admission.sampling.grammar is None for admission in plan.admissions)
    assert plan.constrained == tuple(row.slot for row in plan.prefill)
    assert run.stats().waiting == 1


def test_a_request_comes_to_its_old_place() -> None:
    run = scheduler()
    for name, grammar in (("a", A), *((f"free {n}", None) for n in range(4))):
        run.add(request(name, grammar))
    run.grammar_ready(GrammarReady(1))
    plan = run.plan()
    assert plan is not None
    assert [admission.grammar for admission in plan.admissions] == [1, 0, 0]


def test_a_bad_grammar_refuses_all_who_wait_for_it() -> None:
    run = scheduler()
    for name in ("one", "two"):
        run.add(request(name, A))
    run.grammar_work()
    outputs = run.grammar_ready(GrammarReady(1, "it is odd"))
    assert [output.request_id for output in outputs] == ["one", "two"]
    assert all("it is odd" in output.refused for output in outputs)
    assert run.idle
    assert run.grammar_work() == [ForgetGrammar(1)]


def test_a_late_grammar_refuses_until_it_is_ready() -> None:
    clock = Clock()
    run = scheduler(clock)
    run.add(request("one", A))
    clock.now += 9
    run.add(request("two", A))
    assert run.expire() == ()
    run.grammar_progress(GrammarProgress(1, 8.5))
    clock.now += 2
    outputs = run.expire()
    assert [output.request_id for output in outputs] == ["one", "two"]
    assert not any(output.unavailable for output in outputs)
    assert all("--grammar-compile-timeout" in output.refused for output in outputs)
    refused = run.add(request("three", A))
    assert refused is not None
    assert "not compiled within 10 s" in refused.refused
    assert run.add(request("other", B)) is None
    assert run.grammar_ready(GrammarReady(1)) == ()
    run.grammar_work()
    assert run.add(request("four", A)) is None
    assert run.grammar_work() == [CompileGrammar(3, A)]


def test_a_grammar_is_not_blamed_for_a_busy_machine() -> None:
    """Nor for a compiler that still reads the vocabulary: it is unavailable for now, and served once it is ready."""
    clock = Clock()
    run = scheduler(clock)
    run.add(request("one", A))
    run.grammar_progress(GrammarProgress(1, 0.4))
    run.grammar_progress(GrammarProgress(77, 9.0))  # of one that is gone
    clock.now += 11
    (late,) = run.expire()
    assert (late.request_id, late.unavailable) == ("one", True)
    assert "busy" in late.refused
    assert "try again later" in late.refused
    again = run.add(request("two", A))
    assert again is not None
    assert again.unavailable
    run.grammar_progress(GrammarProgress(1, 6.0))
    blamed = run.add(request("three", A))
    assert blamed is not None
    assert not blamed.unavailable
    assert run.grammar_ready(GrammarReady(1)) == ()
    assert run.add(request("four", A)) is None


def stuck_scheduler(clock: Clock) -> Scheduler:
    """Make a scheduler in which as many grammars are compiled as can be at a time, B was in use before, and the time of
    all of them is over."""
    run = scheduler(clock)
    run.add(request("b", B))
    run.grammar_ready(GrammarReady(1))
    for number in range(COMPILED_AT_ONCE):
        assert run.add(request(f"stuck {number}", Grammar("regex", f"a{{{number}}}"))) is None
        run.grammar_progress(GrammarProgress(2 + number, 9.0))
    clock.now += 11
    return run


def test_while_all_compilations_are_stuck_other_grammars_are_refused_at_once() -> None:
    run = stuck_scheduler(Clock())
    refused = run.add(request("another", A))
    assert refused is not None
    assert refused.unavailable
    assert "try again later" in refused.refused
    # What is in use is served, and a stuck one is told what is wrong with it.
    assert run.add(request("same", B)) is None
    late = run.expire()
    assert len(late) == COMPILED_AT_ONCE
    assert not any(output.unavailable for output in late)
    again = run.add(request("again", Grammar("regex", "a{0}")))
    assert again is not None
    assert not again.unavailable
    # One that ends at last makes room.
    run.grammar_ready(GrammarReady(3, "it was odd"))
    assert run.add(request("another", A)) is None


def test_a_grammar_that_waits_behind_stuck_ones_is_not_blamed() -> None:
    """Nor compiled once nobody waits for it any more."""
    clock = Clock()
    run = scheduler(clock)
    for number in range(COMPILED_AT_ONCE):
        run.add(request(f"stuck {number}", Grammar("regex", f"a{{{number}}}")))
        run.grammar_progress(GrammarProgress(1 + number, 9.0))
    assert run.add(request("behind", A)) is None
    run.grammar_work()
    clock.now += 11
    refused = {output.request_id: output.unavailable for output in run.expire()}
    assert refused == {**{f"stuck {number}": False for number in range(COMPILED_AT_ONCE)}, "behind": True}
    assert run.grammar_work() == [ForgetGrammar(COMPILED_AT_ONCE + 1)]
    run.grammar_ready(GrammarReady(1))
    assert run.add(request("behind again", A)) is None
    assert run.grammar_work()[-1] == CompileGrammar(COMPILED_AT_ONCE + 2, A)


@pytest.mark.parametrize("ready", [False, True])
def test_a_grammar_is_forgotten_with_its_last_request(ready: bool) -> None:
    run = scheduler()
    run.add(request("one", A))
    run.add(request("two", A))
    run.grammar_work()
    if ready:
        run.grammar_ready(GrammarReady(1))
    run.cancel("one")
    assert run.grammar_work() == []
    assert [output.finish for output in run.cancel("two")] == ["cancelled"]
    if not ready:
        run.grammar_ready(GrammarReady(1))
    assert run.grammar_work() == [ForgetGrammar(1)]
    assert run.idle


def test_a_dead_end_ends_its_request_alone_and_no_canary_follows() -> None:
    run = scheduler()
    run.add(request("bound", A))
    run.grammar_ready(GrammarReady(1))
    run.add(request("free", None))
    plan = run.plan()
    assert plan is not None
    outputs = {output.request_id: output for output in run.apply(result(plan, dead_ends=(0,)))}
    assert (outputs["bound"].failed, outputs["bound"].dead_end) == (DEAD_END, True)
    assert outputs["free"].tokens == (9,)
    assert run.stats().bad_rows == 0
    following = run.plan()
    assert following is not None
    assert following.constrained == ()
    assert not following.admissions


@pytest.mark.parametrize(
    ("stop_ids", "most", "tokens", "want", "finish"),
    [
        ((1,), 6, (7,), (7,), None),
        ((1, 7), 6, (7,), (7,), "stop"),
        ((1, 7), 6, (8, 7), (8, 7), "stop"),
        ((1, 8), 6, (8, 7), (8,), "stop"),
        ((1,), 3, (8, 7), (8, 7), "length"),
        ((1,), 2, (8, 7), (8,), "length"),
    ],
)
def test_the_tokens_before_a_dead_end_are_kept_and_may_be_its_end(
    stop_ids: tuple[int, ...], most: int, tokens: tuple[int, ...], want: tuple[int, ...], finish: str | None
) -> None:
    run = Scheduler(replace(CONFIG, width=4))
    sampling = SamplingParams(most, grammar=A, stop_ids=stop_ids)
    run.add(Request("bound", (5, 6, 7), sampling))
    run.grammar_ready(GrammarReady(1))
    first, second = run.plan(), run.plan()
    assert first is not None
    assert second is not None
    run.apply(result(first))
    before = run.stats()
    said, *failure = run.apply(StepResult(second.step, (tokens,), 0.001, dead_ends=(0,)))
    assert (said.tokens, said.finish, said.failed) == (want, finish, "")
    assert [(output.tokens, output.failed, output.dead_end) for output in failure] == [((), DEAD_END, True)] * (
        not finish
    )
    after = run.stats()
    assert after.generated_tokens - before.generated_tokens == len(want)
    assert after.drafts_offered - before.drafts_offered == said.offered == 3
    while (plan := run.plan()) is not None:
        assert not run.apply(result(plan))
    assert run.idle
    assert after.running == 0


def test_a_stop_id_counts_before_min_tokens_under_a_grammar() -> None:
    """The masks allow it there only where the grammar is complete."""
    run = scheduler()
    run.add(request("bound", A, min_tokens=5))
    run.grammar_ready(GrammarReady(1))
    plan = run.plan()
    assert plan is not None
    [output] = run.apply(StepResult(plan.step, ((1,),), 0.001))
    assert output.finish == "stop"
