"""The self-test of a model with sparse attention has rows that do not attend to everything: else what was selected
would be the same whoever selected it, and nothing of an indexer would be proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import write_tiny
from tests.workers.faults import Memory
from tests.workers.test_engine import engine
from workers.memory.scratch import Scratch
from workers.models.attention import sparse_rows
from workers.proof.decode_steps import MOST_PAGES, Candidate, SelfTest
from workers.proof.segments import MOST_CONTEXT, SegmentProof
from workers.protocol.plan import DecodeBuckets
from workers.protocol.report import BucketReport
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage
from workers.step.parts import StepOutput, StepParts

TOP_K = 260
"""Number of selected positions: more than the rows of other models have on a CPU."""
Select = Callable[..., None]


@pytest.fixture
def parts(tmp_path: Path) -> StepParts:
    assert max(64 * MOST_PAGES["cpu"], MOST_CONTEXT + 64) <= TOP_K
    folder = write_tiny(tmp_path, "glm5", seed=3, index_topk=TOP_K, num_hidden_layers=3)
    sizes = {"width": 2, "max_rows": 3, "cache_pages": 60, "max_context": 480, "token_budget": 64}
    return engine(folder, selftest=False, **sizes).runner.parts


def decode(parts: StepParts, run: Callable[[DecodeStep], StepOutput], plain: bool | None = None) -> list[BucketReport]:
    """Prove every decode step; `run` is its replay."""
    steps = [DecodeStep(parts, key, Scratch(parts.device)) for key in DecodeBuckets(3, 2)]
    return SelfTest(parts, plain=plain).run([Candidate(step, lambda step=step: run(step)) for step in steps])


def mixed(parts: StepParts) -> list[BucketReport]:
    return SegmentProof(parts).run([Stage(parts, 64, Scratch(parts.device), Scratch(parts.device))])


def first_ones(selected_TS: Tensor, bound_T: Tensor) -> None:
    """Positions in their order, as of a short context."""
    at_S = torch.arange(selected_TS.shape[1], dtype=torch.int32)
    selected_TS.copy_(at_S.where(at_S < bound_T.unsqueeze(1), -1))


def wrong(select: Select, what: str) -> Select:
    memory = Memory()

    def selected(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, *rest: Any, **options: Any) -> None:
        select(score_TN, bound_T, selected_TS, *rest, **options)
        if what == "the first positions":
            first_ones(selected_TS, bound_T)
        else:  # those of the capture, of as many tokens and as long a context
            selected_TS.copy_(memory((selected_TS.shape, tuple(bound_T.clamp(max=TOP_K).tolist())), selected_TS.clone))

    return selected


def test_every_fixture_has_a_row_that_selects(parts: StepParts, monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []
    honest = sparse_rows.select_positions

    def noting(score_TN: Tensor, bound_T: Tensor, *rest: Any, **options: Any) -> None:
        longest.append(int(bound_T.max()))
        honest(score_TN, bound_T, *rest, **options)

    monkeypatch.setattr(sparse_rows, "select_positions", noting)
    reports = decode(parts, lambda step: step.run()) + mixed(parts)
    assert [report.problems for report in reports] == [()] * len(reports)
    assert max(report.logits_error for report in reports if report.logits_error is not None) < 1e-4
    # Of the draft layer, too.
    assert sum(length > TOP_K for length in longest) >= len(longest) / 3


@pytest.mark.parametrize("what", ["the first positions", "those of the capture"])
def test_a_stale_selection_is_caught(what: str, parts: StepParts, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = wrong(sparse_rows.select_positions, what)

    def replay(step: DecodeStep) -> StepOutput:
        with monkeypatch.context() as patch:
            patch.setattr(sparse_rows, "select_positions", fault)
            return step.run()

    reports = decode(parts, replay)
    assert "logits differ" in reports[0].problems
    assert all(report.problems for report in reports)


@pytest.mark.parametrize("plain", [True, False])
def test_selecting_otherwise_than_the_reference_is_caught(
    plain: bool, parts: StepParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs of a decode step select what is least wanted: what the reference takes then, but does not choose."""
    honest = sparse_rows.select_positions

    def select(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, *rest: Any, **options: Any) -> None:
        honest(score_TN, bound_T, selected_TS, *rest, **options)
        if len(bound_T) < 16:
            first_ones(selected_TS, torch.full_like(bound_T, TOP_K // 4).minimum(bound_T))

    monkeypatch.setattr(sparse_rows, "select_positions", select)
    assert any(report.problems for report in decode(parts, lambda step: step.run(), plain))


def test_a_small_pool_is_enough(parts: StepParts) -> None:
    """Then no row selects."""
    parts.cache.layers[:] = [layer[:4] for layer in parts.cache.layers]
    assert all(report.passed for report in decode(parts, lambda step: step.run()))
