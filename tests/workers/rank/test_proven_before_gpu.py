"""On a GPU: a start behind one that has proven all graphs serves with few, and proves all of them again meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams
from workers.rank import proven_before
from workers.scheduler import captures

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_second_start_serves_first_and_gives_the_tokens_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven_before, "cache_folder", lambda: tmp_path)  # kernels stay where they are compiled
    monkeypatch.setattr(captures, "PAUSE", 0.0)
    monkeypatch.setattr(captures, "QUIET_S", 0.0)
    (tmp_path / "model").mkdir()
    config = EngineConfig(
        model=str(write_tiny(tmp_path / "model", "v3", seed=3, num_hidden_layers=2)),
        device="cuda",
        dtype="float32",
        invariant=True,  # steps in larger buckets, or without their graphs, give the same bits
        max_rows=4,
        token_budget=24,
        cache_pages=60,
        max_context=200,
        width=2,
    )
    found = []
    for few in (False, True, True):
        run = InlineEngine(config, torch.device("cuda"), waiting="auto")
        assert (run.replica.captures is not None) == few
        for number in range(5):
            sampling = SamplingParams(12, temperature=0.5, seed=number)
            run.add(f"r{number}", list(range(1 + number, 9 + 7 * number)), sampling)
        tokens = {name: ended.tokens for name, ended in run.run().items()}
        assert run.reports[-1].passed
        assert run.reports[-1].left_out == run.reports[-1].inherited == 0
        found.append((tokens, [str(bucket) for bucket in run.reports[-1].buckets]))
        run.runner.close()
    assert found[1:] == found[:1] * 2
