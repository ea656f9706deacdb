"""A crowd of requests with mixed samplers, whose prompts end together with those of others or with no row decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import crowd, serve, without_patience
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig


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


@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_crowd_gets_the_same_tokens_at_every_width(folder: Path, width: int) -> None:
    run = engine(folder, width=width, invariant=True, max_rows=9, token_budget=150)
    assert serve(run, crowd(24, VOCAB, seed=1)) == narrow(folder)


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_at_width_1_is_served(folder: Path, seed: int) -> None:
    serve(engine(folder, width=1), crowd(60, VOCAB, seed))


@pytest.mark.parametrize("retry", [3, 1000])
def test_a_crowd_is_served_when_drafts_are_given_up(folder: Path, retry: int) -> None:
    """For good, or tried again soon: steps of width 1 on slots that were drafted for, and of all widths after them. The
    second crowd comes when nobody decodes, so that its first prompts end in a step of their own."""
    run = without_patience(engine(folder, width=3, max_rows=9), retry)
    for seed in (4, 5):
        serve(run, crowd(30, VOCAB, seed))
    widths = {plan.width for plan in run.plans}
    assert widths == {1, 3}
