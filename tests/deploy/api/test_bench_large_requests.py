"""The driver of large requests: what it watches, and the model that it writes for a replica."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_engine import FakeEngine, Step, out, serving

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.config import EngineConfig
from workers.families import load_model
from workers.families.registry import load_config
from workers.parallel.group import Group
from workers.protocol.messages import Request

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import large_requests

    monkeypatch.setattr(large_requests, "AFTERWARDS_S", 0.1)
    return large_requests


def body(choices: int) -> bytes:
    return json.dumps({"model": "tiny", "prompt": [7] * 200, "n": choices, "max_tokens": 1}).encode()


async def test_it_measures_gaps_and_answers_beside_large_requests(bench: ModuleType) -> None:
    def script(request: Request) -> Iterator[Step]:
        if request.sampling.max_tokens == 1:
            yield 0.5
            yield out(5, finish="length")
        while True:
            yield out(5)
            yield 0.01 if len(engine.requests) < 2 else 0.1

    engine = FakeEngine(script)
    config = ApiConfig(served_model_names=("tiny",), probe_ttl_s=0.0)
    with serving(create_app(engine, None, config)) as port:
        gaps, health = await bench.measure(port, [body(8), body(8)], 200, 60.0)
    assert [request.sampling.max_tokens for request in engine.requests] == [200] + [1] * 16
    assert gaps.longest >= 0.1
    assert min(gaps.count, health.count, health.longest) > 0


async def test_what_fails_beside_them_is_told(bench: ModuleType) -> None:
    engine = FakeEngine(lambda request: [out(5), 0.05, RuntimeError("secret")])
    app = create_app(engine, None, ApiConfig(served_model_names=("tiny",)))
    with serving(app) as port, pytest.raises(AssertionError, match="internal error"):
        await bench.measure(port, [body(1)], 200, 60.0)


def test_the_model_that_it_writes_can_be_loaded(bench: ModuleType, tmp_path: Path) -> None:
    bench.write_model(tmp_path, 4096)
    config = load_config(EngineConfig(model=str(tmp_path)).folder)
    assert (config.max_positions, config.num_layers, config.draft_layers) == (4096, 1, 0)
    device = torch.device("cpu")
    model = load_model(tmp_path, group=Group(), dtype=torch.float32, device=device, max_positions=4096)
    assert not model.drafter
