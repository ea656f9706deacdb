"""A crowd: requests with every mix of sampling parameters, of lengths that make prompts end together and apart."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from tests.workers.harness import InlineEngine
from tests.workers.widths import restless
from workers.protocol.plan import SamplingParams
from workers.scheduler import Scheduler

Job = tuple[list[int], SamplingParams]

SAMPLERS: tuple[Callable[[random.Random, int], dict[str, Any]], ...] = (
    lambda rng, vocab: {"temperature": 0.0},
    lambda rng, vocab: {"temperature": 1.0},
    lambda rng, vocab: {"temperature": 0.9, "top_p": 0.8, "top_k": 20},
    lambda rng, vocab: {"temperature": 0.7, "presence_penalty": 0.6, "repetition_penalty": 1.2},
    lambda rng, vocab: {
        "temperature": 1.0,
        "min_p": 0.05,
        "logit_bias": tuple((token, rng.uniform(-3, 3)) for token in sorted(rng.sample(range(vocab), 5))),
    },
    lambda rng, vocab: {"temperature": 0.0, "frequency_penalty": 0.7},
    lambda rng, vocab: {"temperature": 0.8, "min_tokens": 6, "stop_ids": tuple(rng.sample(range(vocab), 20))},
)
"""One for every kind of work that sampling does, some with several."""


def crowd(count: int, vocab: int, seed: int) -> list[Job]:
    """Requests whose samplers take turns. A third begin alike, some prompts are equal in length, some are one token
    long, and now and then one asks for log-probabilities."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(70)]
    jobs = []
    for index in range(count):
        length = rng.choice((1, 2, 17, 17, rng.randint(1, 90), rng.randint(1, 90)))
        prompt = [rng.randrange(vocab) for _ in range(length)]
        params = SamplingParams(
            rng.randint(1, 24),
            seed=rng.getrandbits(64),
            logprobs=rng.choice((-1, -1, 0, 3)),
            **SAMPLERS[index % len(SAMPLERS)](rng, vocab),
        )
        jobs.append((shared + prompt if index % 3 == 0 else prompt, params))
    return jobs


def serve(run: InlineEngine, jobs: list[Job]) -> list[list[int]]:
    """The tokens of every job, all asked for at once."""
    tokens = run.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    for (_, params), got, record in zip(jobs, tokens, list(run.finished.values())[-len(jobs) :], strict=True):
        assert record.finish in ("stop", "length")
        assert 1 <= len(got) <= params.max_tokens
    return tokens


def of_all_widths(run: InlineEngine, period: int) -> InlineEngine:
    """Take another width for the one that pays, every `period` steps."""
    run.scheduler = Scheduler(replace(run.scheduler.config, adaptive=True))
    most, steps = run.scheduler.config.width, count()
    restless(run.scheduler, lambda: 1 + (3 * (next(steps) // period)) % most)
    return run
