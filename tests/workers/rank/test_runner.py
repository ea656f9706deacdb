"""Refusals of a runner before it launches anything, the effect of broken numbers, and the timing of steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kernels.page import PAGE_TOKENS, pages_for
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import Admission, PageGrant, PrefillRow, SamplingParams, StepPlan
from workers.rank import runner as module
from workers.rank.runner import Launched, PlanError, Runner
from workers.rank.waiting import Waiting
from workers.scheduler import max_entries_per_row
from workers.step.sampling import SamplingFault

SLOTS, WIDTH, BUDGET, PAGES, CONTEXT = 4, 3, 40, 9, 251
ROW = PrefillRow(0, 0, (1, 2, 3), 0, True)
GOOD = StepPlan(1, WIDTH, WIDTH - 1, (), (ROW,), (Admission(0, SamplingParams(9)),), (PageGrant(0, 0, (1,)),))
REACH = max_entries_per_row(CONTEXT, WIDTH)
LAST = pages_for(REACH) - 1
"""Last entry of a page table."""
assert REACH == (LAST + 1) * PAGE_TOKENS, "what is too far lies in no page"


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    settings = {"max_rows": SLOTS, "width": WIDTH, "token_budget": BUDGET, "cache_pages": PAGES, "max_context": CONTEXT}
    folder = write_tiny(tmp_path, "v3", seed=3, num_hidden_layers=1)
    return InlineEngine(EngineConfig(model=str(folder), device="cpu", selftest=False, **settings)).runner


def row(**fields: Any) -> dict[str, Any]:
    return {"prefill": (replace(ROW, **fields),)}


def grant(**fields: Any) -> dict[str, Any]:
    return {"grants": (replace(GOOD.grants[0], **fields),)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step": 2}, "plan of step 2 follows step 0"),
        ({"zero_fill": (0,)}, r"pages to zero-fill \(0,\)"),
        ({"zero_fill": (1, PAGES)}, rf"pages to zero-fill \(1, {PAGES}\)"),
        ({"width": 0}, "width 0 / 2 drafts on a runner of width 3"),
        ({"width": 4}, "width 4 / 2 drafts"),
        ({"drafts": 3}, "width 3 / 3 drafts"),
        ({"drafts": -1}, "width 3 / -1 drafts"),
        (row(tokens=(1,) * (BUDGET + 1)), "41 tokens on a runner of at most 40"),
        ({"prefill": (ROW, ROW)}, "two rows"),
        ({"decode_slots": (0,)}, "two rows"),
        ({"prefill": ()}, "without rows"),
        ({"decode_slots": (SLOTS,)}, "slot 4 of 4"),
        ({"decode_slots": (-1,)}, "slot -1 of 4"),
        (row(slot=SLOTS), "slot 4 of 4"),
        ({"admissions": (replace(GOOD.admissions[0], slot=-1),)}, "slot -1 of 4"),
        (grant(slot=SLOTS), "slot 4 of 4"),
        (grant(first=-1), "entries -1"),
        (grant(first=LAST, pages=(1, 2)), r"entries 3 \+ 2"),
        (grant(pages=(1, 0)), "granted pages"),
        (grant(pages=(PAGES,)), "granted pages"),
        (row(start=-1), "prefill of 3 tokens at -1"),
        (row(start=REACH - WIDTH - 2), "prefill of 3 tokens at 251 exceeds 253"),
        (row(next_token=7), "never both"),
        (row(final=False), "never both"),
        (row(tokens=(1, -1)), "vocabulary"),
        (row(tokens=(1, VOCAB)), "vocabulary"),
        (row(final=False, next_token=VOCAB), "vocabulary"),
    ],
)
def test_a_plan_that_reaches_outside_is_refused_and_leaves_no_trace(
    runner: Runner, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        runner.launch(replace(GOOD, **wrong))
    assert not runner.parts.state.tensors.page_SP.any()
    assert len(runner.execute(GOOD).tokens) == 1


def test_what_just_fits_is_taken(runner: Runner) -> None:
    runner.execute(replace(GOOD, **row(slot=SLOTS - 1, tokens=(VOCAB - 1,) * BUDGET)))
    table = grant(slot=SLOTS - 1, first=LAST, pages=(PAGES - 1,))
    start = REACH - WIDTH - 3  # behind it there is room for the drafts
    last = row(slot=SLOTS - 1, start=start, final=False, next_token=VOCAB - 1)
    assert runner.execute(replace(GOOD, step=2, admissions=(), **table, **last)).tokens == ()
    end = row(slot=SLOTS - 1, start=start)
    assert len(runner.execute(replace(GOOD, step=3, admissions=(), grants=(), **end)).tokens) == 1


@torch.inference_mode()
def test_broken_numbers_are_a_nonfinite_row_and_no_tokens(runner: Runner) -> None:
    runner.parts.model.norm_E.fill_(torch.nan)
    result = runner.execute(GOOD)
    assert (result.tokens, result.nonfinite) == (((),), (0,))


@torch.inference_mode()
def test_ids_that_are_none_are_a_fault(runner: Runner) -> None:
    launched = runner.launch(GOOD)
    launched.decided_N[-1] = 2
    with pytest.raises(SamplingFault, match=rf"^2 token ids outside the vocabulary of {VOCAB}"):
        runner.collect(launched)


@torch.inference_mode()
def test_pages_are_zero_filled_before_anything_else(runner: Runner) -> None:
    """A page that is granted in the same plan holds nothing but what the plan writes."""
    for layer in runner.parts.cache.layers:
        layer.fill_(torch.nan)
    result = runner.execute(replace(GOOD, zero_fill=GOOD.grants[0].pages))
    assert result.nonfinite == ()
    page = GOOD.grants[0].pages[0]
    assert not any(layer[page].isnan().any() for layer in runner.parts.cache.layers)


def test_the_end_of_a_step_on_a_device_is_waited_for_once(runner: Runner) -> None:
    looks = SimpleNamespace(count=0, waited=0)

    class Event:
        def query(self) -> bool:
            looks.count += 1
            return looks.count > 3

        def synchronize(self) -> None:
            looks.waited += 1

    end = Waiting().launched("kind", Event(), 0.0)
    launched = dataclasses.replace(runner.launch(GOOD), done=end)
    assert not launched.finished
    assert len(runner.collect(launched).tokens) == 1
    assert launched.finished
    assert looks.waited == 1


def test_a_step_launched_behind_another_begins_when_that_one_ends(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def at(now: float, what: Any) -> Any:
        clock.now = now
        return what()

    decode = StepPlan(2, WIDTH, WIDTH - 1, (0,))
    first = at(100.0, lambda: runner.launch(GOOD))
    second = at(101.0, lambda: runner.launch(decode))
    assert at(110.0, lambda: runner.collect(first)).duration == 10.0
    assert at(114.0, lambda: runner.collect(second)).duration == 4.0
    third = at(120.0, lambda: runner.launch(replace(decode, step=3)))
    assert at(121.0, lambda: runner.collect(third)).duration == 1.0


def test_a_device_says_how_long_a_step_took_however_late_its_end_is_noticed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Mark:
        def __init__(self, milliseconds: float) -> None:
            self.milliseconds = milliseconds

        def elapsed_time(self, later: Mark) -> float:
            return later.milliseconds - self.milliseconds

    def launch(plan: StepPlan, began: float, ended: float) -> Launched:
        return dataclasses.replace(runner.launch(plan), timed=(Mark(began), Mark(ended)))  # type: ignore[arg-type]

    decode = StepPlan(2, WIDTH, WIDTH - 1, (0,))
    first, second = launch(GOOD, 0.0, 8.0), launch(decode, 8.0, 23.0)
    clock.now += 21.0
    assert runner.collect(first).duration == pytest.approx(8e-3)
    assert runner.collect(second).duration == pytest.approx(15e-3)
