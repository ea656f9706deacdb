"""A replica that is ten times slower than the others, by a hot GPU or a noisy neighbor: the load goes to the others.

Replicas are simulated: prompts are computed one after the other, tokens of all requests side by side."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from deploy.routing.arrivals import load_from_report, load_to_report
from deploy.routing.pace import KEPT_S, StepClock, paces
from deploy.routing.policy import InFlightAccounting, Load, choose
from deploy.routing.request_features import RequestFeatures
from workers.protocol.messages import Distribution, EngineStats
from workers.protocol.request import Prompt

PROMPT_TOKENS, PROMPT_TOKENS_PER_S = 500, 20_000
OUTPUT_S, STEP_S = 1.0, 0.02
SLOWER = 10
CONTEXT = 250
"""Tokens before each token, on average."""
REPORT_PERIOD_S = 0.2
ROOT = b"root of sixteen."


@dataclass
class Replica:
    pace: float
    """Times as long as others take."""
    free_at: float = 0.0
    """Time at which its queued prompts are computed."""
    ends: list[float] = field(default_factory=list)
    taken: int = 0
    reported: float = 0.0
    uncounted_s: float = 0.0
    """Time that went into a prompt which is not done."""
    counts: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """Steps so far by kind: how many, their seconds and their tokens."""

    def __post_init__(self) -> None:
        self.clock = StepClock(lambda: self.reported)

    def take(self, now: float) -> None:
        self.free_at = max(self.free_at, now) + self.pace * PROMPT_TOKENS / PROMPT_TOKENS_PER_S
        self.ends.append(self.free_at + self.pace * OUTPUT_S)
        self.taken += 1

    def count(self, kind: str, steps: int, seconds: float, tokens: int) -> None:
        before = self.counts.get(kind, (0, 0.0, 0))
        self.counts[kind] = (before[0] + steps, before[1] + seconds, before[2] + tokens)

    def stats(self, now: float) -> EngineStats:
        """The scheduler's figures: what was computed since the last ones."""
        busy = min(max(self.free_at - self.reported, 0.0), now - self.reported)
        rows = sum(end > self.reported for end in self.ends)
        one = self.pace * PROMPT_TOKENS / PROMPT_TOKENS_PER_S
        self.uncounted_s += busy
        if prompts := int(self.uncounted_s / one):
            self.count("mixed", prompts, prompts * one, prompts * PROMPT_TOKENS)
            self.uncounted_s -= prompts * one
        if rows and (steps := int((now - self.reported - busy) / (self.pace * STEP_S))):
            self.count("decode", steps, steps * self.pace * STEP_S, steps * rows)
        self.reported = now
        return EngineStats(
            step_seconds={kind: Distribution((count[0],), count[1]) for kind, count in self.counts.items()},
            step_context={kind: Distribution((count[0],), count[0] * CONTEXT) for kind, count in self.counts.items()},
            step_prefill_tokens={"mixed": Distribution((1,), self.counts.get("mixed", (0, 0.0, 0))[2])},
            decode_fed=self.counts.get("decode", (0, 0.0, 0))[2],
        )

    def report(self, now: float, seen: int) -> Load:
        backlog = max(self.free_at - now, 0.0) * PROMPT_TOKENS_PER_S / self.pace
        rows = sum(end > now for end in self.ends)
        self.clock.add(self.stats(now))
        load = Load(
            backlog=round(backlog),
            rows=rows,
            pages_free=1 << 20,
            seen={"router": seen},
            at=now,
            step_times=self.clock.times(),
        )
        return load_from_report(load_to_report(load))


