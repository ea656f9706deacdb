"""How fast prompts are computed, by the steps of late."""

from __future__ import annotations

import random

import numpy as np
import pytest

from workers.scheduler.prompt_budget import FORGETS_TOKENS, PromptSpeed


def test_nothing_is_known_before_the_first_prompt() -> None:
    speed = PromptSpeed()
    speed.observe(0, 1.0)
    assert speed.token_s() is None


def test_short_prompts_say_nothing_of_long_ones() -> None:
    """Steps take 20 ms, and 20 us for each token of a prompt."""
    speed = PromptSpeed()
    for _ in range(8):
        speed.observe(8192, 0.02 + 8192 * 20e-6)
    for _ in range(500):
        speed.observe(50, 0.021)
    assert speed.token_s() == pytest.approx(22.4e-6, rel=0.1)


def test_it_is_the_line_through_the_origin_that_fits_best() -> None:
    rng = random.Random(0)
    steps = [(rng.randint(1, 100), rng.uniform(0.01, 0.1)) for _ in range(20)]
    speed = PromptSpeed()
    for step in steps:
        speed.observe(*step)
    tokens, seconds = np.array(steps).T
    (slope,), *_ = np.linalg.lstsq(tokens[:, None], seconds)
    assert speed.token_s() == pytest.approx(slope, rel=0.01)


def test_what_was_long_ago_is_forgotten() -> None:
    speed = PromptSpeed()
    for token_s in (1e-3, 1e-5):
        for _ in range(10 * FORGETS_TOKENS // 1000):
            speed.observe(1000, 1000 * token_s)
        assert speed.token_s() == pytest.approx(token_s, rel=0.15)
