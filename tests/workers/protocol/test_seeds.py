"""Seeds of sequences: prompts under one seed are sampled independently, and the same request always alike."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.sampling.reference import gumbel_noise
from workers.protocol.request import LEAST_SEED, MOST_SEED, sequence_seeds

VOCAB, PROMPTS = 64, 6400
MOST_CHI_SQUARE = 116.4
"""Largest value for 63 degrees of freedom; one fair die in 20,000 with 64 faces is above: `scipy.stats.chi2.isf(1 /
20000, 63)`."""


def any_of(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(100_000) for _ in range(length))


def unrelated(draw: random.Random) -> list[tuple[int, ...]]:
    return [any_of(draw, 12) for _ in range(PROMPTS)]


def of_one_prefix(draw: random.Random) -> list[tuple[int, ...]]:
    prefix = any_of(draw, 300)
    return [(*prefix, number) for number in range(PROMPTS)]


def continuations(draw: random.Random) -> list[tuple[int, ...]]:
    """Each is the one before it with a token more, which is what the turns of a chat are."""
    whole = any_of(draw, 40 + PROMPTS)
    return [whole[: 40 + number] for number in range(PROMPTS)]


@pytest.mark.parametrize("prompts", [unrelated, of_one_prefix, continuations])
def test_tokens_of_many_prompts_under_one_seed_are_independent(
    prompts: Callable[[random.Random], list[tuple[int, ...]]],
) -> None:
    """All logits are equal, so the token with the most noise is drawn, at one position."""
    seeds = torch.tensor([sequence_seeds(1, prompt)[0] for prompt in prompts(random.Random(7))])
    drawn = gumbel_noise(seeds, torch.full_like(seeds, 500), VOCAB).argmax(-1)
    expected = PROMPTS / VOCAB
    assert float(((drawn.bincount(minlength=VOCAB) - expected) ** 2 / expected).sum()) < MOST_CHI_SQUARE
    # Neighbours do not follow each other.
    pairs = (8 * (drawn[:-1] // 8) + drawn[1:] // 8).bincount(minlength=VOCAB)
    expected = (PROMPTS - 1) / VOCAB
    assert float(((pairs - expected) ** 2 / expected).sum()) < MOST_CHI_SQUARE


def test_with_the_request_s_own_seed_all_would_draw_one_token() -> None:
    """This is what the hash of the prompt is there for."""
    seeds = torch.ones(PROMPTS, dtype=torch.int64)
    assert len(gumbel_noise(seeds, torch.full_like(seeds, 500), VOCAB).argmax(-1).unique()) == 1


def test_choices_draw_independently() -> None:
    seeds = torch.tensor(sequence_seeds(1, (5, 6, 7), PROMPTS))
    drawn = gumbel_noise(seeds, torch.full_like(seeds, 3), VOCAB).argmax(-1)
    expected = PROMPTS / VOCAB
    assert float(((drawn.bincount(minlength=VOCAB) - expected) ** 2 / expected).sum()) < MOST_CHI_SQUARE


@given(st.integers(LEAST_SEED, MOST_SEED), st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple))
def test_seeds_are_those_of_the_same_request_anywhere(seed: int, prompt: tuple[int, ...]) -> None:
    found = sequence_seeds(seed, prompt, 3)
    assert found == sequence_seeds(seed, prompt, 5)[:3]
    assert all(0 <= own <= MOST_SEED for own in found)
    assert len(set(found)) == 3


def test_every_seed_is_one_of_its_own() -> None:
    edges = (LEAST_SEED, LEAST_SEED + 1, -1, 0, 1, MOST_SEED - 1, MOST_SEED)
    assert len({sequence_seeds(seed, (1, 2))[0] for seed in edges}) == len(edges)
