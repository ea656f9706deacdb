"""Several ranks, each on a GPU, eager and in graphs, against one rank."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.workers.test_gpu_engine import expected, params, prompts
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


async def generate(config: EngineConfig, texts: list[list[int]], sampling: list[SamplingParams]) -> list[list[int]]:
    async def one(client: EngineClient, name: str, prompt: list[int], param: SamplingParams) -> list[int]:
        return [t async for out in client.generate(Request(name, tuple(prompt), param)) for t in out.tokens]

    async with local_engine(config, print) as client:
        jobs = [one(client, f"r{i}", *job) for i, job in enumerate(zip(texts, sampling, strict=True))]
        return await asyncio.gather(*jobs)


@pytest.mark.gpus
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_ranks_give_the_tokens_of_one(ranks: int, shards: int, graphs: bool, temperature: float) -> None:
    """Every graph passes the self-test first. `shards`: of ranks that share out one cache."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    texts, sampling = prompts(20, 150), params(20, temperature)
    config = EngineConfig(
        model="demo",
        device="cuda",
        tensor_parallel=ranks,
        cache_shards=shards,
        width=3,
        max_rows=8,
        token_budget=96,
        cache_pages=120 // shards,
        dtype="float32",
        graphs=graphs,
    )
    assert asyncio.run(generate(config, texts, sampling)) == expected(temperature, "cuda")


@pytest.mark.gpus
@pytest.mark.parametrize(
    "settings",
    [
        {"cache_shards": 2, "draft_model": "demo-eagle3"},
        {"cache_shards": 2, "drafter": "ngram"},
        {"cache_shards": "auto", "cache_pages": 40, "max_context": 2048},
    ],
    ids=["keys and values", "no cache of the drafter's", "auto"],
)
def test_ranks_share_out_a_cache_with_every_drafter(settings: dict[str, Any]) -> None:
    """In graphs, each of which passes the self-test. auto: 39 pages hold one request of 2,048 tokens, and not 8 of 256
    with what they may overshoot."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    sizes = {"width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 60, "dtype": "float32"}
    common = {"model": "demo", "device": "cuda", "tensor_parallel": 2}
    config = EngineConfig(**{**common, **sizes, **settings})
    assert asyncio.run(generate(config, prompts(20, 150), params(20, 0.8))) == expected(0.8, "cuda")
