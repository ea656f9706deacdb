"""The proof of replayed segments finds planted faults, and passes on what is right. On a CPU a graph is emulated;
tests/workers/proof/test_gpu_faults.py has the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.page import PAGE_TOKENS
from tests.rank_processes import run_ranks
from tests.tiny_models import write_tiny
from tests.workers.faults import SEGMENT_FAULTS, TAIL_FAULTS, ForgottenPadding, PaddingInSlotZero, captured_with
from tests.workers.graphs.test_segments import Buckets, RecordedStage, RecordedTail
from tests.workers.recorded import no_host_values
from tests.workers.test_engine import engine
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.proof import segments
from workers.proof.segments import SegmentProof
from workers.proof.tails import prove_tails
from workers.protocol.plan import PrefillRow, StepPlan, TokenBuckets
from workers.protocol.report import BucketReport
from workers.rank.rank import Rank
from workers.step.mixed import MixedStep, Stage, Tail
from workers.step.parts import StepOutput, StepParts

BUDGET = 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


@pytest.fixture(autouse=True)
def recordable(monkeypatch: pytest.MonkeyPatch) -> None:
    no_host_values(monkeypatch)


def parts_of(folder: Path, width: int = 3, pages: int = 60, rows: int = 6, invariant: bool = False) -> StepParts:
    settings = {"max_rows": rows, "token_budget": 160, "cache_pages": pages, "max_context": 200, "selftest": False}
    return engine(folder, width=width, invariant=invariant, **settings).runner.parts


@torch.inference_mode()
def report(
    parts: StepParts, stage_class: type[Stage], seed: int = 0, tail_class: type[Tail] = RecordedTail
) -> list[BucketReport]:
    stages = Buckets(parts, BUDGET, stage_class, tail_class).stages
    return SegmentProof(parts, seed).run(list(stages.values()))


@torch.inference_mode()
def tail_report(parts: StepParts, tail_class: type[Tail] = RecordedTail, seed: int = 0) -> list[BucketReport]:
    tails = Buckets(parts, BUDGET, RecordedStage, tail_class).tails
    return prove_tails(parts, list(tails.values()), seed=seed)


@pytest.mark.parametrize(
    ("kind", "width"),
    [pytest.param("v3", 1, marks=pytest.mark.long), ("v3", 3), pytest.param("glm5", 3, marks=pytest.mark.long)],
)
def test_every_bucket_passes(kind: str, width: int, tmp_path: Path) -> None:
    parts = parts_of(write_tiny(tmp_path, kind, seed=3), width)
    for seed in range(2 if kind == "v3" else 1):
        reports = report(parts, RecordedStage, seed)
        assert [r.problems for r in reports] == [()] * 5
        assert [r.bucket for r in reports] == [f"{tokens} tokens" for tokens in (80, 64, 48, 32, 16)]
        assert max(r.logits_error or 0.0 for r in reports) < 1e-4
    assert not any(layer.isnan().any() for layer in parts.cache.layers)
    assert not parts.state.tensors.page_SP.any()


class Mark:
    """An event of a device that works while the host launches."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.long
