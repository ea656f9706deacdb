"""Models with sparse attention on a GPU, against the CPU. They are refused there until these tests have passed, so the
refusal is left out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import random_tokens
from paged import CPU, Paged
from tiny_models import SPARSE_KINDS, VOCAB, write_tiny

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.families import load_model, loading
from workers.parallel.group import TensorParallel
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = [random_tokens(count, count, VOCAB) for count in (3, 17, 40, 64, 90, 130)]


@pytest.fixture(autouse=True)
def not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "refuse_sparse", lambda config, device: None)


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_mixed_steps_agree_with_the_cpu(kind: str, invariant: bool, fp8_cache: bool, tmp_path: Path) -> None:
    """Prefill, mixed and decode steps of two rows, drafts included, beyond what is attended to."""
    folder = write_tiny(tmp_path, kind, seed=1)
    how: dict[str, Any] = {"dtype": torch.float32, "max_positions": 512, "invariant": invariant, "fp8_cache": fp8_cache}
    results = []
    for device in (CPU, torch.device("cuda", 0)):
        model = load_model(folder, group=TensorParallel(), device=device, **how)
        assert model.drafter is not None
        paged, outputs = Paged(model, [random_tokens(151, 0, VOCAB), random_tokens(110, 1, VOCAB)]), []
        for decode, width, chunks in [([], 1, [(0, 70)]), ([0], 3, [(1, 65)]), ([0, 1], 2, []), ([1], 4, [(0, 40)])]:
            step = paged.plan(decode, width, chunks)
            hidden = paged.forward(step)
            outputs += [model.logits(hidden[row]).cpu() for row in sorted(hidden)]
            drafts = paged.draft(step, hidden)
            outputs += [model.drafter.logits(drafts[row]).cpu() for row in sorted(drafts)]
        results.append(outputs)
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, atol=1e-3 if fp8_cache else 1e-4, rtol=0)


def engine(folder: Path, device: str, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 4, "token_budget": 96, "cache_pages": 60, "dtype": "float32"}
    config = EngineConfig(model=str(folder), device=device, max_context=300, **{**defaults, **settings})
    return InlineEngine(config, torch.device(device))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_greedy_tokens_are_those_of_the_cpu(kind: str, graphs: bool, tmp_path: Path) -> None:
    """Eager, and replayed: every graph has passed the self-test, and none was left out."""
    folder, greedy = write_tiny(tmp_path, kind, seed=1), SamplingParams(24, temperature=0.0)
    expected = engine(folder, "cpu", width=1, selftest=False).generate(PROMPTS, greedy)
    run = engine(folder, "cuda", graphs=graphs, selftest=True)
    assert run.replica.selftest is not None
    assert run.replica.selftest.passed
    assert run.generate(PROMPTS, greedy) == expected
    if graphs:
        assert run.runner.graphs is not None
        assert run.runner.graphs.stats.replays > 10
        assert not run.runner.graphs.stats.eager
