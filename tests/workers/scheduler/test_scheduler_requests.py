"""Requests that come, are refused, are cancelled, or lose their pages."""

from __future__ import annotations

import weakref
from typing import Any, get_type_hints

import pytest
from replica import Replica
from workload import config, tokens

from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import TABLE, Prompt
from workers.scheduler import Scheduler, max_pages_per_row


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ((), {}, "the prompt is empty"),
        ((1,) * 1000, {}, "prompt of 1000 tokens leaves no room for output in a context of 1000"),
        ((1,), {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ((1,), {"max_tokens": -5}, "max_tokens must be at least 1, not -5"),
        ((1, -1), {}, "the prompt has a token id outside 0 ... 499: -1"),
        ((1, 500), {}, "the prompt has a token id outside 0 ... 499: 500"),
        ((1, 2**63), {}, "the prompt has a token id outside 0 ... 499: 9223372036854775808"),
        ((1,), {"min_tokens": -1}, "min_tokens must be between 0 and the context of 1000, not -1"),
        ((1,), {"min_tokens": 2**63}, "min_tokens must be between 0 and the context of 1000, not 92233"),
        ((1,), {"min_tokens": 1, "stop_ids": tuple(range(65))}, "65 stop ids: together with min_tokens at most 64"),
        ((1,), {"logit_bias": ((1, 0.5),) * 2049}, "logit_bias names 2049 tokens: at most 2048 are supported"),
        ((1,), {"logit_bias": ((500, 0.5),)}, "logit_bias names a token id outside 0 ... 499: 500"),
        ((1,), {"logit_bias": ((-1, 0.5),)}, "logit_bias names a token id outside 0 ... 499: -1"),
        ((1,), {"top_k": -1}, "top_k must be between 0 and 2^31 - 1, not -1"),
        ((1,), {"top_k": 2**63}, "top_k must be between 0"),
        ((1,), {"logprobs": 501}, "logprobs must be between -1 and the 500 tokens there are, not 501"),
        ((1,), {"logprobs": -2}, "logprobs must be between -1"),
        ((1,), {"logprob_token_ids": (3,)}, "1 logprob_token_ids: with logprobs at most 128, without them none"),
        ((1,), {"logprobs": 0, "logprob_token_ids": (3,) * 129}, "129 logprob_token_ids: with logprobs at most 128"),
        ((1,), {"logprobs": 0, "logprob_token_ids": (500,)}, "logprob_token_ids has a token id outside 0 ... 499: 500"),
        ((1,), {"temperature": -0.1}, "temperature must be between 0 and 100, not -0.1"),
        ((1,), {"temperature": float("nan")}, "temperature must be between 0 and 100, not nan"),
        ((1,), {"top_p": 1.5}, "top_p must be between 0 and 1, not 1.5"),
        ((1,), {"min_p": -0.5}, "min_p must be between 0 and 1, not -0.5"),
        ((1,), {"presence_penalty": float("inf")}, "presence_penalty must be between -100 and 100, not inf"),
        ((1,), {"frequency_penalty": -101.0}, "frequency_penalty must be between -100 and 100, not -101"),
        ((1,), {"repetition_penalty": 1e-45}, "repetition_penalty must be between 0.01 and 100, not 1e-45"),
        (
            (1,),
            {"logit_bias": ((7, float("-inf")),)},
            "logit_bias of token 7 must be between -10000 and 10000, not -inf",
        ),
        ((1,), {"logit_bias": ((7, 10001.0),)}, "logit_bias of token 7 must be between -10000 and 10000, not 10001"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(
    prompt: tuple[int, ...], sampling: dict[str, Any], reason: str
) -> None:
    scheduler = Scheduler(config(vocab_size=500))
    refusal = scheduler.add(Request("a", prompt, SamplingParams(**({"max_tokens": 1} | sampling))))
    assert refusal is not None
    assert reason in refusal.refused
    assert not refusal.overloaded
    assert scheduler.idle
    assert scheduler.cancel("a") == ()


def test_every_real_parameter_has_a_range() -> None:
    assert {row.name for row in TABLE if row.kind is float} == {
        name for name, kind in get_type_hints(SamplingParams).items() if kind is float
    }


def test_what_is_just_possible_is_taken() -> None:
    scheduler = Scheduler(config(vocab_size=500))
    prompt = (*([499] * 998), 0)
    sampling = SamplingParams(
        max_tokens=2**63,
        min_tokens=1000,
        stop_ids=(*range(64), *range(64)),
        logit_bias=((499, 1.0),) * 2048,
        logprobs=500,
        top_k=500,
        seed=2**64 - 1,
        temperature=100.0,
        presence_penalty=-100.0,
        frequency_penalty=100.0,
        repetition_penalty=0.01,
    )
    assert scheduler.add(Request("a", prompt, sampling)) is None
    assert scheduler.add(Request("b", (1,), SamplingParams(max_tokens=1, stop_ids=tuple(range(65))))) is None


def test_a_request_that_never_fits_the_pool_is_refused() -> None:
    replica = Replica(config(pages=5, max_context=1000))
    refusal = replica.add("a", tokens(100), max_tokens=800)
    assert "100 prompt tokens and 800 to generate need 15 pages of cache, and there are 4" in refusal.refused
    assert not replica.add("b", tokens(100), max_tokens=100)
    replica.run()
    replica.check_tokens()


def test_a_request_that_just_fits_the_pool_runs() -> None:
    for width in (1, 2, 4):
        settings = config(pages=5, width=width)
        most = 100
        while settings.pages_at_most(most + 1) <= 4:
            most += 1
        replica = Replica(settings, agree=1.0)
        assert replica.add("more", tokens(50), max_tokens=most - 49)
        assert not replica.add("fits", tokens(50), max_tokens=most - 50)
        replica.run()
        replica.check_tokens()
        assert replica.scheduler.stats().preemptions == 0


def test_a_pool_of_two_pages_serves() -> None:
    replica = Replica(config(pages=2, max_context=32))
    for name in "abc":
        assert not replica.add(name, tokens(10, seed=ord(name)), max_tokens=1000)
    replica.run()
    replica.check_tokens()


def test_the_queue_has_a_limit_beyond_the_slots() -> None:
    replica = Replica(config(slots=2, queue_limit=3))
    refusals = [replica.add(str(i), tokens(5, seed=i), max_tokens=3) for i in range(6)]
    assert refusals[:5] == [None] * 5
    assert refusals[5].overloaded
    replica.plan()
    assert replica.add("6", tokens(5), max_tokens=3).overloaded
    replica.run()
    assert replica.add("7", tokens(5), max_tokens=3) is None
    replica.run()
    assert len(replica.finish) == 6
    assert replica.scheduler.stats().queue_limit == 3


def test_a_full_replica_takes_one_more_the_moment_one_ends() -> None:
    # Its slot is still held by a step in flight: the front, which counts requests, must not be contradicted.
    replica = Replica(config(slots=1, queue_limit=0))
    assert not replica.add("a", tokens(5), max_tokens=50)
    while not replica.tokens["a"]:
        replica.step()
    replica.plan()
    assert replica.add("b", tokens(5), max_tokens=3).overloaded
    replica.cancel("a")
    assert not replica.add("b", tokens(5), max_tokens=3)
    replica.run()


def test_a_live_id_is_refused_and_a_finished_one_may_come_again() -> None:
    replica = Replica(config())
    replica.add("a", tokens(5), max_tokens=3)
    refusal = replica.add("a", tokens(6), max_tokens=3)
    assert "in use" in refusal.refused
    assert not refusal.overloaded
    replica.run()
    first = replica.tokens["a"]
    del replica.finish["a"]
    assert replica.add("a", tokens(5), max_tokens=3) is None
    replica.run()
    assert replica.tokens["a"] == first


def test_cancelled_while_waiting() -> None:
    replica = Replica(config(slots=1))
    for name in "abc":
        replica.add(name, tokens(10, seed=ord(name)), max_tokens=5)
    replica.step()
    replica.cancel("b")
    assert replica.finish == {"b": "cancelled"}
    assert replica.scheduler.stats().waiting == 1
    replica.run()
    assert (replica.tokens["b"], replica.finish["a"], replica.finish["c"]) == ([], "length", "length")
    replica.check_tokens()


def test_nothing_is_kept_of_who_leaves_the_queue() -> None:
    """Clients that give up and try again would fill the memory otherwise, as long as somebody waits before them."""
    scheduler = Scheduler(config(slots=1, queue_limit=2))
    scheduler.add(Request("runs", tokens(10), SamplingParams(max_tokens=500)))
    scheduler.plan()
    scheduler.add(Request("waits", tokens(10), SamplingParams(max_tokens=500)))
    left = []
    for attempt in range(1000):
        prompt = Prompt.of(tokens(70, seed=attempt))
        left.append(weakref.ref(prompt))
        assert not scheduler.add(Request(str(attempt), prompt, SamplingParams(max_tokens=5)))
        del prompt
        assert left[-1]() is not None
        scheduler.cancel(str(attempt))
    assert not any(ref() for ref in left)
    assert [one.request.request_id for one in scheduler._rows.queue] == ["waits"]


@pytest.mark.parametrize("steps", range(8))
def test_cancelled_while_running(steps: int) -> None:
    replica = Replica(config(slots=1), agree=0.3)
    replica.add("a", tokens(150), max_tokens=50)
    for _ in range(steps):
        replica.step()
    replica.plan()
    known = len(replica.plans)
    replica.cancel("a")
    assert replica.finish == {"a": "cancelled"}
    assert replica.scheduler.stats().pages_free == 99, "its pages are free at once"
    replica.add("a", tokens(20, seed=1), max_tokens=5)  # the same id, while steps of the cancelled one are in flight
    del replica.finish["a"]
    replica.run()
    assert replica.finish == {"a": "length"}
    assert all(not plan.decode_slots or plan.admissions == () for plan in replica.plans[known:])
    replica.check_tokens()
    replica.check_rest()


def test_pages_running_out_preempt_the_latest_arrival_of_the_lowest_priority() -> None:
    replica = Replica(config(pages=max_pages_per_row(500, 3) + 4, max_context=500), agree=0.5)
    for name, priority in (("first", 0), ("lowest", 1), ("last", 0)):
        replica.add(name, tokens(60, seed=len(name)), priority, max_tokens=400)
    slots = {}
    while not replica.scheduler.stats().preemptions:
        replica.step()
        for plan in replica.plans[-2:]:
            slots |= {admission.slot: len(slots) for admission in plan.admissions if admission.slot not in slots}
    waiting = [name for name, s in replica.scheduler._live.items() if s.phase.name == "WAITING"]
    assert waiting == ["lowest"]
    replica.run()
    replica.check_tokens()
    assert list(replica.finish)[-1] == "lowest"
    assert next(iter(replica.finish)) == "first"


@pytest.mark.parametrize(("spare", "admitted"), [(0, 1), (1, 2)])
def test_a_newcomer_leaves_a_page_for_the_growth_of_each_running_row(spare: int, admitted: int) -> None:
    # Both prompts and their drafts fill two pages each.
    replica = Replica(config(pages=1 + 4 + spare, max_context=150, token_budget=500))
    for name in "ab":
        replica.add(name, tokens(110, seed=ord(name)), max_tokens=10)
    plan = replica.plan()
    assert plan is not None
    assert len(plan.admissions) == admitted
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().preemptions == 0


def test_the_last_page_goes_to_the_more_urgent_row_whatever_their_slots() -> None:
    # Both need a second page in one plan. Granted to the other first, it would be taken back in that same plan.
    replica = Replica(config(pages=1 + 3, max_context=120, width=1))
    replica.add("late", tokens(60), priority=1, max_tokens=20)
    replica.plan()
    replica.add("urgent", tokens(61, seed=1), priority=0, max_tokens=20)
    replica.run()
    replica.check_tokens()
    assert replica.scheduler.stats().preemptions == 1
    assert list(replica.finish) == ["urgent", "late"]


def test_pages_of_a_preempted_request_go_to_nobody_behind_it() -> None:
    # When b loses its pages a step of it is in flight: it is not in the queue yet, and c alone is.
    replica = Replica(config(pages=9, max_context=500, slots=3), agree=0.5)
    replica.add("a", tokens(100), max_tokens=300)
    replica.add("b", tokens(100, seed=1), max_tokens=300)
    while replica.scheduler.stats().pages_free > 2:
        replica.step()
    replica.add("c", tokens(10, seed=2), max_tokens=5)
    replica.run()
    replica.check_tokens()
    admitted = [admission for plan in replica.plans for admission in plan.admissions]
    assert [bool(admission.generated) for admission in admitted] == [False, False, True, False]


def test_a_preempted_request_resumes_with_what_it_generated() -> None:
    replica = Replica(config(pages=12, max_context=500, slots=2), agree=0.5)
    replica.add("a", tokens(100), max_tokens=380)
    replica.add("b", tokens(100, seed=1), max_tokens=380, frequency_penalty=0.1)
    replica.run()
    replica.check_tokens()
    resumed = [admission for plan in replica.plans for admission in plan.admissions if admission.generated]
    assert len(resumed) >= 1
    assert all(len(a.history) == 100 + a.generated for a in resumed if a.sampling.has_penalties)
    stats = replica.scheduler.stats()
    assert stats.preemptions == len(resumed)
    assert (stats.prompt_tokens, stats.generated_tokens) == (200, 760), "recomputed tokens are not counted again"


def test_a_preempted_request_goes_before_later_arrivals() -> None:
    replica = Replica(config(pages=12, max_context=500, slots=2), agree=0.5)
    for i, name in enumerate("abcd"):
        replica.add(name, tokens(100, seed=i), max_tokens=380)
    replica.run()
    assert replica.scheduler.stats().preemptions
    assert list(replica.finish) == ["a", "b", "c", "d"]
    replica.check_tokens()


def test_cancelled_between_preemption_and_resumption() -> None:
    seen = set()
    for extra in range(6):
        replica = Replica(config(pages=12, max_context=500, slots=2, pipeline=3), agree=0.5)
        replica.add("a", tokens(100), max_tokens=380)
        replica.add("b", tokens(100, seed=1), max_tokens=380)
        while all(s.phase.name != "PREEMPTED" for s in replica.scheduler._live.values()):
            replica.plan() or replica.apply()
        for _ in range(extra):
            replica.launched and replica.apply()
        seen.add(replica.scheduler._live["b"].phase.name)
        replica.cancel("b")
        replica.run()
        assert replica.finish == {"a": "length", "b": "cancelled"}
        replica.check_tokens()
        replica.check_rest()
    assert seen >= {"PREEMPTED", "WAITING"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"width": 0},
        {"pages": 1},
        {"max_context": 1},
        {"queue_limit": -1},
        {"pipeline": 0},
        {"prefix_sample": -1},
        {"tier_sample": -1},
        {"token_budget": 12},
    ],
)
def test_wrong_settings_raise(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        config(**wrong)
