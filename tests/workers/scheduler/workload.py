"""Random settings and requests that make a scheduler preempt, share prefixes, change widths and run out of things."""

from __future__ import annotations

import random

from simulated_worker import VOCAB

from workers.scheduler import SchedulerConfig, max_pages_per_row

STREAMS = [[random.Random(seed).randrange(VOCAB) for _ in range(400)] for seed in range(3)]


SHARED = [0, 1, 40, 63, 64, 65, 100, 128, 129, 200, 256]

KEYS: list[dict[str, object]] = [{}, {}, {"key": "a"}, {"key": "a"}, {"key": "b", "weight": 2.5}, {"key": "c"}]


def random_config(rng: random.Random, tight: bool = False) -> SchedulerConfig:
    """`tight`: many slots share few pages."""
    slots, width = rng.randint(3, 8) if tight else rng.randint(1, 6), rng.randint(1, 4)
    pipeline = rng.choice([1, 2, 2, 3])
    max_context = rng.choice([200, 300]) if tight else rng.choice([20, 64, 65, 130, 300, 300])
    full = max_pages_per_row(max_context, width, pipeline)
    # Of its own, so that other draws stay what they are.
    host = random.Random(f"host memory {slots} {width} {pipeline} {max_context}")
    shards = random.Random(f"shards {slots} {width} {pipeline} {max_context}").choice([1, 1, 2, 4])
    pages = max(2, 1 + full + rng.choice([0, 1, 2, 4] if tight else [0, 0, 0, 1, 2, 5, 20, -1]))
    host_pages = host.choice([0, 0, 2, 8, 100])
    return SchedulerConfig(
        slots=slots,
        pages=pages + -(pages - 1) % shards,
        max_context=max_context,
        token_budget=slots * width + rng.choice([1, 7, 64, 100, 500]),
        width=width,
        queue_limit=rng.choice([0, 3, 50, 50]),
        prefix_cache=rng.random() < 0.8,
        pipeline=pipeline,
        adaptive=rng.choice([False, False, True, True]),
        prefix_sample=rng.choice([0, 3, 100]),
        vocab_size=rng.choice([VOCAB, VOCAB, 2**32]),
        cache_shards=shards,
        host_pages=host_pages,
        ranks=host.choice([1, 2]),
        save_batch=host.choice([1, 16]),
        load_least=host.choice([1, 2]),
        disk_pages=host.choice([0, 8, 100]) if host_pages else 0,
        disk_least=1,
        disk_page_s=0.0,
        tier_sample=host.choice([0, 3, 100]),
    )


def random_request(rng: random.Random, max_context: int) -> tuple[list[int], dict[str, object]]:
    shared = rng.choice([length for length in SHARED if length < max_context])
    prompt = STREAMS[rng.randrange(len(STREAMS))][:shared]
    prompt += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 1, 3, 60]))]
    if rng.random() < 0.95:
        prompt = prompt[: max_context - 1]
    return prompt, {
        "priority": rng.choice([0, 0, 0, 1, -1]),
        **rng.choice(KEYS),
        "max_tokens": rng.choice([1, 2, 3, 10, 70, 70, 200, 10_000]),
        "stop_ids": rng.choice([(), (), (), (3,), (3, 4, 5)]),
        "min_tokens": rng.choice([0, 0, 4]),
        "seed": rng.randrange(2),
        "presence_penalty": rng.choice([0.0, 0.0, 0.5]),
        "logprobs": rng.choice([-1, -1, 0, 2]),
        "prompt_logprobs": random.Random(f"scores {prompt}").choice([-1, -1, -1, -1, -1, 0, 3]),
    }


def config(**changes: object) -> SchedulerConfig:
    """Plenty of everything but slots and budget, and one width."""
    settings: dict[str, object] = {
        "slots": 4,
        "pages": 100,
        "max_context": 1000,
        "token_budget": 64,
        "width": 3,
        "queue_limit": 100,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]