def test_steps_with_decode_rows_are_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from the beginning of its fixture; so what is timed leaves no trace in what is compared."""
    monkeypatch.setattr(segments, "timed_runs", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    plans, honest = list[StepPlan](), MixedStep.run

    def run(step: MixedStep, plan: StepPlan, *where: Any) -> StepOutput:
        if plan.prefill[0].slot >= 0:  # else it is recorded
            plans.append(plan)
        return honest(step, plan, *where)

    monkeypatch.setattr(MixedStep, "run", run)
    reports = [r for seed in range(2) for r in report(parts_of(folder), RecordedStage, seed)]
    assert all(r.passed for r in reports)
    last = [plan for plan, other in pairwise([*plans, None]) if plan is not other]
    assert len(last) == len(reports)
    for plan, found in zip(last, reports, strict=True):
        rows, prompts = len(plan.decode_slots), sum(len(row.tokens) for row in plan.prefill)
        if timed := found.step_time:
            assert (timed.rows, timed.width, timed.prompt_tokens) == (rows, 3, prompts)
            assert 0 < timed.seconds < found.seconds
        else:
            assert not rows
    assert sum(r.step_time is not None for r in reports) > len(reports) / 2


def test_a_pool_of_two_pages_is_enough(folder: Path) -> None:
    parts = parts_of(folder)
    parts.cache.layers[:] = [layer[:2] for layer in parts.cache.layers]
    assert all(r.passed for r in report(parts, RecordedStage))


QUICK_FAULTS = ("StaleAttention", "StashedHidden")


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=() if fault.__name__ in QUICK_FAULTS else pytest.mark.long) for fault in SEGMENT_FAULTS],
)
def test_planted_faults_are_caught(folder: Path, fault: type[Stage]) -> None:
    reports = report(parts_of(folder), captured_with(RecordedStage, fault))
    assert len(reports) == 5
    assert all(any(SEGMENT_FAULTS[fault] in text for text in r.problems) for r in reports)


def test_padding_written_to_a_row_is_caught(folder: Path) -> None:
    """The last page of a pool so small that rows have it."""
    stage = captured_with(RecordedStage, ForgottenPadding)
    reports = [r for seed in range(4) for r in report(parts_of(folder, pages=8), stage, seed)]
    assert any("changed outside" in text or "differs" in text for r in reports for text in r.problems)


@torch.inference_mode()
def report_of_eager(parts: StepParts, seeds: range) -> list[BucketReport]:
    """Stages without graphs, whose eager steps are their own replays."""
    stages = [Stage(parts, key.tokens, Scratch(parts.device), Scratch(parts.device)) for key in TokenBuckets(BUDGET)]
    return [found for seed in seeds for found in SegmentProof(parts, seed).run(stages)]


@pytest.mark.long
def test_padding_written_to_a_former_tenants_page_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row has slot 0, so its table is a former tenant's."""
    stage, honest, plans = captured_with(RecordedStage, PaddingInSlotZero), MixedStep.run, []

    def run(step: MixedStep, plan: StepPlan, where: Stage, *masks: Any) -> StepOutput:
        if isinstance(where, PaddingInSlotZero):
            plans.append((plan, where.tokens))
        return honest(step, plan, where, *masks)

    monkeypatch.setattr(MixedStep, "run", run)
    reports = [found for seed in range(4) for found in report(parts_of(folder, rows=20), stage, seed)]
    vacant = [
        found
        for found, (plan, tokens) in zip(reports, plans, strict=True)
        if plan.layout.tokens < tokens and 0 not in slots_of(plan)
    ]
    assert len(vacant) > 5
    for found in vacant:
        assert "cache of layer 0 changed outside the rows' own entries" in found.problems


def test_a_page_table_whose_tail_is_not_zero_filled_is_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(folder)
    monkeypatch.setattr(parts.state, "admit", lambda admissions: None)
    reports = report_of_eager(parts, range(1))
    assert [found.problems for found in reports] == [("a newcomer's page table keeps former pages",)] * 5


def slots_of(plan: StepPlan) -> set[int]:
    return {*plan.decode_slots, *(row.slot for row in plan.prefill)}


