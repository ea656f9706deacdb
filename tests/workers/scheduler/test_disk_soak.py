"""Random requests on a replica with a disk, with losses, bad rows, starts and keys that collide."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from replica import Replica
from workload import random_config, random_request

from workers.protocol import request as prompts

pytestmark = pytest.mark.usefixtures("short_prompts_are_worth_a_load")


def soak(seed: int, requests: int = 40, losses: float = 0.0, mishaps: float = 0.0, starts: bool = False) -> Replica:
    rng = random.Random(seed)
    settings = replace(
        random_config(rng, tight=True),
        host_pages=rng.choice([1, 3, 4, 5, 8]),
        disk_pages=rng.choice([8, 40, 300]),
        queue_limit=50,
        ranks=rng.choice([1, 2, 3]),
        save_batch=rng.choice([1, 2, 16]),
        load_least=rng.choice([1, 1, 2]),
        disk_least=1,
        disk_page_s=0.0,
        disk_writes_per_s=rng.choice([100.0, 1e9]),
        disk_writes_saved_up=rng.choice([30.0, 1e9]),
        prefix_cache=True,
    )
    replica = Replica(settings, agree=rng.choice([0.0, 0.5, 1.0]), seed=seed)
    replica.losses, replica.worker.mishap = losses, mishaps
    known: list[list[int]] = []
    for number in range(requests):
        if starts and number == requests // 2:
            known = [[*request.prompt, *replica.tokens[name]] for name, request in replica.requests.items()]
            replica.check_tokens()
            replica = replica.start_again()
            replica.losses, replica.worker.mishap = losses, mishaps
        prompt, sampling = random_request(rng, settings.max_context)
        if replica.finish and rng.random() < 0.7:
            name = rng.choice(sorted(replica.finish))
            prompt = [*replica.requests[name].prompt, *replica.tokens[name], 1, 2, 3]
        elif known and rng.random() < 0.8:
            prompt = [*rng.choice(known), 1, 2]
        replica.add(f"request {number}", prompt, **sampling)
        live = sorted(replica.requests.keys() & replica.scheduler._live)  # not its own probe
        if live and rng.random() < 0.2:
            replica.cancel(rng.choice(live))
        for _ in range(rng.choice([0, 0, 1, 10, 40])):
            kind = rng.random()
            if kind < 0.4:
                replica.plan()
            elif kind < 0.55 and replica.launched:
                replica.apply()
            elif kind < 0.7:
                replica.move()
            elif kind < 0.85 and replica.answers:
                replica.answer()
            elif kind < 0.9 and replica.disk_answers:
                replica.answer_of_disk()
            else:
                replica.now += rng.choice([0.001, 0.1, 1.0])
                replica.scheduler.expire()
            replica.check_pages()
            replica.check_books()
    replica.run()
    replica.check_pages()
    replica.check_books()
    return replica


@pytest.mark.parametrize(
    ("losses", "starts"), [pytest.param(0.0, False, marks=pytest.mark.long), (0.1, True), (0.0, True)]
)
def test_under_pressure_every_request_gets_its_own_tokens_from_wherever(losses: float, starts: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        replica = soak(seed, losses=losses, starts=starts)
        assert set(replica.finish) == set(replica.requests)
        replica.check_tokens()
        replica.check_rest()
        stats = replica.scheduler.stats()
        seen["saved"] += stats.disk_saved_pages
        seen["loaded"] += stats.disk_loaded_pages
        seen["late"] += stats.disk_late_loads
        if losses:
            seen["lost"] += stats.disk_lost_pages
    print(seen)
    assert min(seen["saved"], seen["loaded"], seen.get("lost", 99)) >= 15
    assert seen["late"] >= 1


@pytest.mark.long
def test_bad_rows_harm_nobody_else_where_their_pages_come_and_go() -> None:
    bad = 0
    for seed in range(20):
        replica = soak(seed, losses=0.05, mishaps=1e-3, starts=seed % 2 == 0)
        bad += replica.scheduler.stats().bad_rows
        replica.check_tokens()
    assert bad >= 5


@pytest.mark.long
def test_colliding_page_keys_cost_hits_but_never_tokens_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    strong = prompts.chain_key
    monkeypatch.setattr(prompts, "chain_key", lambda parent, page: bytes(15) + bytes([strong(parent, page)[0] % 3]))
    stats = [soak(seed, starts=True).scheduler.stats() for seed in range(20)]
    assert sum(one.disk_saved_pages for one in stats) > 10
