"""Requests that an engine before this one had begun: they go on behind the tokens that it delivered."""

from __future__ import annotations

import random

import pytest
from replica import Replica
from simulated_worker import alone
from workload import config, tokens

from tests.workers.widths import restless
from workers.processes.inbox import Inbox
from workers.protocol.messages import Request, Requests
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt, pack_tokens
from workers.protocol.scores import Scores
from workers.scheduler import Scheduler
from workers.scheduler.queue import Arrivals


def go_on(replica: Replica, request: Request, done: int, age_s: float = 1.0, key: str = "") -> None:
    """Ask the replica for a request of whose tokens so many are there."""
    known, _ = alone(request, replica.config.max_context)
    continued = Request(
        request.request_id,
        Prompt.of(request.prompt),
        request.sampling,
        request.priority,
        key,
        done=pack_tokens(known[:done]),
        age_s=age_s,
    )
    assert replica.scheduler.add(continued) is None
    replica.requests[request.request_id] = continued
    replica.tokens[request.request_id], replica.outputs[request.request_id] = known[:done], []


def request(name: str = "a", prompt: int = 100, seed: int = 0, **sampling: object) -> Request:
    return Request(name, Prompt.of(tokens(prompt, seed)), SamplingParams(**{"max_tokens": 90, **sampling}))  # type: ignore[arg-type]


@pytest.mark.parametrize("done", [0, 1, 27, 28, 89])
def test_the_rest_is_that_of_a_run_that_nothing_disturbed(done: int) -> None:
    """Outputs go on on both sides of a page's end, whatever is asked for; every output says where its tokens stand."""
    replica = Replica(config(vocab_size=40), agree=0.6, seed=done)
    restless(replica.scheduler, lambda: random.Random(done).randint(1, 3))
    asked = [
        request("plain"),
        request("stops", seed=1, stop_ids=(3, 4, 5), min_tokens=89),
        request("penalties", seed=2, frequency_penalty=0.5, repetition_penalty=1.2),
        request("logprobs", seed=3, logprobs=2, prompt_logprobs=1),
    ]
    for one in asked:
        go_on(replica, one, done)
    replica.add("new", tokens(70, seed=9), max_tokens=30)
    replica.run()
    replica.check_tokens()
    assert set(replica.finish.values()) == {"length"}
    for one in asked:
        at = done
        for output in replica.outputs[one.request_id]:
            assert output.at == at
            at += len(output.tokens)
        assert at == 90
    admissions = [admission for plan in replica.plans for admission in plan.admissions][:4]
    assert [admission.generated for admission in admissions] == [done] * 4
    assert len(admissions[2].history) == 100 + done
    logprobs = [entry for output in replica.outputs["logprobs"] for entry in output.logprobs]
    assert len(logprobs) == 90 - done


def test_prompts_are_scored_counted_and_charged_once() -> None:
    replica = Replica(config(vocab_size=40))
    go_on(replica, request("begun", prompt_logprobs=0), 5, key="k")
    replica.run()
    replica.check_tokens()
    assert not any(row.scored for plan in replica.plans for row in plan.prefill)
    outputs = replica.outputs["begun"]
    assert [(output.prompt, output.cached_tokens, output.queued) for output in outputs] == [(None, 0, 0.0)] * len(
        outputs
    )
    charges = replica.scheduler.charges()
    assert charges is not None
    assert [(charge.key, charge.tokens) for charge in charges.items] == [("k", 85)]
    stats = replica.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (0, 0, 85)


def test_one_without_a_token_yet_is_scored_and_says_how_long_it_waited_in_all() -> None:
    replica = Replica(config(vocab_size=40))
    replica.scheduler._clock = lambda: 100.0
    go_on(replica, request("waited", prompt_logprobs=0), 0, age_s=7.5)
    replica.run()
    first, *others = replica.outputs["waited"]
    assert isinstance(first.prompt, Scores)
    assert first.prompt.count == 99
    assert first.queued == 7.5
    assert {output.queued for output in others} == {0.0}
    assert replica.scheduler.stats().prompt_tokens == 100


def test_they_pass_the_limit_of_the_queue_which_others_do_not() -> None:
    replica = Replica(config(slots=1, queue_limit=1))
    for number in range(4):
        go_on(replica, request(f"begun {number}", 10, max_tokens=5), number % 2)
    refusal = replica.add("new", tokens(10), max_tokens=5)
    assert refusal is not None
    assert refusal.overloaded
    replica.run()
    replica.check_tokens()
    assert len(replica.finish) == 4


