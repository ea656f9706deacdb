"""Steps that have decode rows of several tokens and chunks of prompts at once.

What went wrong elsewhere: attention of decode rows was planned over all rows of a step and run on some of them; drafts
after a mixed step attended to the tail that verification had rejected; logits, masks and log-probabilities were
gathered from one place and written back to another; a row's length was advanced in a buffer that others still read; and
decode rows starved behind a long prompt, or fed one token in mixed steps, depending on request ids.

Here the layout says where everything lies, lengths live in one place on the device, and decode rows come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import decode_state
from tests.scenarios.served import DRAFTERS, Job, Place, named, places, replica, tiny
from tests.workers.good_drafts import good_drafts
from tests.workers.grammar.grammar_model import EOS, text_of, write_grammar_model
from tests.workers.harness import InlineEngine
from workers.grammar.rows import ConstrainedRows
from workers.protocol.grammar import Grammar
from workers.protocol.plan import BatchLayout, SamplingParams, StepPlan
from workers.scheduler import Scheduler
from workers.scheduler.speculation import Speculation
from workers.step.mixed import MixedStep, Stage
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


def crowded(folder: Path, place: Place, **settings: Any) -> InlineEngine:
    """A replica whose steps have little room for prompts."""
    given = {"width": WIDTH, "max_rows": ROWS + 2, "token_budget": BUDGET, "prefix_cache": False}
    return replica(folder, place, **{**given, **settings})


def serve(run: InlineEngine, asked: list[Job], names: str) -> None:
    """The long prompts arrive when the others decode."""
    for name, (prompt, params) in zip(names, asked[:ROWS], strict=False):
        run.add(name, prompt, params)
    for _ in range(4):
        run.step()
    for name, (prompt, params) in zip(names[ROWS:], asked[ROWS:], strict=True):
        run.add(name, prompt, params)
    run.run()


def mixed(folder: Path, place: Place, names: str = "abcde", **settings: Any) -> InlineEngine:
    """Serve the jobs under these names."""
    run = crowded(folder, place, **settings)
    serve(run, jobs(), names)
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
    """Whether prompts were beside a row does not show in its drafts, for any row and number of tokens."""
    assert drafts(folder, BUDGET) == drafts(folder, 120)


def drafts(folder: Path, budget: int) -> dict[tuple[str, int], list[int]]:
    """Return what every decode row fed in verification, by request and length."""
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
        state: Any, slot_R: Any, token_R: Any, index: int, position_R: Any, slot: Any, length_R: Any, *shards: Any
    ) -> None:
        honest(state, slot_R, token_R, index, position_R, slot, length_R, *shards)
        length_R.add_(1)

    patch.setattr(decode_state, "feed_draft", feed_draft)


def test_drafts_that_see_the_rejected_tail_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such drafts cost acceptance and never an answer, so the drafts are compared."""
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


def plans_over_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Attention is planned over all rows, prompts first, and run on decode rows: of each it works on what the plan
    has of the row of that number. On a CPU nothing is planned, so lengths stand for what a plan deals out."""
    honest = MixedStep._batch

    def batch(step: MixedStep, rows: Any, stage: Any, first: int) -> Any:
        made = honest(step, rows, stage, first)
        if made.decode is None:
            return made
        length_D = made.decode.length_R
        ends = [start + tokens for start, tokens in zip(rows.start, rows.layout.prefill_tokens, strict=True)]
        planned_D = torch.cat([length_D.new_tensor(ends), length_D])[: len(length_D)]
        return replace(made, decode=replace(made.decode, length_R=torch.minimum(length_D, planned_D)))

    patch.setattr(MixedStep, "_batch", batch)


def logits_of_the_first_place(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are written back by row, as if each had one logits row."""
    honest = BatchLayout.logits_rows_of

    def logits_rows_of(layout: BatchLayout, row: int) -> range:
        right = honest(layout, row)
        return range(row, row + len(right)) if layout.prefill_tokens else right

    patch.setattr(BatchLayout, "logits_rows_of", logits_rows_of)


def logits_gathered_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Logits are gathered with those of prompts first, and what is sampled from them is written back behind the decode
    rows."""
    honest = MixedStep._sample

    def sample(step: MixedStep, rows: Any, stage: Stage, masks: Any) -> Any:
        split, hidden = rows.layout.decode_tokens, stage.target_hidden
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(stage, "target_hidden", lambda token_N: hidden(token_N.roll(-split)))
            return honest(step, rows, stage, masks)

    patch.setattr(MixedStep, "_sample", sample)


def counts_of_every_other_row(patch: pytest.MonkeyPatch) -> None:
    """Count only every other row's tokens of those that a step generated."""
    honest = SamplingState.commit

    def commit(state: SamplingState, slot_R: Any, token_RW: Any, count_R: Any, more: int = 0) -> None:
        rows = torch.arange(len(slot_R)) % 2 == 0
        honest(state, slot_R[rows], token_RW[rows], count_R[rows], more=more)

    patch.setattr(SamplingState, "commit", commit)


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a length advanced in place": advanced_twice,
    "page tables of other rows": rows_of_others,
    "a plan over all rows": plans_over_all_rows,
    "logits gathered in another order": logits_gathered_in_another_order,
    "log-probabilities written back by row": logits_of_the_first_place,
    "counts of some rows": counts_of_every_other_row,
}


