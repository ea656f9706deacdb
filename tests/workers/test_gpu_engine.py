"""The demo model on a GPU, eager and replayed, against the CPU."""

from __future__ import annotations

import random
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from kernels.runtime.ahead import Compiled
from tests.captured import same_bits
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.segments import SegmentProof
from workers.proof.tails import prove_tails
from workers.protocol.plan import SamplingParams, row_buckets
from workers.rank.runner import Runner

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


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_take_as_long_as_the_device_is_at_them_however_late_that_is_noticed(graphs: bool) -> None:
    run = engine("cuda", width=1, graphs=graphs)
    run.generate(prompts(1, 20), params(1, 0.0))
    run.add("late", list(range(20)), SamplingParams(8))
    plans = [run.scheduler.plan() for _ in range(2)]
    launched = [run.runner.launch(plan) for plan in plans if plan is not None]
    assert len(launched) == 2
    time.sleep(1.0)
    assert all(0 < run.runner.collect(step).duration < 0.5 for step in launched)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "kv_cache_dtype"), [(1, "auto"), (2, "auto"), (3, "auto"), (1, "fp8"), (3, "fp8")])
def test_every_graph_passes_the_self_test(width: int, kv_cache_dtype: str, dtype: str) -> None:
    run = engine("cuda", width=width, dtype=dtype, graphs=True, kv_cache_dtype=kv_cache_dtype)
    graphs = run.runner.graphs
    assert graphs is not None
    for seed in range(2):
        reports = SelfTest(run.runner.parts, seed).run([Candidate(c.step, c.replay) for c in graphs.all()])
        reports += SegmentProof(run.runner.parts, seed).run(graphs.stages())
        assert [(str(r), r.problems) for r in reports if not r.passed] == []


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_captured_tail_computes_what_eager_computes(dtype: str, width: int, invariant: bool) -> None:
    run = engine(
        "cuda",
        width=width,
        dtype=dtype,
        invariant=invariant,
        max_rows=40,
        token_budget=160,
        graphs=True,
        selftest=False,
    )
    graphs = run.runner.graphs
    assert graphs is not None
    for seed in range(4):
        reports = prove_tails(run.runner.parts, graphs.tails(), seed=seed)
        assert [(r.bucket, r.problems) for r in reports] == [(f"{tokens} tokens", ()) for tokens in (48, 32, 16)]


@pytest.mark.parametrize("width", [1, 3])
@torch.inference_mode()
def test_a_pool_of_two_pages_is_enough_for_a_capture(width: int) -> None:
    """Warming up, the capture and replays of padding write the null page alone, and nothing next to the pool. With the
    pool's one other page every graph passes the self-test."""
    runner = engine("cuda", width=width, max_rows=4, cache_pages=2, dtype="bfloat16", graphs=False).runner
    parts = runner.parts
    runner.compile(threads=8)
    around = [layer.new_full((6, *layer.shape[1:]), torch.nan) for layer in parts.cache.layers]
    parts.cache.layers[:] = [layer[2:4] for layer in around]
    for layer in parts.cache.layers:
        layer[0].zero_()
    graphs = runner.capture()
    for captured in graphs.all():
        captured.replay()
    for tail in graphs.tails():
        tail.fill(0)
        tail.run()
    for stage in graphs.stages():
        stage.clear()
        for which in range(len(stage.segments)):
            for index in stage.indices(which):
                stage.run_segment(which, index)
    assert all(layer[[0, 1, 3, 4, 5]].isnan().all() for layer in around)
    assert not parts.state.tensors.length_S.any()
    reports = SelfTest(parts).run([Candidate(c.step, c.replay) for c in graphs.all()])
    reports += SegmentProof(parts).run(graphs.stages()) + prove_tails(parts, graphs.tails())
    assert [(str(r), r.problems) for r in reports if not r.passed] == []
    assert all(layer[[0, 1, 4, 5]].isnan().all() for layer in around)


@pytest.mark.parametrize("width", [1, 3])
def test_all_kernels_are_compiled_ahead(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache is empty at first: warming up, the capture and the self-test compile nothing."""
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

    def compile_and_note(self: Runner, threads: int, *, proof: bool) -> Compiled:
        compiled = compile(self, threads, proof=proof)
        ahead.extend(names)
        names.clear()
        return compiled

    monkeypatch.setattr(Runner, "compile", compile_and_note)
    engine("cuda", width=width, dtype="bfloat16", graphs=True, selftest=True)
    assert len(ahead) > 20
    assert names == []


def test_the_scheduler_hears_what_steps_take() -> None:
    """Times are those of steps with prompts and without."""
    run = engine("cuda", width=2, dtype="bfloat16", graphs=True, selftest=True, token_budget=1024)
    times = run.replica.ready.step_times
    assert all(time.seconds > 0 for time in times)
    mixed = [time.prompt_tokens for time in times if time.prompt_tokens]
    assert len(mixed) > 3
    assert max(mixed) > 512
    alone = {time.rows for time in times if not time.prompt_tokens and time.width == 2}
    assert alone == set(row_buckets(run.scheduler.config.slots))


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
    """Replays are of every bucket, with rows that attend and write, each from the same state: only a race could change
    a bit."""
    run = engine("cuda", width=width, dtype="bfloat16", graphs=True)
    graphs = run.runner.graphs
    assert graphs is not None
    proof = SelfTest(run.runner.parts)
    for captured in graphs.all():
        step, fixture = captured.step, proof.fixture(captured.step.key)
        live, count = len(fixture.rows) * step.key.width, step.layout.logits_rows
        step.slot_R.fill_(-1)
        step.slot_R[: len(fixture.rows)] = fixture.slot_R
        first: list[torch.Tensor] = []
        for _ in range(20):
            left = fixture.outcome(captured.replay())
            fixture.restore()
            accepted_R = left.decided_N[count : count + len(fixture.rows)]
            now = [left.decided_N[:live], accepted_R, left.logits_NV[:live], *left.slots, *left.own]
            first = first or now
            assert all(same_bits(a, b) for a, b in zip(first, now, strict=True)), step.key
        assert first[2].isfinite().all()
        assert (first[3] != run.runner.parts.state.tensors.length_S).any()  # the step did write


@pytest.mark.parametrize(("width", "drafter", "max_rows"), [(1, None, 8), (3, None, 8), (3, "ngram", 40)])
def test_log_probabilities_of_prompts_are_those_of_the_cpu(width: int, drafter: str | None, max_rows: int) -> None:
    """Prompts are scored in pieces for which there is a captured tail, and for which there is none."""
    more = {} if drafter is None else {"drafter": drafter}
    asking = [SamplingParams(4, temperature=0.0, prompt_logprobs=3 if i % 3 else -1) for i in range(12)]
    found = []
    for device, graphs in (("cpu", False), ("cuda", False), ("cuda", True)):
        run = engine(device, width=width, graphs=graphs, max_rows=max_rows, token_budget=200, **more)
        run.generate(prompts(12, 150), asking)
        scores = [record.outputs[0].prompt for record in run.finished.values()]
        found.append([[value for value, *_ in part.entries()] for part in scores if part is not None])
    cpu, eager, replayed = found
    assert len(cpu) == 8
    for one, other, third in zip(cpu, eager, replayed, strict=True):
        assert other == pytest.approx(one, abs=1e-3)
        assert third == pytest.approx(one, abs=1e-3)


def test_a_gpu_says_how_fast_it_reads() -> None:
    """The speed is within what data sheets say of GPUs that this project knows."""
    reads = engine("cuda", graphs=False).runner.stats.step_reads
    assert 1e12 < reads["step_bandwidth"] < 1.5e13
