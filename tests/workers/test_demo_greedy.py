"""The demo model in the engine: speculation, shared prefixes, preemption and mixed batches change no greedy token.

Unlike a random model it makes good drafts, so most windows are accepted whole, and it runs into near-ties.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.workers.harness import InlineEngine
from workers.config import DEMO_MODEL, EngineConfig
from workers.protocol.plan import SamplingParams

PROMPTS = 104


def engine(**settings: Any) -> InlineEngine:
    defaults = {"max_rows": 16, "token_budget": 256, "cache_pages": 400, "device": "cpu", "max_context": 512}
    return InlineEngine(EngineConfig(model="demo", **{**defaults, **settings}))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Pieces of Python of 2 to 120 tokens; a third of them share a beginning of two pages."""
    text = (DEMO_MODEL.parent / "training" / "model.py").read_text()
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    rng = random.Random(7)
    pieces = []
    for index in range(PROMPTS):
        start = rng.randrange(200, len(ids) - 200)
        piece = ids[start : start + rng.randint(2, 120)]
        pieces.append(ids[:140] + piece[:20] if index % 3 == 0 else piece)
    return pieces


@pytest.fixture(scope="module")
def params() -> list[SamplingParams]:
    return [SamplingParams(130 if index % 26 < 4 else 14, temperature=0.0) for index in range(PROMPTS)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return engine(width=1, prefix_cache=False).generate(prompts, params)


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=pytest.mark.long if w == 4 else pytest.mark.soak) for w in (2, 3, 4)]
)
def test_greedy_output_is_that_of_width_1(
    prompts: list[list[int]], params: list[SamplingParams], plain: list[list[int]], width: int
) -> None:
    crowded = engine(width=width, cache_pages=15)
    assert crowded.generate(prompts, params) == plain
    stats = crowded.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.step_seconds["mixed"].count > 0
    assert stats.drafts_accepted > 0.5 * stats.drafts_offered
