"""A crowd of requests with mixed samplers, whose prompts end together with those of others or with no row decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import crowd, of_all_widths, serve
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import DecodeBuckets


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2)


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 32, "token_budget": 300, "cache_pages": 120, "max_context": 200, "selftest": False}
    return InlineEngine(EngineConfig(model=str(folder), device="cpu", **{**defaults, **settings}))


@cache
def narrow(folder: Path) -> list[list[int]]:
    """The tokens at width 1."""
    return serve(engine(folder, width=1, invariant=True, max_rows=12), crowd(24, VOCAB, seed=1))


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3, pytest.param(7, marks=pytest.mark.long)])
def test_a_crowd_gets_the_same_tokens_at_every_width(folder: Path, width: int) -> None:
    run = engine(folder, width=width, invariant=True, max_rows=9, token_budget=150)
    assert serve(run, crowd(24, VOCAB, seed=1)) == narrow(folder)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)])
def test_a_crowd_at_width_1_is_served(folder: Path, seed: int) -> None:
    serve(engine(folder, width=1), crowd(60, VOCAB, seed))


@pytest.mark.parametrize("period", [pytest.param(2, marks=pytest.mark.long), pytest.param(7, marks=pytest.mark.soak)])
def test_a_crowd_gets_the_same_tokens_whatever_widths_follow_each_other(folder: Path, period: int) -> None:
    """Wider and narrower steps, on slots that were drafted for by others. The second crowd comes when nobody decodes,
    so that its first prompts end in a step of their own."""
    run = of_all_widths(engine(folder, width=4, invariant=True, max_rows=9, token_budget=150), period)
    for _ in range(2):
        assert serve(run, crowd(24, VOCAB, seed=1)) == narrow(folder)
    assert {plan.width for plan in run.plans} == {1, 2, 3, 4}
    assert {(plan.width, plan.drafts) for plan in run.plans} <= set(DecodeBuckets(9, 4, adaptive=True).modes())
