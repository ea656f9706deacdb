"""Steps that have decode rows of several tokens and chunks of prompts at once.

What went wrong elsewhere: attention of decode rows was planned over all rows of a step and run on some of them; drafts
after a mixed step attended to the tail that verification had rejected; logits, masks and log-probabilities were
gathered from one place and written back to another; a row's length was advanced in a buffer that others still read; and
decode rows starved behind a long prompt, or fed one token in mixed steps, depending on request ids.

Here the layout says where everything lies, lengths live in one place on the device, and decode rows come first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import decode_state
from tests.scenarios.served import DRAFTERS, Job, Place, named, places, replica, tiny
from tests.workers.harness import InlineEngine
from workers.protocol.plan import BatchLayout, SamplingParams, StepPlan
from workers.scheduler import Scheduler
from workers.scheduler.speculation import Speculation
from workers.step.mixed import MixedStep
from workers.step.sampling import SamplingState

PLACES = places(pytest.mark.gpu)
BUDGET, LONG, ROWS, WIDTH = 16, 64, 3, 3
"""Three decode rows of three tokens leave seven of a step's sixteen to a prompt of 64."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("v3"))


def jobs() -> list[Job]:
    """Three that decode for long, and then long prompts. Penalties and log-probabilities make sampling look at what a
    step wrote back."""
    short = [
        ([17 + index, 5, 9], SamplingParams(60, temperature=0.8 * index, seed=index, logprobs=2, frequency_penalty=0.3))
        for index in range(ROWS)
    ]
    long = [
        ([(7 * index + place) % 100 + 10 for place in range(LONG)], SamplingParams(8, temperature=0.0, logprobs=2))
        for index in range(2)
    ]
    return short + long


def mixed(folder: Path, place: Place, names: str = "abcde", **settings: Any) -> InlineEngine:
    """Serve the jobs under these names: the long prompts arrive when the others decode."""
    given = {"width": WIDTH, "max_rows": ROWS + 2, "token_budget": BUDGET, "prefix_cache": False}
    run = replica(folder, place, **{**given, **settings})
    for name, (prompt, params) in zip(names, jobs()[:ROWS], strict=False):
        run.add(name, prompt, params)
    for _ in range(4):
        run.step()
    for name, (prompt, params) in zip(names[ROWS:], jobs()[ROWS:], strict=True):
        run.add(name, prompt, params)
    run.run()
    return run


def outcome(run: InlineEngine, names: str = "abcde") -> list[tuple[list[int], list[Any]]]:
    """Tokens, and the ids and rounded values of log-probabilities, of each job."""
    found = []
    for record in (run.finished[name] for name in names):
        entries = [entry for output in record.outputs for entry in output.logprobs]
        found.append((record.tokens, [(entry.ids, round(entry.chosen, 2)) for entry in entries]))
    return found


@cache
def one_by_one(folder: Path, device: str) -> list[tuple[list[int], list[Any]]]:
    """The same jobs without drafts, each in a replica of its own."""
    found = []
    for prompt, params in jobs():
        run = replica(folder, (device, False), width=1, prefix_cache=False)
        run.add("a", prompt, params)
        run.run()
        found += outcome(run, "a")
    return found


def starved(run: InlineEngine) -> list[StepPlan]:
    """Mixed steps in which a row that had begun to decode, and was not done, fed less than the full width."""
    begun: set[int] = set()
    wrong = []
    last = {slot: plan.step for plan in run.plans for slot in plan.decode_slots}
    for plan in run.plans:
        expected = {slot for slot in begun if last.get(slot, 0) >= plan.step}
        if plan.prefill and (not expected <= set(plan.decode_slots) or (expected and plan.width < WIDTH)):
            wrong.append(plan)
        begun |= {row.slot for row in plan.prefill if row.final}
    return wrong