def test_they_keep_their_age() -> None:
    """Other requests of the replica are older or younger, and they come in whatever order."""
    now = [100.0]
    replica = Replica(config(slots=1))
    replica.scheduler = Scheduler(replica.config, lambda: now[0])
    replica.add("runs", tokens(10), max_tokens=2)
    replica.step()
    replica.add("own 1", tokens(10, 1), max_tokens=2)
    now[0] += 10.0
    replica.add("own 2", tokens(10, 2), max_tokens=2)
    now[0] += 10.0
    go_on(replica, request("begun 3", 10, seed=3, max_tokens=2), 1, age_s=5.0)
    go_on(replica, request("begun 1", 10, seed=4, max_tokens=2), 1, age_s=30.0)
    go_on(replica, request("begun 2", 10, seed=5, max_tokens=2), 0, age_s=15.0)
    replica.run()
    assert list(replica.finish) == ["runs", "begun 1", "own 1", "begun 2", "own 2", "begun 3"]
    replica.check_tokens()


def test_who_was_served_before_gives_its_place_to_nobody() -> None:
    """The queue of its key does not matter; one of which nothing came yet has no more right than any other."""
    replica = Replica(config(slots=1, queue_limit=2))
    replica.add("runs", tokens(10), max_tokens=50, key="loud")
    replica.step()
    for number in range(3):
        go_on(replica, request(f"begun {number}", 10, max_tokens=5), 2, key="loud")
    refusal = replica.add("new", tokens(10), max_tokens=5, key="quiet")
    assert refusal is not None
    assert refusal.request_id == "new"
    go_on(replica, request("not begun", 10, max_tokens=5), 0, key="loud")
    assert replica.add("new", tokens(10), max_tokens=5, key="quiet") is None
    assert replica.finish == {"not begun": "gave way"}


@pytest.mark.parametrize(
    ("done", "why"),
    [
        (pack_tokens([1] * 6), "of 6 tokens to generate all were generated before"),
        (pack_tokens([1, 40]), "a token that was generated before has an id outside 0 ... 39: 40"),
        (b"\0\0\0", "3 bytes of tokens that were generated before are no whole number of ids"),
    ],
)
def test_what_cannot_go_on_is_refused(done: bytes, why: str) -> None:
    scheduler = Scheduler(config(vocab_size=40))
    refusal = scheduler.add(Request("a", (1, 2), SamplingParams(6), done=done, age_s=0.0))
    assert refusal is not None
    assert why in refusal.refused
    assert scheduler.idle


def test_choices_travel_together_each_with_what_is_done_of_it() -> None:
    prompt, sampling = Prompt.of((1, 2, 3)), SamplingParams(9)
    asked = [Request(str(n), prompt, sampling, done=pack_tokens([7] * n), age_s=float(n)) for n in range(3)]
    assert [(one.request_id, one.done, one.age_s) for one in Requests.of(asked).unpack()] == [
        (one.request_id, one.done, one.age_s) for one in asked
    ]
    [new] = Requests.of([Request("new", prompt, sampling)]).unpack()
    assert (new.done, new.age_s, new.salt) == (b"", None, b"")
    salted = [Request(str(n), prompt, sampling, salt=b"salt") for n in range(2)]
    assert [one.salt for one in Requests.of(salted).unpack()] == [b"salt"] * 2


def test_what_is_done_counts_among_what_an_iteration_takes_in() -> None:
    box = Inbox(None)  # type: ignore[arg-type]
    prompt = Prompt.of((1, 2, 3))
    few, many = (Request("a", prompt, SamplingParams(9), done=bytes(4 * count), age_s=0.0) for count in (0, 5000))
    assert box._cost(many) - (box._cost(few) + 3) == 5000


def test_arrival_numbers_follow_time_and_never_repeat() -> None:
    now = [5.0]
    arrivals = Arrivals(lambda: now[0])
    numbers = [arrivals.number() for _ in range(3)]
    now[0] += 1e-5
    numbers += [arrivals.number(), arrivals.number(now[0]), arrivals.number(now[0] + 1.0)]
    assert numbers == sorted(set(numbers))
    assert arrivals.number(4.0) < numbers[0]
    assert arrivals.number(-4.0) < 0
