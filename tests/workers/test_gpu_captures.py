"""Graphs of a real GPU that are captured while rows run: tokens stay what they are, and all graphs are proven."""

from __future__ import annotations

import random

import pytest
import torch

from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs.graph_runner import NOT_YET
from workers.protocol.plan import SamplingParams
from workers.scheduler import captures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def ask(run: InlineEngine, first: int, count: int) -> None:
    for number in range(first, first + count):
        chance = random.Random(number)
        prompt = [chance.randrange(1000) for _ in range(chance.choice([1, 30, 200]))]
        run.add(f"r{number}", prompt, SamplingParams(chance.randrange(40, 120), temperature=1.0, seed=number))


@pytest.mark.parametrize("width", [3, "auto"])
def test_streams_go_on_unchanged_while_graphs_are_captured(width: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "PAUSE", 0.0)
    monkeypatch.setattr(captures, "QUIET_S", 0.0)
    settings = {"model": "demo", "device": "cuda", "dtype": "bfloat16", "invariant": True, "max_rows": 16}
    config = EngineConfig(**settings, width=width, token_budget=256, cache_pages=400, max_context=600)
    found: list[dict[str, list[int]]] = []
    runs: list[InlineEngine] = []
    for waiting in (None, 5):
        runs.append(InlineEngine(config, torch.device("cuda"), waiting=waiting))
        for first in (0, 100):
            ask(runs[-1], first, 20)
            found.append({name: ended.tokens for name, ended in runs[-1].run().items()})
    assert found[:2] == found[2:]
    whole, run = runs
    assert run.runner.graphs is not None
    assert whole.runner.graphs is not None
    assert run.runner.stats.eager[NOT_YET] > 0
    assert not run.runner.graphs.left
    assert run.runner.graphs.count == whole.runner.graphs.count
    assert run.reports[-1].passed
    assert [str(bucket) for bucket in run.reports[-1].buckets] == [str(bucket) for bucket in whole.reports[-1].buckets]
    for one in runs:
        one.runner.close()
