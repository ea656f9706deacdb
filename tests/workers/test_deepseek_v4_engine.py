"""A DeepSeek V4 behind the scheduler, in eager steps on a CPU, against transformers' generate."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepseek_v4_layout import VOCAB, published_v4, tiny_v4, write_v4
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, model = tiny_v4(seed=1)
    return write_v4(tmp_path_factory.mktemp("v4"), config, published_v4(model))


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 4, "token_budget": 48, "cache_pages": 40, "max_context": 300, "device": "cpu"}
    return InlineEngine(EngineConfig(model=str(folder), **{**defaults, "selftest": False, **settings}))


@cache
def expected(prompt: tuple[int, ...], tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = tiny_v4(seed=1)[1].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(tokens, temperature=0.0)


def test_greedy_tokens_are_transformers_tokens_in_mixed_batches(folder: Path) -> None:
    """Prompts on every side of the window, of entries and of pages, six for four rows."""
    run, asked = engine(folder), prompts(5, 17, 90, 140, 64, 33)
    for prompt, got in zip(asked, run.generate(asked, greedy(20)), strict=True):
        assert got == expected(tuple(prompt), 20)
    stats = run.scheduler.stats()
    assert stats.step_seconds["mixed"].count > 0
    assert stats.step_seconds["decode"].count > 0
    assert stats.bad_rows == 0


@pytest.mark.parametrize("width", [2, 4])
def test_rejected_drafts_change_no_token(width: int, folder: Path) -> None:
    asked = [prompt * 3 for prompt in prompts(30, 20, 7)]
    run = engine(folder, width=width, drafter="ngram")
    assert run.generate(asked, greedy(30)) == [expected(tuple(prompt), 30) for prompt in asked]
    stats = run.scheduler.stats()
    assert stats.drafts_offered > stats.drafts_accepted


def test_preemptions_change_no_token(folder: Path) -> None:
    """Rows lose their slots and pages, and are computed again in others."""
    asked = prompts(58, 57, 56, seed=1)
    crowded = engine(folder, max_context=100, cache_pages=4, max_rows=3)
    assert crowded.generate(asked, greedy(20)) == [expected(tuple(prompt), 20) for prompt in asked]
    assert crowded.scheduler.stats().preemptions > 0


def test_prompts_share_no_pages(folder: Path) -> None:
    """A page alone does not make the window and the state of compressors that a row behind it needs."""
    run, (prompt,) = engine(folder), prompts(140, seed=2)
    answers = [run.generate([asked], greedy(20))[0] for asked in (prompt, prompt, prompt[:130] + prompt[:9])]
    assert answers[0] == answers[1] == expected(tuple(prompt), 20)
    assert answers[2] == expected(tuple(prompt[:130] + prompt[:9]), 20)
    assert run.scheduler.stats().cached_tokens == 0


def test_a_slot_has_nothing_of_its_former_row(folder: Path) -> None:
    run = engine(folder, max_rows=1)
    run.generate(prompts(100, seed=3), greedy(5))
    for tensor in [*run.runner.parts.cache.rings, *run.runner.parts.cache.layers]:
        tensor.fill_(torch.nan)
    asked = prompts(3, 70, seed=4)
    assert run.generate(asked, greedy(20)) == [expected(tuple(prompt), 20) for prompt in asked]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"invariant": True}, "invariant mode"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"host_cache_bytes": 1 << 20}, "host_cache_bytes"),
        ({"tensor_parallel": 2, "cache_shards": 2}, "cache_shards"),
    ],
)
def test_settings_that_are_not_supported_are_named(settings: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        engine(folder, **settings)