def entry_of(parts: StepParts, row: PrefillRow, position: int) -> torch.Tensor:
    """A row's entry in the draft layer's cache."""
    page = int(parts.state.tensors.page_SP[row.slot, position // PAGE_TOKENS])
    return parts.cache.layers[-1][page, position % PAGE_TOKENS]


def former_page(parts: StepParts, plan: StepPlan) -> bool:
    free = sorted(set(range(parts.state.slots)) - slots_of(plan))
    if free:
        parts.cache.layers[1][int(parts.state.tensors.page_SP[free[0], 0]), 5] = 1.0
    return bool(free)


def slot_without_row(parts: StepParts, plan: StepPlan) -> bool:
    free = sorted(set(range(parts.state.slots)) - slots_of(plan))
    if free:
        parts.state.tensors.draft_SK[free[0]] += 1
    return bool(free)


def nobodys_slot(parts: StepParts, plan: StepPlan) -> bool:
    parts.state.tensors.length_S[-1] += 1
    return True


def slot_of_a_chunk_in_the_middle(parts: StepParts, plan: StepPlan) -> bool:
    middle = [row.slot for row in plan.prefill if not row.final]
    if middle:
        parts.state.tensors.last_S[middle[0]] += 1
    return bool(middle)


def draft_entry_before_the_first(parts: StepParts, plan: StepPlan) -> bool:
    """Change the entry that pairs the token fed first with the hidden state before it, that of a step before."""
    entry_of(parts, plan.prefill[0], plan.prefill[0].start).fill_(1.0)
    return True


def draft_entry_of_the_last_draft(parts: StepParts, plan: StepPlan) -> bool:
    """Change the entry of the last draft, which is never fed. The first prefill row of a plan is final."""
    row = plan.prefill[0]
    entry_of(parts, row, row.start + len(row.tokens) + plan.drafts).fill_(1.0)
    return True


def draft_entry_behind_a_chunk_in_the_middle(parts: StepParts, plan: StepPlan) -> bool:
    """Change the entry behind a chunk in the middle, which is followed by no draft."""
    middle = [row for row in plan.prefill if not row.final]
    if middle:
        entry_of(parts, middle[0], middle[0].start + len(middle[0].tokens) + 1).fill_(1.0)
    return bool(middle)


@pytest.mark.parametrize(
    ("change", "caught"),
    [
        (former_page, "cache of layer 1 changed outside the rows' own entries"),
        pytest.param(slot_without_row, "a slot without a sampled row changed", marks=pytest.mark.long),
        pytest.param(nobodys_slot, "a slot without a sampled row changed", marks=pytest.mark.long),
        (slot_of_a_chunk_in_the_middle, "a slot without a sampled row changed"),
        (draft_entry_before_the_first, "cache of layer 3 changed outside the rows' own entries"),
        pytest.param(
            draft_entry_of_the_last_draft,
            "cache of layer 3 changed outside the rows' own entries",
            marks=pytest.mark.long,
        ),
        pytest.param(
            draft_entry_behind_a_chunk_in_the_middle,
            "cache of layer 3 changed outside the rows' own entries",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_both_runs_change_wrongly_is_caught(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[StepParts, StepPlan], bool], caught: str
) -> None:
    parts, honest, changed = parts_of(folder, rows=12), MixedStep.run, {}

    def run(step: MixedStep, plan: StepPlan, where: Stage, *masks: Any) -> StepOutput:
        output = honest(step, plan, where, *masks)
        changed[plan] = change(parts, plan)
        return output

    monkeypatch.setattr(MixedStep, "run", run)
    reports = report_of_eager(parts, range(3))
    assert sum(changed.values()) >= 5
    for found, wrong in zip(reports, changed.values(), strict=True):
        assert found.problems == ((caught,) if wrong else ())


@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_every_tail_passes(folder: Path, width: int, invariant: bool) -> None:
    parts = parts_of(folder, width, rows=40, invariant=invariant)
    for seed in range(2):
        reports = tail_report(parts, seed=seed)
        assert [r.problems for r in reports] == [()] * 3
        assert [r.bucket for r in reports] == [f"{tokens} tokens" for tokens in (48, 32, 16)]
        assert max(r.logits_error or 0.0 for r in reports) < 1e-4


QUICK_TAIL_FAULTS = (("StaleTail", 1), ("KeptResidual", 1), ("GatheredOnce", 3))


@pytest.mark.parametrize(
    ("fault", "width"),
    [
        pytest.param(fault, width, marks=() if (fault.__name__, width) in QUICK_TAIL_FAULTS else pytest.mark.long)
        for fault in TAIL_FAULTS
        for width in (1, 3)
    ],
)
def test_planted_faults_of_tails_are_caught(folder: Path, fault: type[Tail], width: int) -> None:
    """Faults are caught in each tail, and in every bucket of tokens whose steps it ends: by the logits, or where it was
    drafted."""
    wrong = captured_with(RecordedTail, fault)
    reports = tail_report(parts_of(folder, width, rows=40), wrong)
    assert [r.problems for r in reports] == [("hidden states differ",)] * 3
    reports = report(parts_of(folder, width), RecordedStage, tail_class=wrong)
    said = "logits differ" if width == 1 else "cache of layer"
    assert all(any(said in text for text in r.problems) for r in reports), reports


def prove_rank(rank: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    group = Group.connect(Mesh.of(rank, 2), f"file://{meeting}/rendezvous", device, timeout_s=60)
    try:
        settings = {"max_rows": 40, "token_budget": 160, "cache_pages": 60, "max_context": 200, "selftest": False}
        config = EngineConfig(model=str(folder), width=2, device="cpu", **settings)
        parts = Rank(config, group, device).runner.parts
        tails = [Tail(parts, key.tokens, Scratch(device)) for key in TokenBuckets(160).tails(40)]
        stages = [Stage(parts, key.tokens, Scratch(device), Scratch(device)) for key in TokenBuckets(BUDGET)]
        for seed in range(2):
            reports = prove_tails(parts, tails, seed=seed) + SegmentProof(parts, seed).run(stages)
            assert [r.problems for r in reports] == [()] * 8
    finally:
        group.close()


@pytest.mark.long
def test_two_ranks_prove_together(folder: Path, tmp_path: Path) -> None:
    """Eagerly; a recording holds no collective."""
    run_ranks(prove_rank, 2, folder, tmp_path)