@pytest.mark.parametrize(
    "drafter", ["mtp", *(pytest.param(name, marks=pytest.mark.long) for name in DRAFTERS if name != "mtp")]
)
@pytest.mark.parametrize("place", PLACES, ids=named)
def test_everybody_gets_what_they_get_alone(folder: Path, place: Place, drafter: str) -> None:
    run = mixed(folder, place, **DRAFTERS[drafter])
    both = [plan for plan in run.plans if plan.decode_slots and plan.prefill]
    assert len(both) > 2 * LONG // BUDGET
    assert outcome(run) == one_by_one(folder, place[0])
    assert all(plan.layout.tokens <= BUDGET for plan in run.plans)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("abcde", marks=pytest.mark.long),
        "edcba",
        pytest.param("cabed", marks=pytest.mark.long),
        pytest.param("zyabc", marks=pytest.mark.long),
    ],
)
def test_nobody_starves_whatever_the_ids_are(folder: Path, names: str) -> None:
    run = mixed(folder, ("cpu", False), names)
    assert starved(run) == []
    # The prompts go on, too: seven tokens a step, in the order of arrival.
    assert outcome(run, names) == outcome(mixed(folder, ("cpu", False)))
    first = {name: index for index, plan in enumerate(run.plans) for name in [plan.step] if plan.prefill}
    assert len(first) >= 2 * LONG // (BUDGET - ROWS * WIDTH)


class Attended:
    """Watches which rows attention of decode rows is given in a mixed step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pairs: list[tuple[int, int, int]] = []
        batch = MixedStep._batch

        def batched(step: MixedStep, rows: Any, stage: Any, first: int) -> Any:
            made = batch(step, rows, stage, first)
            if made.decode is not None:
                self.pairs.append((rows.layout.decode_rows, len(made.decode.length_R), len(made.decode.page_RP)))
            return made

        patch.setattr(MixedStep, "_batch", batched)


def test_attention_is_planned_for_decode_rows_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attended = Attended(monkeypatch)
    mixed(folder, ("cpu", False))
    assert len(attended.pairs) > 10
    assert all(rows == lengths == tables for rows, lengths, tables in attended.pairs)


def test_drafts_after_a_mixed_step_are_those_of_the_tokens(folder: Path) -> None:
    """Of each row and number of tokens: whether prompts were beside it does not show in its drafts."""
    assert drafts(folder, BUDGET) == drafts(folder, 120)


def drafts(folder: Path, budget: int) -> dict[tuple[str, int], list[int]]:
    """What every decode row fed in verification, by request and length."""
    given = {"width": WIDTH, "max_rows": ROWS + 2, "prefix_cache": False}
    run = replica(folder, ("cpu", False), token_budget=budget, **given)
    state, found = run.runner.parts.state.tensors, {}
    execute, owners = run.runner.execute, {}

    def executed(plan: StepPlan) -> Any:
        owners.update({s.slot: s.request.request_id for s in run.scheduler._flights[0].decode})
        for slot in plan.decode_slots:
            found[owners[slot], int(state.length_S[slot])] = state.draft_SK[slot].tolist()
        return execute(plan)

    run.runner.execute = executed  # type: ignore[method-assign]
    for name, (prompt, params) in zip("abcde", jobs(), strict=True):
        run.add(name, prompt, params)
    done = run.run()
    ends = {name: len(prompt) + len(done[name].tokens) - 1 for name, (prompt, _) in zip("abcde", jobs(), strict=True)}
    return {(name, length): ids for (name, length), ids in found.items() if length < ends[name]}


def rejected_tail(patch: pytest.MonkeyPatch) -> None:
    """A draft pass attends to what verification rejected."""
    honest = decode_state.feed_draft

    def feed_draft(
        state: Any, slot_R: Any, token_R: Any, index: int, position_R: Any, slot: Any, length_R: Any
    ) -> None:
        honest(state, slot_R, token_R, index, position_R, slot, length_R)
        length_R.add_(1)

    patch.setattr(decode_state, "feed_draft", feed_draft)


def test_drafts_that_see_the_rejected_tail_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost acceptance and never an answer, so it is the drafts that are compared."""
    right = drafts(folder, BUDGET)
    rejected_tail(monkeypatch)
    assert drafts(folder, BUDGET) != right


