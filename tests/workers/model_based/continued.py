"""Engines that die: requests are cut at a random token and go on in another engine, in another batch, at another width
and budget. The reference, which knows of no engine, judges what the two gave together."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.workers.harness import Finished
from tests.workers.model_based.drive import Bench, Driven, Outcome
from tests.workers.model_based.schedules import Add, Apply, Event, Plan, Schedule, random_schedule
from workers.protocol.messages import Request
from workers.protocol.plan import StepPlan
from workers.protocol.request import pack_tokens

Continue = Callable[[str, Request, list[int], float], Add]
"""Function that makes the event with which a request goes on, from its name, itself, the tokens that were delivered and
its age."""


class Died(Exception):
    """The engine is gone."""


class Mortal(Driven):
    """An engine that dies after so many steps."""

    steps = 0

    def _apply(self) -> StepPlan | None:
        plan = super()._apply()
        self.steps -= plan is not None
        if self.steps <= 0:
            raise Died
        return plan


def as_it_was(name: str, request: Request, tokens: list[int], age_s: float) -> Add:
    """Continue with all that it was asked with, behind the tokens that were delivered."""
    return Add(name, tuple(request.prompt), request.sampling, request.priority, pack_tokens(tokens), age_s)


def left_of(bench: Bench, schedule: Schedule, rng: random.Random) -> Driven:
    """An engine that died at a random step of a schedule, with what was delivered by then: what an engine said last
    may have been lost with it."""
    alive = bench.driven(schedule)
    dying = Mortal(alive.engine, alive.rng, alive.drafter)
    dying.steps = rng.randint(3, 60)
    try:
        dying.through(schedule)
    except Died:
        pass
    finally:
        dying.close()
    for record in dying.engine.finished.values():
        if record.finish in ("failed", "cancelled"):
            continue
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            if record.outputs:
                lost = record.outputs.pop()
                del record.tokens[len(record.tokens) - len(lost.tokens) :]
                record.finish = None
    return dying


def run_cut(bench: Bench, seed: int, go_on: Continue = as_it_was) -> Outcome:
    """Cut the schedule of this seed, and let what is left of it go on beside requests of another."""
    rng = random.Random(f"cut {seed}")
    first, other = random_schedule(seed), random_schedule(seed + 500_000, requests=5)
    dead = left_of(bench, first, rng)
    left = {name: record for name, record in dead.engine.finished.items() if record.finish is None}
    events: list[Event] = []
    for age, (name, record) in enumerate(left.items()):
        before = dead.requests[name]
        events.append(go_on(name, before, list(record.tokens), float(len(left) - age)))
        for _ in range(rng.choice([0, 0, 1, 3])):
            events.append(rng.choice([Plan(), Apply()]))
    new = [event for event in other.events if not isinstance(event, Add) or event.name not in dead.requests]
    # Another width, budget and number of rows; what fitted the one engine fits the other.
    pages = max(first.engine["cache_pages"], other.engine["cache_pages"])
    engine = {**other.engine, "cache_pages": pages}
    heir = Schedule(seed, engine, other.widths, (*events, *new[: rng.choice([0, 4, 30])]))
    outcome = bench.run(heir, {name: (dead.requests[name], kept(record)) for name, record in left.items()})
    outcome.seen["cut"] += sum(bool(record.tokens) for record in left.values())
    outcome.seen["cut before a token came"] += sum(not record.tokens for record in left.values())
    for name, record in left.items():
        sampling = dead.requests[name].sampling
        if record.tokens:
            outcome.seen["cut with penalties"] += sampling.has_penalties
            outcome.seen["cut with a grammar"] += sampling.grammar is not None
            outcome.seen["cut with log-probabilities"] += sampling.logprobs >= 0
            outcome.seen["cut and sampled"] += sampling.temperature > 0
            outcome.seen["cut with a scored prompt"] += sampling.prompt_logprobs >= 0
    return outcome


def kept(record: Finished) -> Finished:
    """A copy, to which another engine adds."""
    return Finished(list(record.tokens), list(record.outputs), None)


def soak_cuts(bench: Bench, cuts: int, first_seed: int, go_on: Continue = as_it_was) -> Outcome:
    """Schedules are cut until so many requests were, or one fails: then the problem names the seed."""
    total, seed = Outcome(), first_seed
    while total.seen["cut"] < cuts and not total.problem:
        outcome = run_cut(bench, seed, go_on)
        total.steps += outcome.steps
        total.seen += outcome.seen
        if outcome.problem:
            total.problem = f"cut schedule {seed}: {outcome.problem}"
        seed += 1
    total.seen.update(bench.reference.seen)
    return total
