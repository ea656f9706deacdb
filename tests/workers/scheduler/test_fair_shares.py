"""API keys share a replica by weight, whatever each of them sends: on the real scheduler."""

from __future__ import annotations

from collections import Counter

import pytest
from replica import Replica
from workload import config, tokens

from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt
from workers.scheduler import max_pages_per_row
from workers.scheduler.queue import NOT_SERVED, Shares, WaitingQueue, urgency
from workers.scheduler.sequence import Sequence, Tokens


def flood(replica: Replica, key: str, count: int, prompt: int = 50, most: int = 40, **more: object) -> None:
    for number in range(count):
        name = f"{key} {len(replica.requests)}"
        refusal = replica.add(name, tokens(prompt, seed=1000 * len(key) + number), key=key, max_tokens=most, **more)
        assert refusal is None, refusal


def steps_until_done(replica: Replica, name: str) -> int:
    for steps in range(1, 20_000):
        assert replica.step()
        if name in replica.finish:
            return steps
    raise AssertionError(f"{name} never ended")


def given(replica: Replica) -> Counter[str]:
    """Tokens that each key was given, prompts and outputs."""
    found: Counter[str] = Counter()
    for name, request in replica.requests.items():
        if replica.tokens[name]:
            found[request.key] += len(request.prompt) + len(replica.tokens[name])
    return found


def test_a_key_that_floods_starves_no_other() -> None:
    """One request after another of a quiet key waits for a slot at the most, not for the 150 requests before it."""
    replica = Replica(config(queue_limit=400))
    flood(replica, "loud", 150)
    alone = Replica(config())
    alone.add("quiet", tokens(60), key="quiet", max_tokens=20)
    by_itself = steps_until_done(alone, "quiet")
    for number in range(5):
        assert not replica.add(f"quiet {number}", tokens(60, seed=number), key="quiet", max_tokens=20)
        flood(replica, "loud", 5)
        # A slot comes free within the steps of one of the other key's requests.
        assert steps_until_done(replica, f"quiet {number}") <= 2 * by_itself + 40
    assert sum(name.startswith("loud") for name in replica.finish) < 75
    replica.run()
    replica.check_tokens()


@pytest.mark.parametrize(
    ("weights", "priorities"),
    [pytest.param((1.0, 1.0), (0, 0), marks=pytest.mark.long), ((1.0, 3.0), (0, 0)), ((1.0, 9.0), (0, -1))],
)
def test_keys_that_always_wait_are_given_tokens_by_weight(
    weights: tuple[float, float], priorities: tuple[int, int]
) -> None:
    """Tokens are shared, not requests: those of one key may be much longer. A priority comes before any weight."""
    replica = Replica(config(queue_limit=2000, slots=6))
    flood(replica, "long", 100, prompt=300, most=60, weight=weights[0], priority=priorities[0])
    flood(replica, "short", 600, prompt=30, most=12, weight=weights[1], priority=priorities[1])
    for _ in range(700):
        replica.step()
    found = given(replica)
    if priorities[1] < priorities[0]:
        assert found["short"] > 20 * found["long"]
    else:
        assert found["short"] / found["long"] == pytest.approx(weights[1] / weights[0], rel=0.15)


def test_who_wanted_nothing_is_owed_nothing() -> None:
    replica = Replica(config(queue_limit=1000))
    flood(replica, "first", 60)
    replica.run()
    before = given(replica)
    flood(replica, "first", 200)
    flood(replica, "second", 200)
    for _ in range(400):
        replica.step()
    found = given(replica)
    assert found["second"] / (found["first"] - before["first"]) == pytest.approx(1.0, rel=0.15)


def test_cached_tokens_are_not_paid_for() -> None:
    replica = Replica(config(slots=1))
    for number in range(2):
        replica.add(str(number), tokens(640), key="a", max_tokens=1)
        replica.run()
    assert replica.scheduler.stats().cached_tokens > 500
    share = replica.scheduler._shares.of("a", 1.0)
    assert share is not None
    assert share.paid == 2 * (640 + 1) - replica.scheduler.stats().cached_tokens


def test_a_full_line_has_room_for_who_has_less_than_its_share_of_it() -> None:
    replica = Replica(config(slots=2, queue_limit=10))
    flood(replica, "loud", 12)
    newest = list(replica.requests)[-1]
    refused = replica.add("one more", tokens(5), key="loud", max_tokens=5)
    assert refused is not None
    assert refused.overloaded
    for number in range(8):
        refused = replica.add(f"quiet {number}", tokens(50, seed=number), key="quiet", max_tokens=5)
        assert (refused is None) == (number < 6), "half of the line is its own"
    assert replica.finish[newest] == "gave way"
    assert list(replica.finish.values()) == ["gave way"] * 6
    refused = replica.add("heavy", tokens(5), key="heavy", weight=0.1, max_tokens=5)
    assert refused is not None, "it has a tenth of a share, and none has more than six times that"
    assert not replica.add("urgent", tokens(5), key="loud", priority=-1, max_tokens=5)
    assert replica.finish["quiet 5"] == "gave way"
    replica.run()
    replica.check_tokens()
    replica.check_rest()


