"""A replica that is ten times slower than the others, by a hot GPU or a noisy neighbor: the load goes to the others.

Replicas are simulated: prompts are computed one after the other, tokens of all requests side by side."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from deploy.routing.policy import InFlightAccounting, Load, choose
from deploy.routing.request_features import RequestFeatures

PROMPT_TOKENS, PROMPT_TOKENS_PER_S = 500, 20_000
OUTPUT_S = 1.0
SLOWER = 10
REPORT_PERIOD_S = 0.2


@dataclass
class Replica:
    pace: float
    """Times as long as others take."""
    free_at: float = 0.0
    """Time at which its queued prompts are computed."""
    ends: list[float] = field(default_factory=list)
    taken: int = 0

    def take(self, now: float) -> None:
        self.free_at = max(self.free_at, now) + self.pace * PROMPT_TOKENS / PROMPT_TOKENS_PER_S
        self.ends.append(self.free_at + self.pace * OUTPUT_S)
        self.taken += 1

    def report(self, now: float, seen: int) -> Load:
        backlog = max(self.free_at - now, 0.0) * PROMPT_TOKENS_PER_S / self.pace
        rows = sum(end > now for end in self.ends)
        return Load(backlog=round(backlog), rows=rows, pages_free=1 << 20, seen={"router": seen}, at=now)


def shares(paces: list[float], requests_per_s: float, count: int = 2000) -> list[float]:
    """Share of the requests that each replica gets."""
    drawn = random.Random(1)
    accounting: InFlightAccounting[int] = InFlightAccounting("router", row_tokens=32.0)
    replicas = [Replica(pace) for pace in paces]
    loads: dict[int, Load] = {}
    now, reported = 0.0, -REPORT_PERIOD_S
    for _ in range(count):
        now += drawn.expovariate(requests_per_s)
        if now - reported >= REPORT_PERIOD_S:
            reported = now // REPORT_PERIOD_S * REPORT_PERIOD_S
            loads = {number: replica.report(reported, accounting.sent) for number, replica in enumerate(replicas)}
        features = RequestFeatures(PROMPT_TOKENS)
        chosen = choose(accounting, loads, features, now)[0]
        accounting.record(chosen, loads[chosen], features, now)
        replicas[chosen].take(now)
    return [replica.taken / count for replica in replicas]


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize(("requests_per_s", "most"), [(5.0, 0.4), (20.0, 0.3), (30.0, 0.2)])
def test_the_load_goes_to_the_others(others: int, requests_per_s: float, most: float) -> None:
    """The fewer stand in line, the more a slow one gets: between two reports a prompt that was sent counts as one that
    is yet to be computed, wherever it was sent."""
    slow, *rest = shares([SLOWER, *[1] * others], requests_per_s * others)
    assert slow < most * min(rest)
    assert max(rest) < 1.2 * min(rest)