def shares(
    paces: list[float], requests_per_s: float, count: int = 2000, recovers_at: int | None = None
) -> list[list[float]]:
    """Share of the requests that each replica gets, of each half of them. `recovers_at`: the request from which on all
    are equally fast."""
    drawn = random.Random(1)
    accounting: InFlightAccounting[int] = InFlightAccounting("router", row_tokens=32.0)
    replicas = [Replica(pace) for pace in paces]
    loads: dict[int, Load] = {}
    now, reported = 0.0, -REPORT_PERIOD_S
    halves = []
    for number in range(count):
        now += drawn.expovariate(requests_per_s)
        if number == recovers_at:
            for replica in replicas:
                replica.pace = 1
        if now - reported >= REPORT_PERIOD_S:
            reported = now // REPORT_PERIOD_S * REPORT_PERIOD_S
            loads = {place: replica.report(reported, accounting.sent) for place, replica in enumerate(replicas)}
        features = RequestFeatures(PROMPT_TOKENS)
        chosen = choose(accounting, loads, features, now)[0]
        accounting.record(chosen, loads[chosen], features, now)
        replicas[chosen].take(now)
        if number + 1 in (count // 2, count):
            halves.append([replica.taken * 2 / count for replica in replicas])
            for replica in replicas:
                replica.taken = 0
    return halves


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("requests_per_s", [1.0, 5.0, 20.0, 30.0])
def test_a_slow_replica_gets_its_share_of_the_time(others: int, requests_per_s: float) -> None:
    """A tenth of what others get at the most; at light load it is only tried now and then."""
    for slow, *rest in shares([SLOWER, *[1] * others], requests_per_s * others):
        assert slow < 1.5 / SLOWER * min(rest)
        assert max(rest) < 1.2 * min(rest)


def test_a_replica_that_has_recovered_gets_its_part_again() -> None:
    (before, *_), (after, *_) = shares([SLOWER, 1], 5.0, 4000, recovers_at=1500)
    assert before < 0.25
    assert 0.45 < after < 0.55


def test_replicas_of_about_one_pace_are_alike() -> None:
    """Steps of one size differ by their contexts; the line of those that wait is told by their number."""
    for slow, fast in shares([1.5, 1], 20.0):
        assert 0.3 < slow < fast


def test_steps_are_compared_by_their_size() -> None:
    """A replica with much to do takes longer for its steps, and is no slower for that."""
    assert paces({"busy": {"decode 6": 0.03}, "idle": {"decode 0": 0.003}}) == {"busy": 1, "idle": 1}
    assert paces({"busy": {"decode 6": 0.03}, "slow": {"decode 0": 0.15}}) == {"busy": 1, "slow": 5}
    assert paces({"slow": {"decode 5": 0.3}, "fast": {"decode 3": 0.01}}) == {"slow": 7.5, "fast": 1}
    slow = {"decode 0": 0.05, "decode 3": 0.05, "prefill 9": 0.05}
    fast = {"decode 0": 0.005, "decode 3": 0.01, "mixed 9": 0.001}
    assert paces({"a": slow, "b": fast, "c": {}}) == {"a": 7.5, "b": 1, "c": 1}
    assert paces({"a": slow}) == {"a": 1}
    # A busy host makes small differences.
    assert paces({"a": {"decode 0": 0.009}, "b": {"decode 0": 0.001}}) == {"a": 1, "b": 1}
    assert paces({"a": {"decode 0": 0.0}, "b": slow}) == {"a": 1, "b": 1}
    assert paces({"a": {"mixed 9": 1.0}, "b": slow}) == {"a": 1, "b": 1}


def test_steps_are_compared_with_those_of_like_context() -> None:
    """2,048 tokens behind 100,000 take several times as long as behind none."""
    long = {"prefill@16 11": 0.5, "mixed@16 11": 0.6, "decode@16 3": 0.05}
    short = {"prefill@11 11": 0.1, "mixed@11 11": 0.12, "decode@11 3": 0.01}
    assert paces({"long": long, "short": short}) == {"long": 1, "short": 1}
    slow = {name: 10 * seconds for name, seconds in short.items()}
    assert paces({"long": long, "short": short, "slow": slow}) == {"long": 1, "short": 1, "slow": pytest.approx(10)}
    # A context up to twice as long takes no longer than in proportion.
    assert paces({"a": {"decode@12 3": 0.09}, "b": {"decode@11 3": 0.01}}) == {"a": pytest.approx(4.5), "b": 1}
    assert paces({"a": {"decode@12 3": 0.07}, "b": {"decode@11 3": 0.01}}) == {"a": 1, "b": 1}
    assert paces({"a": {"decode@11 3": 0.07}, "b": {"decode@12 3": 0.01}}) == {"a": pytest.approx(7), "b": 1}
    # Replicas of an earlier version say nothing of contexts, and are compared with their like.
    assert paces({"long": {"mixed 11": 0.6}, "short": short}) == {"long": 1, "short": 1}


def chunks(count: int, seconds: float, context: int) -> EngineStats:
    """Figures after so many steps of 2,048 prompt tokens behind as many as `context`."""
    return EngineStats(
        step_seconds={"prefill": Distribution((count,), count * seconds)},
        step_prefill_tokens={"prefill": Distribution((count,), count * 2048.0)},
        step_context={"prefill": Distribution((count,), count * float(context))},
    )


def test_a_session_with_a_long_context_returns_to_the_replica_that_has_it() -> None:
    prompt = Prompt.of(range(6400))
    features = RequestFeatures(7000, prompt)
    loads: dict[str, Load] = {}
    for name, seconds, context in (("long", 0.5, 100_000), ("short", 0.1, 0)):
        clock = StepClock()
        clock.add(chunks(4, seconds, context))
        keys = frozenset(features.keys(ROOT)) if name == "long" else frozenset[bytes]()
        load = Load(backlog=1000, rows=40, root=ROOT, keys=keys, step_times=clock.times())
        report = load_to_report(load)
        loads[name] = load_from_report(report)
        for said in loads[name].step_times:  # as routers of earlier versions read it
            kind, _, number = said.partition(" ")
            assert kind.startswith("prefill")
            assert int(number) == 11
    accounting: InFlightAccounting[str] = InFlightAccounting("router", row_tokens=32.0)
    assert choose(accounting, loads, features, 0.0)[0] == "long"


def test_one_step_that_was_held_up_is_forgotten_and_so_is_what_is_old() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    total = 0.0
    for count, seconds in enumerate([0.01, 0.01, 5.0, 0.01, 0.01], 1):
        total += seconds
        clock.add(EngineStats(step_seconds={"decode": Distribution((count,), total)}, decode_fed=count))
        clock.add(EngineStats(step_seconds={"decode": Distribution((count,), total)}, decode_fed=count))
    assert clock.times() == {"decode 0": pytest.approx(0.01)}
    # An engine that was started again counts from nothing.
    clock.add(EngineStats(step_seconds={"decode": Distribution((2,), 0.08)}, decode_fed=16))
    assert clock.times()["decode 3"] == pytest.approx(0.04)
    now = KEPT_S + 1
    assert clock.times() == {}
