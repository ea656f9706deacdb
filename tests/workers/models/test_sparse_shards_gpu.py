"""Replicas of several GPUs that share out one cache, of models with sparse attention: tokens of one GPU, in graphs that
have passed the self-test on poisoned memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, random_tokens, write_tiny

from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
]
PROMPTS = [random_tokens(count, count, VOCAB) for count in (3, 17, 40, 64, 90, 130)]


async def generated(config: EngineConfig) -> list[list[int]]:
    sampling = SamplingParams(24, temperature=0.0)

    async def one(client: EngineClient, name: str, prompt: list[int]) -> list[int]:
        return [t async for out in client.generate(Request(name, tuple(prompt), sampling)) for t in out.tokens]

    async with local_engine(config, print) as client:
        return await asyncio.gather(*(one(client, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)))


async def with_logprobs(config: EngineConfig) -> list[tuple[list[int], list[Any]]]:
    """Tokens, and the logprobs of the most probable ones."""
    sampling = SamplingParams(24, temperature=0.0, logprobs=3)

    async def one(client: EngineClient, name: str, prompt: list[int]) -> tuple[list[int], list[Any]]:
        outputs = [output async for output in client.generate(Request(name, tuple(prompt), sampling))]
        return [t for out in outputs for t in out.tokens], [entry for out in outputs for entry in out.logprobs]

    async with local_engine(config, print) as client:
        return await asyncio.gather(*(one(client, f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)))


def config(folder: Path, ranks: int, shards: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cuda",
        tensor_parallel=ranks,
        cache_shards=shards,
        width=3,
        max_rows=8,
        token_budget=96,
        max_context=400,
        cache_pages=64 // shards + 1,
        **settings,
    )


@pytest.mark.parametrize(("graphs", "top_k"), [(False, 16), (True, 16), (True, 64)])
@pytest.mark.parametrize(
    ("kind", "ranks", "shards"),
    [("v32", 2, 2), ("glm5", 2, 2), ("axk2", 2, 2), ("hyv4", 2, 2), ("glm5", 4, 2), ("hyv4", 4, 4)],
)
def test_shards_give_the_tokens_of_one(
    kind: str, ranks: int, shards: int, graphs: bool, top_k: int, tmp_path: Path
) -> None:
    """Rows of every length in mixed steps and in decode graphs, drafts included where the model makes them. Of 64
    entries, a page, short rows attend to all, and have graphs in which they attend densely."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    # Kernels of experts take features in multiples of 16, on every rank.
    folder = write_tiny(tmp_path, kind, seed=1, index_topk=top_k, moe_intermediate_size=64)
    want = asyncio.run(generated(config(folder, 1, 1, dtype="float32", graphs=graphs)))
    assert asyncio.run(generated(config(folder, ranks, shards, dtype="float32", graphs=graphs))) == want


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("kind", "ranks", "shards"), [("v32", 2, 2), ("glm5", 4, 2), ("hyv4", 4, 4)])
def test_shards_give_the_bits_of_one_in_invariant_mode(
    kind: str, ranks: int, shards: int, graphs: bool, tmp_path: Path
) -> None:
    """Logprobs stand for the logits."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    folder = write_tiny(tmp_path, kind, seed=1, index_topk=16, moe_intermediate_size=64)
    how = {"dtype": "float32", "graphs": graphs, "invariant": True}
    want = asyncio.run(with_logprobs(config(folder, 1, 1, **how)))
    assert asyncio.run(with_logprobs(config(folder, ranks, shards, **how))) == want


SIZES: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "hidden_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
}
"""Sizes for which Hopper has kernels of its own."""


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_published_sizes_pass_the_self_test(cache: str, tmp_path: Path) -> None:
    """In bf16 tokens may differ, where two are nearly as likely. The self-test, without which nothing serves, compares
    logits and selections with the prefill path, and every replay with the eager step, bit for bit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    folder = write_tiny(tmp_path, "glm5", seed=1, **SIZES)
    found = asyncio.run(generated(config(folder, 2, 2, dtype="bfloat16", kv_cache_dtype=cache)))
    assert [len(tokens) for tokens in found] == [24] * len(PROMPTS)
