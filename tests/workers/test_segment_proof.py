"""The proof of replayed segments finds planted faults, and passes on what is right. On a CPU a graph is emulated;
tests/workers/test_gpu_faults.py has the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rank_processes import run_ranks
from tests.tiny_models import write_tiny
from tests.workers.faults import ENDING_FAULTS, SEGMENT_FAULTS, ForgottenPadding, captured_with
from tests.workers.recorded import no_host_values
from tests.workers.test_engine import engine
from tests.workers.test_segments import Buckets, RecordedEnding, RecordedStage
from workers.config import EngineConfig
from workers.memory.scratch import Scratch
from workers.parallel.group import TensorParallel
from workers.proof.endings import prove_endings
from workers.proof.segments import SegmentProof
from workers.protocol.report import BucketReport
from workers.rank.rank import Rank
from workers.step.ladder import TokenLadder
from workers.step.parts import StepParts
from workers.step.stage import Ending, Stage

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
    parts: StepParts, stage_class: type[Stage], seed: int = 0, ending_class: type[Ending] = RecordedEnding
) -> list[BucketReport]:
    stages = Buckets(parts, BUDGET, stage_class, ending_class).stages
    return SegmentProof(parts, seed).run(list(stages.values()))


@torch.inference_mode()
def ending_report(parts: StepParts, ending_class: type[Ending] = RecordedEnding, seed: int = 0) -> list[BucketReport]:
    endings = Buckets(parts, BUDGET, RecordedStage, ending_class).endings
    return prove_endings(parts, list(endings.values()), seed=seed)


@pytest.mark.parametrize("width", [1, 3])
def test_every_bucket_passes(folder: Path, width: int) -> None:
    parts = parts_of(folder, width)
    for seed in range(4):
        reports = report(parts, RecordedStage, seed)
        assert [r.problems for r in reports] == [()] * 5
        assert [r.bucket for r in reports] == [f"{tokens} tokens" for tokens in (80, 64, 48, 32, 16)]
        assert max(r.logits_error or 0.0 for r in reports) < 1e-4
    assert not any(layer.isnan().any() for layer in parts.cache.layers)
    assert not parts.state.tensors.page_SP.any()


def test_a_pool_of_two_pages_is_enough(folder: Path) -> None:
    parts = parts_of(folder)
    parts.cache.layers[:] = [layer[:2] for layer in parts.cache.layers]
    assert all(r.passed for r in report(parts, RecordedStage))


@pytest.mark.parametrize("fault", SEGMENT_FAULTS)
def test_planted_faults_are_caught(folder: Path, fault: type[Stage]) -> None:
    reports = report(parts_of(folder), captured_with(RecordedStage, fault))
    assert len(reports) == 5
    assert all(any(SEGMENT_FAULTS[fault] in text for text in r.problems) for r in reports)


def test_padding_written_to_a_row_is_caught(folder: Path) -> None:
    """The last page of a pool so small that rows have it."""
    stage = captured_with(RecordedStage, ForgottenPadding)
    reports = [r for seed in range(4) for r in report(parts_of(folder, pages=8), stage, seed)]
    assert any("changed outside" in text or "differs" in text for r in reports for text in r.problems)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_every_ending_passes(folder: Path, width: int, invariant: bool) -> None:
    parts = parts_of(folder, width, rows=40, invariant=invariant)
    for seed in range(4):
        reports = ending_report(parts, seed=seed)
        assert [r.problems for r in reports] == [()] * 3
        assert [r.bucket for r in reports] == [f"{tokens} tokens" for tokens in (48, 32, 16)]
        assert max(r.logits_error or 0.0 for r in reports) < 1e-4


@pytest.mark.parametrize("fault", ENDING_FAULTS)
@pytest.mark.parametrize("width", [1, 3])
def test_planted_faults_of_endings_are_caught(folder: Path, fault: type[Ending], width: int) -> None:
    """In each ending, and in every bucket of tokens whose steps it ends: by the logits, or where it was drafted."""
    wrong = captured_with(RecordedEnding, fault)
    reports = ending_report(parts_of(folder, width, rows=40), wrong)
    assert [r.problems for r in reports] == [("hidden states differ",)] * 3
    reports = report(parts_of(folder, width), RecordedStage, ending_class=wrong)
    said = "logits differ" if width == 1 else "cache of layer"
    assert all(any(said in text for text in r.problems) for r in reports), reports


def prove_rank(rank: int, folder: Path, meeting: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    group = TensorParallel.connect(rank, 2, f"file://{meeting}/rendezvous", device, timeout_s=60)
    try:
        settings = {"max_rows": 40, "token_budget": 160, "cache_pages": 60, "max_context": 200, "selftest": False}
        config = EngineConfig(model=str(folder), width=2, device="cpu", **settings)
        parts = Rank(config, group, device).runner.parts
        endings = [Ending(parts, key.tokens, Scratch(device)) for key in TokenLadder(160).endings(40)]
        stages = [Stage(parts, key.tokens, Scratch(device), Scratch(device)) for key in TokenLadder(BUDGET)]
        for seed in range(2):
            reports = prove_endings(parts, endings, seed=seed) + SegmentProof(parts, seed).run(stages)
            assert [r.problems for r in reports] == [()] * 8
    finally:
        group.close()


def test_two_ranks_prove_together(folder: Path, tmp_path: Path) -> None:
    """Eagerly; a recording holds no collective."""
    run_ranks(prove_rank, 2, folder, tmp_path)
