"""Replicas in invariant mode whose ranks share out one latent cache give the bits of one rank, whatever happens to a
row. Logprobs stand for the logits: they are compared bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import page
from kernels.mla_decode import invariant
from tests.rank_processes import run_ranks
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.protocol.plan import SamplingParams
from workers.scheduler import pages as placing

CPU = torch.device("cpu")
PAGES = 8


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "max_context": 450, "device": "cpu", "selftest": False}
    return EngineConfig(model=str(folder), invariant=True, **{**defaults, **settings})


def cut_small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Let pieces have one page, so that rows have several on each rank."""
    for module in (page, placing, invariant):
        patch.setattr(module, "PIECE_PAGES", 1)


def generated(folder: Path, group: Group, **settings: Any) -> dict[str, Any]:
    """What prompts around pages' borders give, and others with a common beginning, few of which fit at once."""
    rng = random.Random(8)
    shared = [rng.randrange(VOCAB) for _ in range(140)]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 63, 65, 60, 129, 257)]
    prompts += [[*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))] for _ in range(3)]
    logprobs = 2 if group.mesh.heads.first else -1  # others have none to give
    params = [
        SamplingParams(80 if len(prompt) < 70 else 8, temperature=float(index % 2), seed=index, logprobs=logprobs)
        for index, prompt in enumerate(prompts)
    ]
    engine = InlineEngine(config(folder, **settings), group=group)
    for layer in engine.runner.parts.cache.layers:
        layer[page.NULL_PAGE] = torch.nan if layer.is_floating_point() else 255  # nobody may read it
    engine.generate(prompts, params)
    records = engine.finished.values()
    return {
        "tokens": [record.tokens for record in records],
        "logprobs": [entry for record in records for output in record.outputs for entry in output.logprobs],
        "preemptions": engine.scheduler.stats().preemptions,
        "cached": engine.scheduler.stats().cached_tokens,
    }


def rank_main(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    cut_small_pieces(pytest.MonkeyPatch())  # for as long as this process lives
    made = config(folder / "model", **settings)
    at = f"file://{folder}/rendezvous{made.cache_shards}"
    group = Group.connect(made.mesh(rank), at, CPU, timeout_s=120)
    try:
        found = generated(folder / "model", group, **settings)
        torch.save(found, folder / f"{made.cache_shards}_{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    ("ranks", "shards", "dtype"),
    [
        pytest.param(2, (2,), "auto", marks=pytest.mark.long),
        pytest.param(4, (4,), "fp8", marks=pytest.mark.soak),
        pytest.param(2, (1,), "auto", marks=pytest.mark.soak),
        pytest.param(4, (1, 2, 4), "auto", marks=pytest.mark.soak),
    ],
)
def test_hits_preemptions_drafts_and_mixed_steps_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, shards: tuple[int, ...], dtype: str
) -> None:
    """One rank has pages enough for all, and never preempts. Planted faults that this finds: owners of pages in their
    turns whatever their row; an owner without pages is passed over."""
    cut_small_pieces(monkeypatch)
    folder = write_tiny(tmp_path / "model", "v3", seed=3)
    want = generated(folder, Group(), cache_pages=100, kv_cache_dtype=dtype)
    assert want["preemptions"] == 0
    assert len(want["logprobs"]) == sum(map(len, want["tokens"]))
    for count in shards:
        settings = {"cache_shards": count, "cache_pages": PAGES // count + 1, "kv_cache_dtype": dtype}
        run_ranks(rank_main, ranks, tmp_path, {"tensor_parallel": ranks, **settings})
        for rank in range(ranks):
            found = torch.load(tmp_path / f"{count}_{rank}.pt", weights_only=False)
            assert found["tokens"] == want["tokens"]
            assert found["logprobs"] == (want["logprobs"] if rank == 0 else [])
            # Where each of four has two pages, too few rows are admitted for that.
            assert count != 2 or found["preemptions"] > 0
            assert found["cached"] > 0
