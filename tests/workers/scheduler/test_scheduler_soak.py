"""Long random runs under pressure; the test also demands that they did what they are for."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from replica import Replica
from workload import random_config, random_request

from workers.protocol import request as prompts


def soak(seed: int, requests: int = 25) -> Replica:
    rng = random.Random(seed)
    config = random_config(rng, tight=True)
    replica = Replica(config, agree=rng.choice([0.0, 0.5, 0.9, 1.0]), seed=seed)
    for number in range(requests):
        prompt, sampling = random_request(rng, config.max_context)
        if replica.finish and rng.random() < 0.3:
            name = rng.choice(sorted(replica.finish))
            prompt = [*replica.requests[name].prompt, *replica.tokens[name], 1, 2, 3]
        replica.add(f"request {number}", prompt, **sampling)
        live = sorted(replica.scheduler._live)
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
    return replica


@pytest.mark.long
def test_under_pressure_every_request_gets_its_own_tokens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        replica = soak(seed)
        replica.check_rest()
        stats = replica.scheduler.stats()
        plans = replica.plans
        resumed = [(plan, a) for plan in plans for a in plan.admissions if a.generated]
        seen["preempted"] += stats.preemptions
        seen["resumed"] += len(resumed)
        seen["resumed on cached pages"] += sum(
            any(row.slot == a.slot and row.write_from for row in plan.prefill) for plan, a in resumed
        )
        seen["cached tokens"] += stats.cached_tokens
        seen["mixed steps"] += stats.step_seconds["mixed"].count
        seen["drafts accepted"] += stats.drafts_accepted
        seen["drafts fewer"] += any(b.drafts < a.drafts for a, b in itertools.pairwise(plans))
        seen["drafts more"] += any(b.drafts > a.drafts for a, b in itertools.pairwise(plans))
        seen["cut inside a window"] += sum(reason == "stop" for reason in replica.finish.values())
        scoring = {name for name, request in replica.requests.items() if request.sampling.prompt_logprobs >= 0}
        scored = [row.scored for plan in plans for row in plan.prefill if row.scored]
        seen["prompts scored"] += len(scoring & {name for name, tokens in replica.tokens.items() if tokens})
        seen["prompts scored in parts"] += len(scored) - len(scoring)
        seen["cancelled"] += sum(reason == "cancelled" for reason in replica.finish.values())
    print(seen)
    assert all(seen[name] >= 20 for name in seen if not name.startswith("drafts "))
    assert seen["drafts accepted"] > 1000
    assert min(seen["drafts fewer"], seen["drafts more"]) >= 5


@pytest.mark.long
def test_colliding_page_keys_cost_hits_but_never_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(15) + bytes([strong(parent, page)[0] % 3]))
    assert sum(soak(seed).scheduler.stats().cached_tokens for seed in range(20)) > 1000
