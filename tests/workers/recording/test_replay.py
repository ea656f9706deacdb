"""Recorded plans, run again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from tests.tiny_models import write_tiny
from tests.workers.recorded_plans import VOCAB, recorded
from workers.protocol.plan import StepPlan, StepResult
from workers.rank.runner import PlanError
from workers.recording.file import Recording, Step
from workers.recording.replay import Difference, Replay, replay_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2, vocab_size=VOCAB)


def replayed(recording: Recording) -> list[Difference | None]:
    return list(Replay(replay_config(recording.header), recording).run())


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_the_same_tokens_come_again(folder: Path, tmp_path: Path, width: int) -> None:
    recording, run = recorded(folder, tmp_path / "plans", record_prompts=True, width=width)
    assert replayed(recording) == [None] * len(run.plans)


def test_another_choice_is_the_first_difference(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _ = recorded(folder, tmp_path / "plans", record_prompts=True)
    run = Replay(replay_config(recording.header), recording)
    execute, at = run.rank.runner.execute, len(recording.steps) // 2

    def wrong(plan: StepPlan) -> StepResult:
        result = execute(plan)
        if plan.step < at or not result.tokens:
            return result
        last = result.tokens[-1]
        return StepResult(result.step, (*result.tokens[:-1], (*last[:-1], (last[-1] + 1) % VOCAB)), 0.0)

    monkeypatch.setattr(run.rank.runner, "execute", wrong)
    difference = next(found for found in run.run() if found is not None)
    assert difference.step >= at
    assert str(difference).startswith(f"step {difference.step}, ")
    assert difference.recorded != difference.replayed


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_without_prompts_the_same_steps_run_on_the_same_pages(
    folder: Path, tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tokens stand for the prompts, and rows have the recorded lengths all the same."""
    recording, first = recorded(folder, tmp_path / "plans", width=width)
    run = Replay(replay_config(recording.header), recording)
    state = run.rank.runner.parts.state.tensors
    again = []
    for step, difference in zip(recording.steps, run.run(), strict=True):
        assert difference is None
        again.append(step.plan)
    assert [plan.layout for plan in again] == [plan.layout for plan in first.plans]
    last = first.plans[-1]
    length_S = first.runner.parts.state.tensors.length_S
    for slot in last.decode_slots:  # after the last step the lengths follow the tokens, which are others
        assert abs(int(state.length_S[slot]) - int(length_S[slot])) < width
    assert state.page_SP.tolist() == first.runner.parts.state.tensors.page_SP.tolist()


def test_a_step_that_cannot_run_raises(folder: Path, tmp_path: Path) -> None:
    recording, _ = recorded(folder, tmp_path / "plans", record_prompts=True)
    config = replay_config(recording.header).model_copy(update={"max_rows": 1})
    with pytest.raises(PlanError, match="slot"):
        list(Replay(config, recording).run())


def test_rows_with_a_grammar_run_without_it_and_are_not_compared(folder: Path, tmp_path: Path) -> None:
    """The first request is treated as if it had a grammar, and its tokens were others."""
    recording, _ = recorded(folder, tmp_path / "plans", record_prompts=True)
    steps, slot = [], recording.steps[0].plan.admissions[0].slot
    live = True
    for step in recording.steps:
        plan, result = step.plan, step.result
        assert result is not None
        mine = [index for index, one in enumerate(plan.admissions) if one.slot == slot]
        live = live and (plan.step == 1 or not mine)
        if live and plan.step == 1:
            given = [msgspec.structs.replace(one, grammar=one.slot == slot) for one in plan.admissions]
            plan = msgspec.structs.replace(plan, admissions=tuple(given))
        if live and slot in plan.decode_slots:
            tokens = list(result.tokens)
            at = plan.decode_slots.index(slot)
            tokens[at] = tuple((token + 1) % VOCAB for token in tokens[at])
            plan = msgspec.structs.replace(plan, constrained=(slot,))
            result = msgspec.structs.replace(result, tokens=tuple(tokens))
        steps.append(Step(plan, result))
    assert any(step.plan.constrained for step in steps)
    assert set(replayed(dataclasses.replace(recording, steps=tuple(steps)))) == {None}
