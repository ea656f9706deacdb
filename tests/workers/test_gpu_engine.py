"""The demo model on a GPU, eager and replayed, against the CPU."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from kernels.ahead import Compiled
from tests.captured import same_bits
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.graphs.scene import Ground
from workers.graphs.segment_proof import SegmentProof
from workers.graphs.selftest import Candidate, SelfTest
from workers.plan import SamplingParams
from workers.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def engine(device: str, **settings: Any) -> InlineEngine:
    defaults = {
        "width": 3,
        "max_rows": 8,
        "token_budget": 96,
        "cache_pages": 120,
        "dtype": "float32",
        "selftest": False,
    }
    config = EngineConfig(model="demo", device=device, **{**defaults, **settings})
    return InlineEngine(config, torch.device(device))


def prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(10, 4000) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def params(count: int, temperature: float) -> list[SamplingParams]:
    return [SamplingParams(24 + i % 20, temperature=temperature, seed=i) for i in range(count)]


@cache
def expected(temperature: float, device: str) -> list[list[int]]:
    return engine(device, width=1, graphs=False).generate(prompts(20, 150), params(20, temperature))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_greedy_tokens_are_those_of_the_cpu(width: int, graphs: bool) -> None:
    run = engine("cuda", width=width, graphs=graphs)
    assert run.generate(prompts(20, 150), params(20, 0.0)) == expected(0.0, "cpu")
    if graphs:
        assert run.runner.graphs is not None
        stats = run.runner.graphs.stats
        assert stats.replays > 20
        assert stats.mixed_steps > 5
        assert not stats.eager


@pytest.mark.parametrize("width", [1, 2, 4])
def test_seeded_tokens_do_not_depend_on_width_or_graphs(width: int) -> None:
    run = engine("cuda", width=width, graphs=True)
    assert run.generate(prompts(20, 150), params(20, 0.8)) == expected(0.8, "cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_graph_passes_the_self_test(width: int, dtype: str) -> None:
    run = engine("cuda", width=width, dtype=dtype, graphs=True)
    graphs = run.runner.graphs
    assert graphs is not None
    for seed in range(2):
        reports = SelfTest(run.runner.parts, seed).run([Candidate(c.step, c.replay) for c in graphs.all()])
        reports += SegmentProof(run.runner.parts, seed).run(graphs.stages())
        assert [(str(r), r.problems) for r in reports if not r.passed] == []


@pytest.mark.parametrize("width", [1, 3])
def test_all_kernels_are_compiled_ahead(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From an empty cache: warming up, the capture and the self-test compile nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("kernels.") else ():
            if isinstance(value, JITFunction):
                value.device_caches.clear()
    names: list[str] = []
    ahead: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, cache_hit, **_: cache_hit or names.append(src.name)
    )
    compile = Runner.compile

    def compile_and_note(self: Runner, threads: int) -> Compiled:
        compiled = compile(self, threads)
        ahead.extend(names)
        names.clear()
        return compiled

    monkeypatch.setattr(Runner, "compile", compile_and_note)
    engine("cuda", width=width, dtype="bfloat16", graphs=True, selftest=True)
    assert len(ahead) > 20
    assert names == []


@torch.inference_mode()
def test_a_mixed_step_waits_for_nothing() -> None:
    """Launched in a mode in which every wait for the device raises."""
    run = engine("cuda", dtype="bfloat16", graphs=True)
    for index, prompt in enumerate(prompts(6, 150)):
        run.add(f"r{index}", prompt, params(6, 0.8)[index])
    runner, mixed = run.runner, 0
    while (plan := run.scheduler.plan()) is not None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        mixed += bool(plan.prefill and plan.decode_slots)
        run.deliver(run.scheduler.apply(runner.collect(launched)))
    assert mixed


@pytest.mark.parametrize("width", [1, 3])
@torch.inference_mode()
def test_twenty_replays_are_bitwise_equal(width: int) -> None:
    """Of every bucket, with rows that attend and write, each from the same state: only a race could change a bit."""
    run = engine("cuda", width=width, dtype="bfloat16", graphs=True)
    graphs = run.runner.graphs
    assert graphs is not None
    ground = Ground(run.runner.parts, seed=0)
    for captured in graphs.all():
        step, scene = captured.step, ground.scene(captured.step.key)
        live, count = len(scene.rows) * step.key.width, step.layout.logits_rows
        step.slot_R.fill_(-1)
        step.slot_R[: len(scene.rows)] = scene.slot_R
        first: list[torch.Tensor] = []
        for _ in range(20):
            left = scene.outcome(captured.replay())
            scene.restore()
            accepted_R = left.decided_N[count : count + len(scene.rows)]
            now = [left.decided_N[:live], accepted_R, left.logits_NV[:live], *left.slots, *left.own]
            first = first or now
            assert all(same_bits(a, b) for a, b in zip(first, now, strict=True)), step.key
        assert first[2].isfinite().all()
        assert (first[3] != run.runner.parts.state.tensors.length_S).any()  # the step did write
