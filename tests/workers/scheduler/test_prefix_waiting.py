"""Equal prefixes at once: one row computes them, the others wait and take its pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from replica import Replica
from workload import config, random_config, random_request, tokens

from workers.protocol.plan import StepPlan
from workers.scheduler import page_keys


def fed(plans: list[StepPlan]) -> int:
    """Prefill tokens of some steps."""
    return sum(len(row.tokens) for plan in plans for row in plan.prefill)


def admitted(replica: Replica) -> list[list[int]]:
    """Slots that each plan gives out."""
    return [[admission.slot for admission in plan.admissions] for plan in replica.plans]


def finish(replica: Replica) -> None:
    replica.run()
    replica.check_tokens()
    replica.check_rest()


@pytest.mark.parametrize("budget", [64, 500])
@pytest.mark.parametrize("width", [1, 3])
def test_eight_choices_compute_their_prompt_once(width: int, budget: int) -> None:
    replica = Replica(config(slots=8, width=width, token_budget=budget), agree=0.5)
    for choice in range(8):
        replica.add(str(choice), tokens(300), max_tokens=70, seed=choice)
    finish(replica)
    # The others compute what lies behind the last full page, and with a draft layer the token before it.
    assert fed(replica.plans) == 300 + 7 * (300 - 256 + (width > 1))
    assert [replica.outputs[str(choice)][0].cached_tokens for choice in range(8)] == [0] + [256] * 7
    stats = replica.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (2400, 7 * 256)


def test_the_pages_are_taken_in_the_step_after_the_one_that_fills_them() -> None:
    replica = Replica(config(token_budget=500))
    for name in "ab":
        replica.add(name, tokens(130), max_tokens=5)
    assert replica.plan() is not None
    assert replica.plan() is not None  # with the first one's result still out
    assert admitted(replica) == [[0], [1]]
    assert replica.plans[1].prefill[0].write_from == 128
    finish(replica)


def test_a_shared_system_prompt_in_a_burst() -> None:
    replica = Replica(config(slots=8, token_budget=1000))
    for user in range(8):
        replica.add(str(user), [*tokens(256), *tokens(40, seed=user + 1)], max_tokens=5)
    finish(replica)
    assert fed(replica.plans) == 296 + 7 * 41


def test_only_what_is_shared_is_waited_for() -> None:
    # The leader's prompt takes 13 steps, of which two fill the page that both share.
    replica = Replica(config(token_budget=64, width=1))
    replica.add("long", tokens(800), max_tokens=5)
    replica.add("short", [*tokens(64), 1, 2], max_tokens=5)
    while len(replica.tokens["short"]) < 5:
        replica.step()
    assert replica.outputs["short"][0].cached_tokens == 64
    finish(replica)


def test_others_pass_one_that_waits_while_there_is_room_for_both() -> None:
    replica = Replica(config(slots=3, token_budget=400))
    replica.add("leader", tokens(300), max_tokens=5)
    replica.add("follower", tokens(300), max_tokens=5)
    replica.add("other", tokens(60, seed=1), max_tokens=5)
    replica.add("late", tokens(60, seed=2), max_tokens=5)
    replica.plan()
    assert [row.tokens for row in replica.plans[0].prefill] == [tuple(tokens(300)), tuple(tokens(60, seed=1))]
    stats = replica.scheduler.stats()
    # The third slot is the follower's: the last arrival does not take it.
    assert (stats.running, stats.waiting) == (2, 2)
    replica.plan()
    assert replica.plans[1].prefill[0].write_from == 256
    finish(replica)
    assert list(replica.outputs["follower"][0].tokens)


def test_pages_are_kept_for_one_that_waits() -> None:
    # Leader: 5 pages. Follower: one more, and one each for growth. What is left is too little for the third.
    for spare, running in ((3, 1), (4, 2)):
        replica = Replica(config(slots=3, pages=1 + 5 + 1 + 2 + spare, token_budget=600, max_context=400))
        replica.add("leader", tokens(300), max_tokens=5)
        replica.add("follower", tokens(300), max_tokens=5)
        replica.add("other", tokens(200, seed=1), max_tokens=5)
        replica.plan()
        assert replica.scheduler.stats().running == running
        replica.plan()
        assert replica.plans[1].prefill[0].write_from == 256
        finish(replica)
        assert replica.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_follower_goes_on_alone_when_its_leader_is_cancelled(steps: int) -> None:
    replica = Replica(config(token_budget=100, pipeline=1))
    for name in "abc":
        replica.add(name, tokens(300), max_tokens=5)
    for _ in range(steps):
        replica.step()
    replica.plan()
    assert replica.scheduler.stats().running == 1
    replica.cancel("a")
    finish(replica)
    assert replica.finish == {"a": "cancelled", "b": "length", "c": "length"}
    # b leads now; what a had computed is not lost.
    left = 100 * (steps + 1) // 64 * 64
    assert fed(replica.plans) == 100 * (steps + 1) + (300 - left + 1) + (300 - 256 + 1)


def test_a_follower_goes_on_when_its_leader_is_preempted() -> None:
    # An urgent row that grows takes the leader's pages in the middle of its prompt: 4 + 15 + 3 pages are there.
    replica = Replica(config(slots=3, pages=23, token_budget=4, width=1))
    replica.add("urgent", tokens(60, seed=1), priority=-1, max_tokens=700)
    while len(replica.tokens["urgent"]) < 140:
        replica.step()
    for name in "ab":
        replica.add(name, tokens(900), max_tokens=5)
    while not replica.scheduler.stats().preemptions:
        replica.step()
        replica.check_pages()
        replica.check_books()
    assert "urgent" not in replica.finish
    assert not replica.tokens["a"]
    finish(replica)
    assert list(replica.finish) == ["urgent", "a", "b"]


def test_one_that_waits_can_be_cancelled() -> None:
    replica = Replica(config(slots=2, token_budget=100))
    for name in "abc":
        replica.add(name, tokens(300), max_tokens=5)
    replica.plan()
    assert replica.scheduler.stats().waiting == 2
    replica.cancel("b")
    assert replica.scheduler.stats().waiting == 1
    replica.check_books()
    finish(replica)
    assert replica.finish == {"a": "length", "b": "cancelled", "c": "length"}


def test_an_urgent_request_does_not_wait_for_a_later_one() -> None:
    # It would wait for a row that its own priority holds up.
    replica = Replica(config(token_budget=100, width=1))
    replica.add("later", tokens(300), priority=1, max_tokens=5)
    replica.plan()
    replica.add("urgent", tokens(300), max_tokens=5)
    plan = replica.plan()
    assert plan is not None
    assert [len(row.tokens) for row in plan.prefill] == [100]
    assert plan.prefill[0].start == 64
    assert plan.admissions
    finish(replica)


def test_an_urgent_request_may_take_the_slot_that_is_kept() -> None:
    replica = Replica(config(slots=2, token_budget=100))
    for name in "ab":
        replica.add(name, tokens(300), max_tokens=5)
    replica.plan()
    replica.add("urgent", tokens(60, seed=1), priority=-1, max_tokens=5)
    plan = replica.plan()
    assert plan is not None
    assert [len(row.tokens) for row in plan.prefill] == [60, 40]
    finish(replica)


def test_a_colliding_leader_is_waited_for_in_vain_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.protocol.request.chain_key", lambda parent, page: bytes(16))
    replica = Replica(config(token_budget=100))
    for seed in range(3):
        replica.add(str(seed), tokens(300, seed=seed), max_tokens=5)
    replica.run()
    replica.check_tokens()
    assert set(page_keys(tokens(300))) == {bytes(16)}


def test_without_a_cache_nobody_waits() -> None:
    replica = Replica(config(prefix_cache=False, token_budget=1000))
    for name in "abc":
        replica.add(name, tokens(100), max_tokens=5)
    plan = replica.plan()
    assert plan is not None
    assert len(plan.admissions) == 3
    finish(replica)


def test_hundreds_of_choices_of_a_long_prompt_are_not_admitted_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feeds few tokens, but a page table of all of the prompt's pages: what that takes is bounded, too."""
    monkeypatch.setattr("workers.scheduler.scheduler.PLAN_PAGES", 40)
    replica = Replica(config(slots=12, pages=200, token_budget=2000))
    for choice in range(12):
        replica.add(str(choice), tokens(900), max_tokens=3, seed=choice)
    finish(replica)
    admissions = [len(plan.admissions) for plan in replica.plans]
    assert sum(admissions) == 12
    assert max(admissions) == 3, "of 15 pages each"
    assert fed(replica.plans) == 900 + 11 * (900 - 896 + 1)


