"""Decode rows of several tokens in whole graphs.

What went wrong elsewhere: graphs were captured for one query token and replayed for two, so attention of the second
saw what was computed for another shape, and the output repeated itself ("ok, ok, ok ..."); or a decode row of two
tokens was taken for a short prompt, went to the prefill path, and the whole graph was never used, at half the speed and
silently.

Here the kind of a row is stated, and one constructor makes the keys of capture and dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.served import DRAFTERS, Place, alone, greedy_jobs, named, places, replica, serve, tiny
from tests.workers.faults import GroupedBounds, one_token
from tests.workers.harness import InlineEngine
from workers.models.attention.expanded import ExpandedChunks
from workers.protocol.plan import DecodeBuckets, GraphKey, StepPlan
from workers.rank.runner import Runner
from workers.step.parts import StepOutput

PLACES = places(pytest.mark.gpu)
JOBS = (6, 40, 24)
REPLAYED = PLACES[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("v3"))


class PrefillCalls:
    """Counts the calls of attention over prefill rows, by step."""

    def __init__(self, patch: pytest.MonkeyPatch, run: InlineEngine) -> None:
        self.in_decode_steps = self.elsewhere = 0
        self._decoding = False
        execute, attend = run.runner.execute, ExpandedChunks.attend

        def executed(plan: StepPlan) -> Any:
            self._decoding = not plan.prefill
            return execute(plan)

        def attended(*args: Any, **options: Any) -> Any:
            self.in_decode_steps += self._decoding
            self.elsewhere += not self._decoding
            return attend(*args, **options)

        patch.setattr(run.runner, "execute", executed)
        patch.setattr(ExpandedChunks, "attend", attended)


def decode_steps(run: InlineEngine) -> int:
    return sum(not plan.prefill for plan in run.plans)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("place", REPLAYED, ids=named)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_decode_step_is_a_whole_graph(
    folder: Path, monkeypatch: pytest.MonkeyPatch, width: int, place: Place, drafter: str
) -> None:
    expected = alone(folder, place[0], *JOBS)
    run = replica(folder, place, width=width, **DRAFTERS[drafter])
    calls = PrefillCalls(monkeypatch, run)
    assert serve(run, greedy_jobs(*JOBS)) == expected
    assert run.runner.stats.replays == decode_steps(run) > 5
    assert not run.runner.stats.eager
    assert calls.in_decode_steps == 0 < calls.elsewhere


def test_a_row_of_several_tokens_taken_for_a_prompt_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are the same: that no graph was used is what tells."""
    honest = Runner._decode_step

    def decode_step(runner: Runner, plan: StepPlan, masks: Any) -> Callable[[], StepOutput]:
        return honest(runner, plan, masks) if plan.width == 1 else runner._mixed_step(plan, masks)

    monkeypatch.setattr(Runner, "_decode_step", decode_step)
    run = replica(folder, ("cpu", True), width=3)
    serve(run, greedy_jobs(*JOBS))
    assert run.runner.stats.replays < decode_steps(run)


def test_a_key_of_dispatch_that_no_capture_has_is_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(folder, "cpu", *JOBS)
    run = replica(folder, ("cpu", True), width=3)

    def other(buckets: DecodeBuckets, layout: Any, drafts: int, *, dense: bool) -> GraphKey | None:
        return None

    monkeypatch.setattr(DecodeBuckets, "key", other)
    assert serve(run, greedy_jobs(*JOBS)) == expected
    assert run.runner.stats.replays == 0
    assert run.runner.stats.eager == {"width 3, 2 drafts": decode_steps(run)}


WRONG = {
    "attention of one query token replayed for several": one_token,
    "one causal bound for a whole row": GroupedBounds,
}


@pytest.mark.parametrize("place", REPLAYED, ids=named)
@pytest.mark.parametrize("name", WRONG)
def test_attention_of_another_shape_changes_the_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: Place
) -> None:
    expected = alone(folder, place[0], *JOBS)
    run = replica(folder, place, WRONG[name](), monkeypatch, width=2)
    assert serve(run, greedy_jobs(*JOBS)) != expected
