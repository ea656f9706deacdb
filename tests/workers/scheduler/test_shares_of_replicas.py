"""Several replicas give each API key its share of all of them: real schedulers that hear of each other now and then."""

from __future__ import annotations

from collections import Counter

import pytest
from replica import Replica
from workload import config, tokens

STEPS_A_SECOND = 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Deployment:
    """Replicas that work at one pace, and tell each other once a second."""

    def __init__(self, replicas: int, talk: bool = True, **settings: int) -> None:
        self.clock, self.talk = Clock(), talk
        self.replicas = [Replica(config(queue_limit=2000, **settings), seed=seed) for seed in range(replicas)]
        for replica in self.replicas:
            replica.scheduler._shares._clock = self.clock
            replica.scheduler._shares._looks[0] = (0.0, 0.0)
        self.names = 0

    def ask(self, where: int, key: str, prompt: int = 50, most: int = 30, weight: float = 1.0) -> None:
        self.names += 1
        name = f"{key} {self.names}"
        refusal = self.replicas[where].add(
            name, tokens(prompt, seed=self.names), key=key, weight=weight, max_tokens=most
        )
        assert refusal is None

    def keep_asking(self, where: int, key: str, weight: float = 1.0) -> None:
        """Ten requests of the key wait there."""
        waiting = sum(
            request.key == key and not replica.tokens[name] and name not in replica.finish
            for replica in [self.replicas[where]]
            for name, request in replica.requests.items()
        )
        for _ in range(10 - waiting):
            self.ask(where, key, weight=weight)

    def second(self) -> None:
        for _ in range(STEPS_A_SECOND):
            for replica in self.replicas:
                replica.step()
        self.clock.now += 1
        news = [replica.scheduler.charges() for replica in self.replicas]
        for number, replica in enumerate(self.replicas):
            for other, charges in enumerate(news):
                if self.talk and other != number and charges is not None:
                    replica.scheduler.charged_elsewhere(charges)

    def given(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for replica in self.replicas:
            for share in replica.scheduler._shares._known.values():
                found[share.name] += share.charged
        return found


@pytest.mark.parametrize(
    ("weight", "talk"), [pytest.param(1.0, True, marks=pytest.mark.long), (3.0, True), (1.0, False)]
)
def test_a_key_that_floods_all_replicas_has_one_share_and_not_one_of_each(weight: float, talk: bool) -> None:
    """The quiet key's requests all wait at one replica. Without a word from the other it would have half of that one, a
    quarter of all."""
    both = Deployment(2, talk=talk)
    for _ in range(80):
        for where in (0, 1):
            both.keep_asking(where, "floods", weight)
        both.keep_asking(1, "elsewhere")
        both.second()
    found = both.given()
    if not talk:
        assert found["elsewhere"] / found.total() == pytest.approx(1 / 4, rel=0.15)
        return
    # It may have a whole replica; with a weight of 3 the other key has a right to three quarters of all.
    assert found["elsewhere"] / found.total() == pytest.approx(1 / (1 + weight), rel=0.15)


@pytest.mark.long
def test_keys_at_replicas_of_their_own_are_owed_nothing_for_long() -> None:
    """A key that had a replica to itself for a long time, and then finds only another one where others wait, is put
    behind them for some time, and not until they have had as much."""
    both = Deployment(2)
    for _ in range(150):
        for number in range(10):
            both.ask(0, "alone", prompt=100 + number, most=2)
        both.keep_asking(1, "others")
        both.second()
    before = both.given()
    assert before["alone"] > 1.5 * before["others"]
    for _ in range(60):
        both.keep_asking(1, "alone")
        both.keep_asking(1, "others")
        both.second()
    found = both.given() - before
    assert found["alone"] > found["others"] / 5


def test_who_wanted_nothing_is_owed_nothing_by_any_replica() -> None:
    both = Deployment(2)
    for _ in range(30):
        both.keep_asking(0, "first")
        both.second()
    before = both.given()
    for _ in range(40):
        for key in ("first", "second"):
            both.keep_asking(1, key)
        both.second()
    found = both.given() - before
    assert found["second"] / (found["first"]) == pytest.approx(1.0, rel=0.3)


def test_what_is_heard_is_charged_by_weight_and_told_once() -> None:
    both = Deployment(2)
    both.ask(0, "app", prompt=50, most=5, weight=2.0)
    both.replicas[0].run()
    news = both.replicas[0].scheduler.charges()
    assert news is not None
    assert [(item.key, item.weight, item.tokens) for item in news.items] == [("app", 2.0, 55)]
    assert both.replicas[0].scheduler.charges() is None
    other = both.replicas[1].scheduler
    other.charged_elsewhere(news)
    share = other._shares.of("app", 2.0)
    assert share is not None
    assert share.paid == 27.5
    assert other.charges() is None, "what others gave is not told as one's own"