@pytest.mark.parametrize(
    "name",
    [
        "a length advanced in place",
        "page tables of other rows",
        "a plan over all rows",
        "logits gathered in another order",
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
    honest = Scheduler._schedule_decode

    def schedule_decode(scheduler: Scheduler, width: int, grants: Any) -> Any:
        rows = scheduler._rows
        return ([], False) if rows.prefilling or len(rows.queue) else honest(scheduler, width, grants)

    patch.setattr(Scheduler, "_schedule_decode", schedule_decode)


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


FORM = r"([ab][0-9][c-f](-|\+))*"
"""Form in which the allowed characters depend on the place in the text, so the mask of one position is that of no
other."""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are text."""
    return write_grammar_model(tmp_path_factory.mktemp("writer"))


def bound_jobs() -> list[Job]:
    """Make jobs as `jobs` does; two of the rows that decode and both that come later have a grammar, the second one has
    none."""

    def params(index: int, tokens: int) -> SamplingParams:
        grammar = None if index == 1 else Grammar("regex", FORM)
        bias = ((EOS, -9.0),)
        return SamplingParams(
            tokens, temperature=0.8 * (index % 3), seed=index, stop_ids=(EOS,), grammar=grammar, logit_bias=bias
        )

    return [(prompt, params(index, own.max_tokens)) for index, (prompt, own) in enumerate(jobs())]


@cache
def bound_one_by_one(folder: Path) -> dict[str, list[int]]:
    """The tokens of each of these jobs, without drafts, in a replica of its own."""
    found = {}
    for name, (prompt, params) in zip("abcde", bound_jobs(), strict=True):
        run = replica(folder, ("cpu", False), width=1, prefix_cache=False)
        run.add(name, prompt, params)
        found[name] = run.run()[name].tokens
    return found


def bound(folder: Path, patch: pytest.MonkeyPatch) -> InlineEngine:
    """Serve them together, with drafts that are mostly accepted."""
    run = crowded(folder, ("cpu", False))
    good_drafts(patch, run, bound_one_by_one(folder))
    serve(run, bound_jobs(), "abcde")
    return run


def test_masks_are_those_of_the_position(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bound(writer, monkeypatch)
    assert {name: record.tokens for name, record in run.finished.items()} == bound_one_by_one(writer)
    for name in "acde":
        text = text_of(run.finished[name].tokens)
        assert any(re.fullmatch(FORM, text + rest) for rest in ("", "-", "c-", "0c-")), text
    both = [plan for plan in run.plans if plan.prefill and len(set(plan.constrained) & set(plan.decode_slots)) > 1]
    assert len(both) > LONG // BUDGET
    assert any(plan.layout.prefill_final[-1] and len(plan.constrained) > 2 for plan in both), "masks of either kind"
    stats = run.scheduler.stats()
    assert stats.drafts_accepted > 0.3 * stats.drafts_offered


def masks_of_stale_candidates(patch: pytest.MonkeyPatch) -> None:
    """Let masks in mixed steps follow from the drafts that the step before has verified."""
    drafted, fill = ConstrainedRows.drafted, ConstrainedRows.fill
    stale: dict[int, Any] = {}

    def remembering(rows: ConstrainedRows, slot: int, drafts: Any) -> None:
        stale[slot] = rows._drafts_of.get(slot, ())
        drafted(rows, slot, drafts)

    def filled(rows: ConstrainedRows, layout: BatchLayout, slots: Any, constrained: Any, masks: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            if layout.prefill_tokens:
                inner.setattr(rows, "_drafts_of", {**rows._drafts_of, **stale})
            return fill(rows, layout, slots, constrained, masks)

    patch.setattr(ConstrainedRows, "drafted", remembering)
    patch.setattr(ConstrainedRows, "fill", filled)


def masks_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Let masks in mixed steps lie where they would if prompts came first."""
    fill = ConstrainedRows.fill

    def filled(rows: ConstrainedRows, layout: BatchLayout, slots: Any, constrained: Any, masks: Any) -> Any:
        dead_ends = fill(rows, layout, slots, constrained, masks)
        if layout.prefill_tokens:
            index_N = masks._index_N[: layout.logits_rows]
            index_N[:] = torch.from_numpy(index_N.copy()).roll(layout.logits_rows - layout.decode_tokens).numpy()
        return dead_ends

    patch.setattr(ConstrainedRows, "fill", filled)


@pytest.mark.parametrize("wrong", [masks_of_stale_candidates, masks_in_another_order])
def test_masks_of_others_are_seen(
    writer: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = bound_one_by_one(writer)
    wrong(monkeypatch)
    run = bound(writer, monkeypatch)
    assert {name: record.tokens for name, record in run.finished.items()} != expected
