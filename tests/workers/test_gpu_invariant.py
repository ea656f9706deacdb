"""Invariant mode on a GPU: the demo model eager and in graphs, bit for bit; and on two GPUs."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from tests.workers.harness import InlineEngine
from tests.workers.test_invariant import Outcome, generate, jobs
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.proof.decode_steps import Candidate, SelfTest
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = ["float32", "bfloat16"]


def config(**settings: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 60, "max_context": 400}
    common = {"model": "demo", "device": "cuda", "invariant": True, "selftest": False}
    return EngineConfig.model_validate({**common, **defaults, **settings})


def engine(**settings: Any) -> InlineEngine:
    return InlineEngine(config(**settings), torch.device("cuda"))


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(dtype: str) -> list[Outcome]:
    run = engine(width=1, prefix_cache=False, token_budget=400, graphs=False, dtype=dtype)
    return [generate(run, [job])[0] for job in jobs("demo")]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("width", "token_budget"), [(1, 400), (2, 40), (3, 96), (4, 33)])
def test_a_request_in_any_batch_is_the_request_alone(
    width: int, token_budget: int, graphs: bool, dtype: str, alone: list[Outcome]
) -> None:
    run = engine(width=width, token_budget=token_budget, graphs=graphs, dtype=dtype)
    assert generate(run, jobs("demo")) == alone
    assert run.scheduler.stats().step_seconds["mixed"].count > 0


def test_an_fp8_cache_changes_no_bit_either(dtype: str, alone: list[Outcome]) -> None:
    """Bits are equal in graphs or not, in other batches and chunks, and on cached pages."""
    how = {"dtype": dtype, "kv_cache_dtype": "fp8"}
    run = engine(width=1, prefix_cache=False, token_budget=400, graphs=False, **how)
    single = [generate(run, [job])[0] for job in jobs("demo")]
    assert single != alone
    for width, graphs in ((3, True), (2, False)):
        crowded = engine(width=width, graphs=graphs, **how)
        assert generate(crowded, jobs("demo")) == single
        assert generate(crowded, jobs("demo")) == single
        assert crowded.scheduler.stats().cached_tokens > 128


def test_preemptions_change_no_bit(dtype: str) -> None:
    long = [(prompt[-45:], SamplingParams(70, temperature=0.0, logprobs=3)) for prompt, _ in jobs("demo")[:4]]
    crowded = engine(max_context=200, cache_pages=6, dtype=dtype)
    outcomes = generate(crowded, long)
    assert crowded.scheduler.stats().preemptions > 0
    roomy = engine(width=1, prefix_cache=False, graphs=False, dtype=dtype)
    assert [generate(roomy, [job])[0] for job in long] == outcomes


def test_every_graph_passes_the_self_test(dtype: str) -> None:
    run = engine(dtype=dtype)
    graphs = run.runner.graphs
    assert graphs is not None
    reports = SelfTest(run.runner.parts, 0).run([Candidate(c.step, c.replay) for c in graphs.all()])
    assert [(str(r), r.problems) for r in reports if not r.passed] == []


def test_twenty_runs_agree_bitwise(dtype: str, alone: list[Outcome]) -> None:
    run = engine(dtype=dtype, prefix_cache=False)
    for _ in range(20):
        assert generate(run, jobs("demo")[:3]) == alone[:3]


async def _served(settings: EngineConfig, asked: list[tuple[list[int], SamplingParams]] | None = None) -> list[Outcome]:
    async def one(client: EngineClient, name: str, prompt: list[int], params: SamplingParams) -> Outcome:
        outputs = [output async for output in client.generate(Request(name, tuple(prompt), params))]
        return [t for o in outputs for t in o.tokens], [entry for o in outputs for entry in o.logprobs]

    async with local_engine(settings, print) as client:
        return await asyncio.gather(*(one(client, f"r{i}", *job) for i, job in enumerate(asked or jobs("demo"))))


@pytest.mark.gpus
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_ranks_give_the_bits_of_one(ranks: int, shards: int, graphs: bool, dtype: str, alone: list[Outcome]) -> None:
    """`shards`: of ranks that share out one cache."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    how = {"tensor_parallel": ranks, "cache_shards": shards, "graphs": graphs, "dtype": dtype}
    assert asyncio.run(_served(config(**how))) == alone


@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_give_the_bits_of_one_over_many_pieces(ranks: int, dtype: str) -> None:
    """Of prompts of up to 4 pieces, in graphs that pass the self-test; in FP8, too. A planted fault that this finds:
    owners change at every page."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    rng = random.Random(1)
    long = [
        ([rng.randrange(10, 4000) for _ in range(count)], SamplingParams(20, temperature=0.0, logprobs=3))
        for count in (500, 1030, 1500, 1950)
    ]
    sizes = {"max_context": 2048, "token_budget": 512, "cache_pages": 150, "dtype": dtype, "selftest": True}
    for cache in ("auto", "fp8"):
        common = {**sizes, "kv_cache_dtype": cache}
        single = asyncio.run(_served(config(**common), long))
        assert asyncio.run(_served(config(**common, tensor_parallel=ranks, cache_shards=ranks), long)) == single
