"""Requests with grammars on a GPU: two replays a step, eager steps and mixed ones give what a CPU's steps give."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grammar_model import write_grammar_model
from test_constrained_steps import jobs, served

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.masks import RandomMasks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grammar_model(tmp_path_factory.mktemp("v3"))


def engine(folder: Path, device: str, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 6, "token_budget": 150, "cache_pages": 160, "max_context": 500, "dtype": "float32"}
    config = EngineConfig(
        model=str(folder), device=device, invariant=True, **{**defaults, "selftest": False, **settings}
    )
    return InlineEngine(config, torch.device(device))


def captured(folder: Path, width: int) -> InlineEngine:
    run = engine(folder, "cuda", width=width)
    assert run.runner.graphs is not None
    return run


@pytest.mark.parametrize("width", [1, 3])
def test_texts_are_the_same_replayed_and_eager_and_validate(folder: Path, width: int) -> None:
    run = captured(folder, width)
    got = served(run, jobs(16))
    assert got == served(engine(folder, "cuda", width=width, graphs=False), jobs(16))
    assert got == served(captured(folder, 4 - width), jobs(16))
    eager = {reason for reason in run.runner.stats.eager if "masks" in reason}
    assert not eager
    run.runner.close()


@pytest.mark.parametrize("width", [1, 3])
def test_split_steps_compute_what_eager_computes(folder: Path, width: int) -> None:
    run = captured(folder, width)
    assert run.runner.graphs is not None
    drawn = RandomMasks(run.runner.masks)
    candidates = [
        Candidate(split.step, partial(split.replay, drawn.in_place), drawn) for split in run.runner.graphs.split_steps()
    ]
    reports = SelfTest(run.runner.parts, 3).run(candidates)
    assert {report.kind for report in reports} == {"masked"}
    assert not [report.problems for report in reports if not report.passed]
    run.runner.close()