def test_without_keys_a_full_line_is_full_for_everybody() -> None:
    replica = Replica(config(slots=1, queue_limit=3))
    for number in range(4):
        assert not replica.add(str(number), tokens(5, seed=number), max_tokens=5)
    assert replica.add("urgent", tokens(5), priority=-5, max_tokens=5) is not None


def test_a_key_that_floods_does_not_take_back_the_pages_of_who_comes_later() -> None:
    """A request that is served first keeps its rank: requests that arrived earlier, but were served later, come after
    it."""
    replica = Replica(config(pages=max_pages_per_row(500, 3) + 12, max_context=500, queue_limit=100), agree=0.5)
    flood(replica, "loud", 30, prompt=60, most=300)
    for _ in range(20):
        replica.step()
    replica.add("quiet", tokens(60), key="quiet", max_tokens=300)
    steps_until_done(replica, "quiet")
    assert replica.scheduler.stats().preemptions
    assert sum(name.startswith("loud") for name in replica.finish) <= 8
    replica.run()
    replica.check_tokens()
    replica.check_rest()


def test_pages_are_taken_from_the_lowest_priority_of_all_keys() -> None:
    replica = Replica(config(pages=max_pages_per_row(500, 3) + 4, max_context=500), agree=0.5)
    for name, priority in (("batch", 1), ("first", 0), ("last", 0)):
        replica.add(name, tokens(60, seed=len(name)), priority, key=name, max_tokens=400)
    while not replica.scheduler.stats().preemptions:
        replica.step()
    assert [name for name, s in replica.scheduler._live.items() if s.phase.name == "WAITING"] == ["batch"]
    replica.run()
    replica.check_tokens()
    assert list(replica.finish)[-1] == "batch"


def test_a_prompt_of_a_key_that_had_less_goes_before_chunks_of_one_that_had_more() -> None:
    replica = Replica(config(token_budget=20, max_context=1000, width=1))
    replica.add("long", tokens(900), key="loud", max_tokens=2)
    for _ in range(5):
        replica.step()
    replica.scheduler._shares.of("loud", 1.0).charge(10_000)  # type: ignore[union-attr]
    replica.add("waits", tokens(900, seed=1), key="loud", max_tokens=2)
    replica.add("short", tokens(60, seed=2), key="quiet", max_tokens=2)
    assert steps_until_done(replica, "short") < 12
    assert "long" not in replica.finish


def test_how_long_a_request_waited_comes_with_its_first_output() -> None:
    now = [100.0]
    replica = Replica(config(slots=1))
    replica.scheduler._clock = lambda: now[0]
    replica.add("a", tokens(10), max_tokens=8)
    replica.add("b", tokens(10), max_tokens=8)
    while "b" not in replica.finish:
        replica.step()
        now[0] += 1.0
    assert replica.outputs["a"][0].queued == 0.0
    first, *others = [output.queued for output in replica.outputs["b"]]
    assert first >= 3.0
    assert set(others) <= {0.0}


def test_lines_of_keys_are_one_queue() -> None:
    """Served by what the keys have paid, whoever comes; who was served before keeps its rank."""
    queue, shares = WaitingQueue(), Shares()

    def waiting(name: str, arrival: int, priority: int = 0, rank: float = NOT_SERVED) -> Sequence:
        prompt = Prompt.of((1, 2))
        request = Request(str(arrival), prompt, SamplingParams(1))
        known = {"limit": 9, "tokens": Tokens(prompt), "stop_ids": frozenset(), "min_total": 0, "logprobs": -1}
        one = Sequence(request, (priority, rank, arrival), share=shares.of(name, 1.0), **known)  # type: ignore[arg-type]
        queue.push(one)
        return one

    a = [waiting("a", number) for number in range(3)]
    b = waiting("b", 3)
    a[0].share.charge(10)  # type: ignore[union-attr]
    late = waiting("c", 4)  # begins with what b has paid, the least of those who wait
    assert queue.pop() is b
    assert urgency(late) == (0, 0.0, 4)
    urgent, back = waiting("a", 5, priority=-1), waiting("c", 6, rank=3.0)
    assert [queue.pop() for _ in range(6)] == [urgent, back, late, *a]
    assert back.rank == (0, 3.0, 6)
    assert a[0].rank == (0, 10.0, 0)
    assert queue.head() is None
    assert (len(queue), queue.tokens) == (0, 0)