def burst(seed: int) -> Replica:
    """Groups of equal prompts, and others between them, on a replica with room."""
    rng = random.Random(seed)
    room = {"slots": 8, "pages": 60, "token_budget": 8 * 4 + rng.choice([64, 200, 500]), "queue_limit": 1000}
    settings = replace(random_config(rng), prefix_cache=True, cache_shards=1, **room)
    replica = Replica(settings, agree=rng.choice([0.5, 0.9]), seed=seed)
    for group in range(6):
        prompt, sampling = random_request(rng, settings.max_context)
        for choice in range(rng.randint(2, 5)):
            replica.add(f"{group} {choice}", prompt, **(sampling | {"seed": choice}))
            if rng.random() < 0.5:
                other, sampling_of_other = random_request(rng, settings.max_context)
                replica.add(f"{group} {choice} other", other, **sampling_of_other)
        if rng.random() < 0.3 and replica.scheduler._live:
            replica.plan()
            replica.cancel(rng.choice(sorted(replica.scheduler._live)))
        for _ in range(rng.choice([0, 1, 10])):
            replica.step()
            replica.check_pages()
            replica.check_books()
    finish(replica)
    return replica


@pytest.mark.long
def test_bursts_of_equal_prompts_keep_their_order() -> None:
    # `Replica` checks the order of every plan.
    replicas = [burst(seed) for seed in range(90)]
    assert sum(replica.overtaken for replica in replicas) >= 20
    assert all(set(replica.finish) == set(replica.requests) for replica in replicas)
