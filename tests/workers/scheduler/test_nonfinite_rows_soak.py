"""Rows that are no numbers among others: those end alone, and everybody else gets the tokens that it gets alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from replica import Replica
from simulated_worker import VOCAB
from workload import config, random_config, random_request, tokens

from workers.scheduler import Unsound
from workers.scheduler.results import CANARY_ID, NONFINITE_STEPS

POISON = VOCAB
"""Token that nobody generates."""


def soak(seed: int, mishap: float) -> tuple[Replica, set[str]]:
    """Random requests under pressure, some with the poison in their prompts: at the end, at the beginning or in what
    they share. Also who they are."""
    rng = random.Random(seed)
    replica = Replica(random_config(rng, tight=True), agree=rng.choice([0.0, 0.5, 0.9]), seed=seed)
    replica.worker.poison, replica.worker.mishap = POISON, mishap
    poisoned: set[str] = set()
    for number in range(25):
        prompt, sampling = random_request(rng, replica.config.max_context)
        if prompt and rng.random() < 0.3:
            prompt = [*prompt]
            prompt[rng.choice([0, len(prompt) // 2, len(prompt) // 2, -1])] = POISON
        for choice in range(rng.choice([1, 1, 1, 4])):
            name = f"request {number}.{choice}"
            if replica.add(name, prompt, **sampling) is None and POISON in prompt:
                poisoned.add(name)
        live = sorted(name for name in replica.scheduler._live if name != CANARY_ID)
        if live and rng.random() < 0.1:
            replica.cancel(rng.choice(live))
        for _ in range(rng.choice([0, 0, 1, 10, 40])):
            if rng.random() < 0.5:
                replica.plan()
            elif replica.launched:
                replica.apply()
            replica.check_pages()
            replica.check_books()
    replica.run()
    assert set(replica.finish) == set(replica.requests)
    replica.check_tokens()
    replica.check_pages()
    replica.check_books()
    return replica, poisoned


@pytest.mark.parametrize("seeds", [range(12, 28), pytest.param(range(48), marks=pytest.mark.soak)], ids=str)
def test_bad_prompts_end_alone(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        replica, poisoned = soak(seed, mishap=0.0)
        replica.check_rest()
        for name, reason in replica.finish.items():
            assert reason in (
                ("failed", "cancelled", "gave way") if name in poisoned else ("stop", "length", "cancelled", "gave way")
            ), name
            if name in poisoned:
                assert replica.tokens[name] == [], "no token of a bad row ever leaves"
            seen[reason] += 1
        stats = replica.scheduler.stats()
        seen["bad rows"] += stats.bad_rows
        seen["cached tokens"] += stats.cached_tokens
        seen["computed again"] += stats.bad_rows - sum(reason == "failed" for reason in replica.finish.values())
        seen["preempted"] += stats.preemptions
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("seeds", [range(9, 20), pytest.param(range(28), marks=pytest.mark.soak)], ids=str)
def test_memory_that_fails_for_a_moment_costs_a_request_at_most(seeds: range) -> None:
    """A request that had read what it left gets its own tokens all the same."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        replica, poisoned = soak(seed, mishap=0.001)
        for name, reason in replica.finish.items():
            seen["poisoned" if name in poisoned else reason] += 1
        innocent = sum(reason == "failed" for name, reason in replica.finish.items() if name not in poisoned)
        assert innocent <= replica.worker.mishaps
        failed = sum(reason == "failed" for reason in replica.finish.values())
        seen["computed again"] += replica.scheduler.stats().bad_rows - failed
    assert seen["failed"] >= 5
    assert seen["computed again"] >= 5
    assert seen["stop"] + seen["length"] > 5 * seen["failed"]


@pytest.mark.parametrize("width", [1, 3])
def test_pages_of_a_nonfinite_row_are_zeroed_before_they_are_anybody_elses(width: int) -> None:
    replica = Replica(config(width=width, pages=12, max_context=400))
    replica.worker.poison = POISON
    replica.add("bad", [*tokens(130), POISON, *tokens(60, seed=1)], max_tokens=9)
    replica.run()
    own = next(i for i, plan in enumerate(replica.plans) if i and plan.admissions)  # the replica's own request
    granted = {page for plan in replica.plans[:own] for grant in plan.grants for page in grant.pages}
    assert replica.scheduler._rows.cache.cached == 0
    assert replica.scheduler._rows.pool._suspect <= granted
    for seed in range(2, 5):
        replica.add(f"good {seed}", tokens(200, seed), max_tokens=90)
    replica.run()
    assert not any(replica.worker.broken)
    zero_filled: set[int] = set()
    for plan in replica.plans[own:]:
        zero_filled.update(plan.zero_fill)
        assert zero_filled >= {page for grant in plan.grants for page in grant.pages} & granted
    assert zero_filled == granted


def test_a_client_alone_may_send_bad_prompts_for_ever() -> None:
    """Every step has non-finite rows alone, and each time one token of the replica's own says that it is well."""
    replica = Replica(config())
    replica.worker.poison = POISON
    for number in range(3 * NONFINITE_STEPS):
        replica.add(f"bad {number}", [1, 2, POISON], max_tokens=5)
        replica.run()
        assert replica.finish[f"bad {number}"] == "failed"
        assert CANARY_ID not in replica.finish
    assert replica.scheduler.stats().bad_rows == 3 * NONFINITE_STEPS
    replica.add("good", [1, 2, 3], max_tokens=5)
    replica.run()
    replica.check_tokens()


def test_a_replica_that_is_broken_ends() -> None:
    replica = Replica(config())
    replica.worker.mishap = 1.0
    replica.add("any", [1, 2, 3], max_tokens=5)
    with pytest.raises(Unsound, match="not even a single token by itself"):
        replica.run()
    assert replica.finish["any"] == "failed"


def test_one_nonfinite_step_after_the_other_puts_the_replica_to_the_test() -> None:
    """Though somebody gains tokens all the time."""
    replica = Replica(config(slots=8))
    replica.worker.poison = POISON
    replica.add("good", [1, 2, 3], max_tokens=900)
    replica.step()
    for number in range(4 * NONFINITE_STEPS):
        replica.add(f"bad {number}", [1, 2, POISON], max_tokens=5)
        replica.step()
    canaries = [plan.step for plan in replica.plans for a in plan.admissions if a.sampling.max_tokens == 1]
    assert 2 <= len(canaries) <= 4
    replica.run()
    replica.check_tokens()
    assert replica.finish["good"] == "length"
