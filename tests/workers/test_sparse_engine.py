"""A replica of a model with sparse attention in process, against transformers' generate."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import SPARSE_KINDS, VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.models.oracle import load_oracle
from workers.cache.spec import Fp8LatentSpec, Int8IndexSpec
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_tiny(tmp_path_factory.mktemp(kind), kind, seed=1) for kind in SPARSE_KINDS}


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"width": 3, "max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300, "device": "cpu"}
    return InlineEngine(EngineConfig(model=str(folder), **{**defaults, "selftest": False, **settings}))


@cache
def oracle(folder: Path) -> Any:
    return load_oracle(folder)


@cache
def expected(folder: Path, prompt: tuple[int, ...], tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = oracle(folder).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


@pytest.mark.parametrize(
    ("width", "kind"),
    [
        pytest.param(1, "v32", marks=pytest.mark.long),
        pytest.param(4, "glm5", marks=pytest.mark.long),
        pytest.param("auto", "v32", marks=pytest.mark.long),
        pytest.param(1, "axk2", marks=pytest.mark.long),
        pytest.param(1, "axk2-groups", marks=pytest.mark.soak),
        pytest.param(4, "hyv4", marks=pytest.mark.long),
        pytest.param(1, "hyv4-vl", marks=pytest.mark.long),
        pytest.param("auto", "hyv4", marks=pytest.mark.soak),
        *(pytest.param(width, "hyv4", marks=pytest.mark.soak) for width in (1, 2, 3)),
        pytest.param(1, "glm5", marks=pytest.mark.soak),
        pytest.param(4, "v32", marks=pytest.mark.soak),
        pytest.param("auto", "glm5", marks=pytest.mark.soak),
    ],
)
def test_greedy_tokens_are_transformers_tokens_in_mixed_batches(
    kind: str, width: int | str, folders: dict[str, Path]
) -> None:
    """Prompts on every side of what is attended to, six for four rows; the self-test has passed on poisoned caches."""
    run, asked = engine(folders[kind], width=width, selftest=True), prompts(5, 17, 90, 140, 64, 33)
    assert run.replica.selftest is not None
    assert run.replica.selftest.passed
    for prompt, got in zip(asked, run.generate(asked, greedy(30)), strict=True):
        assert got == expected(folders[kind], tuple(prompt), 30)
    assert run.scheduler.stats().step_seconds["mixed"].count > 0
    assert run.scheduler.stats().bad_rows == 0


@pytest.mark.parametrize(
    "kind", ["v32", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("glm5", "axk2", "hyv4"))]
)
def test_preemptions_and_prefix_hits_change_no_token(kind: str, folders: dict[str, Path]) -> None:
    """The index keys of a page come and go with its latents."""
    asked, folder = prompts(45, 44, 43, 42, seed=1), folders[kind]
    crowded = engine(folder, max_context=200, cache_pages=6)
    answers = crowded.generate(asked, greedy(50))
    assert crowded.scheduler.stats().preemptions > 0
    assert answers == [expected(folder, tuple(prompt), 50) for prompt in asked]
    roomy = engine(folder)
    roomy.generate([prompts(1)[0] + asked[0] * 3], greedy(2))
    again = [prompts(1)[0] + asked[0] * 3 + asked[1]]
    before = roomy.scheduler.stats().cached_tokens
    assert roomy.generate(again, greedy(20)) == [expected(folder, tuple(again[0]), 20)]
    assert roomy.scheduler.stats().cached_tokens - before == 128


@pytest.mark.long
def test_an_fp8_cache_has_index_keys_in_int8(folders: dict[str, Path]) -> None:
    """The selection does not depend on chunks, batches and drafts."""
    run = engine(folders["v32"], kv_cache_dtype="fp8", selftest=True, invariant=True)
    specs = run.runner.parts.cache.specs
    assert [type(spec) for spec in specs] == [Fp8LatentSpec, Int8IndexSpec] * 4
    alone = engine(folders["v32"], kv_cache_dtype="fp8", invariant=True, width=1, token_budget=100)
    asked = prompts(70, 40)
    assert run.generate(asked, greedy(12)) == [alone.generate([prompt], greedy(12))[0] for prompt in asked]


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        *(("glm5", 3), ("glm5", 1), ("axk2", 3), ("hyv4-vl", 3)),
        *(
            pytest.param(kind, width, marks=pytest.mark.soak)
            for kind in ("axk2", "axk2-groups", "hyv4-vl")
            for width in (2, 3, 4)
            if (kind, width) not in (("axk2", 3), ("hyv4-vl", 3))
        ),
    ],
)
def test_other_drafters(kind: str, width: int, folders: dict[str, Path]) -> None:
    """Look-up in the prompt, and none at width 1: neither has an indexer."""
    asked, drafter = [prompt * 3 for prompt in prompts(30, 20)], "ngram" if width > 1 else "none"
    got = engine(folders[kind], width=width, drafter=drafter).generate(asked, greedy(20))
    assert got == [expected(folders[kind], tuple(prompt), 20) for prompt in asked]