def advanced_twice(patch: pytest.MonkeyPatch) -> None:
    """The length that a mixed step advances is also what it reads: it moves once more."""
    honest = MixedStep._advance

    def advance(step: MixedStep, rows: Any, decided_N: Any, stage: Any) -> Any:
        newest_R = honest(step, rows, decided_N, stage)
        if rows.layout.decode_rows and len(rows.start):
            step._parts.state.tensors.length_S[rows.slot_R[: rows.layout.decode_rows]] += 1
        return newest_R

    patch.setattr(MixedStep, "_advance", advance)


def rows_of_others(patch: pytest.MonkeyPatch) -> None:
    """Attention of decode rows has the page tables of the step's first rows in another order."""
    honest = MixedStep._batch

    def batch(step: MixedStep, rows: Any, stage: Any, first: int) -> Any:
        made = honest(step, rows, stage, first)
        if made.decode is not None and made.prefill is not None and rows.layout.decode_rows > 1:
            made.decode.page_RP.copy_(made.decode.page_RP.roll(1, 0))
        return made

    patch.setattr(MixedStep, "_batch", batch)


def logits_of_the_first_place(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are written back by row, as if each had one logits row."""
    honest = BatchLayout.logits_rows_of

    def logits_rows_of(layout: BatchLayout, row: int) -> range:
        right = honest(layout, row)
        return range(row, row + len(right)) if layout.prefill_tokens else right

    patch.setattr(BatchLayout, "logits_rows_of", logits_rows_of)


def counts_of_every_other_row(patch: pytest.MonkeyPatch) -> None:
    """Of what a step generated only every other row's tokens are counted."""
    honest = SamplingState.commit

    def commit(state: SamplingState, slot_R: Any, token_RW: Any, count_R: Any, more: int = 0) -> None:
        rows = torch.arange(len(slot_R)) % 2 == 0
        honest(state, slot_R[rows], token_RW[rows], count_R[rows], more=more)

    patch.setattr(SamplingState, "commit", commit)


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a length advanced in place": advanced_twice,
    "page tables of other rows": rows_of_others,
    "log-probabilities written back by row": logits_of_the_first_place,
    "counts of some rows": counts_of_every_other_row,
}


@pytest.mark.parametrize(
    "name",
    [
        "a length advanced in place",
        "page tables of other rows",
        pytest.param("log-probabilities written back by row", marks=pytest.mark.long),
        pytest.param("counts of some rows", marks=pytest.mark.long),
    ],
)
def test_a_wrong_step_changes_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = one_by_one(folder, "cpu")
    WRONG[name](monkeypatch)
    assert outcome(mixed(folder, ("cpu", False))) != expected


def prompts_first(patch: pytest.MonkeyPatch) -> None:
    """Decode rows wait while anybody has a prompt."""
    honest = Scheduler._plan_decode

    def plan_decode(scheduler: Scheduler, width: int, grants: Any) -> Any:
        rows = scheduler._rows
        return ([], False) if rows.prefilling or len(rows.queue) else honest(scheduler, width, grants)

    patch.setattr(Scheduler, "_plan_decode", plan_decode)


def one_token_in_mixed_steps(patch: pytest.MonkeyPatch) -> None:
    """Decode rows feed one token whenever a prompt is there."""
    honest = Scheduler.plan

    def plan(scheduler: Scheduler) -> StepPlan | None:
        rows = scheduler._rows
        with pytest.MonkeyPatch.context() as inner:
            if rows.prefilling or len(rows.queue):
                inner.setattr(Speculation, "choose", lambda *_: (1, WIDTH - 1))
            return honest(scheduler)

    patch.setattr(Scheduler, "plan", plan)


@pytest.mark.parametrize("wrong", [pytest.param(prompts_first, marks=pytest.mark.long), one_token_in_mixed_steps])
def test_decode_rows_that_starve_are_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The answers are the same; the plans tell."""
    expected = one_by_one(folder, "cpu")
    wrong(monkeypatch)
    run = mixed(folder, ("cpu", False))
    assert len(starved(run)) > 5
    assert outcome(run) == expected
