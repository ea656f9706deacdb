"""Contents of a step: order, budget, widths, ends of requests. M6, M7, M8, M10 and M12 of the known traps are here."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from replica import Replica
from simulated_worker import VOCAB, alone
from workload import config, tokens

from workers.protocol.messages import STEP_BUCKETS, Request
from workers.protocol.plan import DecodeBuckets, SamplingParams, StepPlan, StepResult
from workers.protocol.report import StepTime
from workers.protocol.request import pack_tokens
from workers.scheduler import Scheduler, max_entries_per_row, max_pages_per_row


def test_a_prompt_is_cut_into_chunks_of_the_budget() -> None:
    replica = Replica(config())
    replica.add("a", tokens(150), max_tokens=4)
    replica.run()
    rows = [plan.prefill[0] for plan in replica.plans if plan.prefill]
    assert [(row.start, len(row.tokens)) for row in rows] == [(0, 64), (64, 64), (128, 22)]
    assert [row.final for row in rows] == [False, False, True]
    assert [row.next_token for row in rows] == [tokens(150)[64], tokens(150)[128], -1]
    assert replica.finish == {"a": "length"}
    replica.check_tokens()


def test_several_prompts_share_a_step_in_arrival_order() -> None:
    replica = Replica(config())
    for name, size in (("z", 20), ("a", 30), ("m", 40)):
        replica.add(name, tokens(size, seed=size), max_tokens=4)
    plan = replica.plan()
    assert plan is not None
    assert [(row.slot, len(row.tokens)) for row in plan.prefill] == [(0, 20), (1, 30), (2, 14)]
    assert [row.final for row in plan.prefill] == [True, True, False]
    replica.run()
    replica.check_tokens()


def test_a_last_chunk_of_one_token_is_a_prefill_row() -> None:  # M6
    replica = Replica(config())
    replica.add("a", tokens(65), max_tokens=4)
    replica.plan()
    second = replica.plan()
    replica.apply()
    third = replica.plan()
    assert second is not None
    assert third is not None
    assert (second.decode_slots, len(second.prefill), second.prefill[0].tokens) == ((), 1, (tokens(65)[64],))
    assert second.prefill[0].final
    assert second.layout.sampled_rows == second.layout.logits_rows == 1
    assert (third.decode_slots, third.prefill) == ((0,), ())


@pytest.mark.parametrize("seed", range(5))
def test_request_ids_never_influence_a_plan(seed: int) -> None:  # M7
    rng = random.Random(seed)
    work = [(tokens(rng.choice([5, 70, 300]), seed=i), rng.choice([0, 0, 1]), rng.choice([3, 40])) for i in range(12)]
    names = [f"{i:02d}" for i in range(12)]

    def plans_of(names: list[str]) -> list[object]:
        replica = Replica(config(pages=24, max_context=400), seed=seed)
        for name, (prompt, priority, most) in zip(names, work, strict=True):
            assert not replica.add(name, prompt, priority, max_tokens=most)
            replica.step()
        replica.run()
        return list(replica.plans)

    usual = plans_of(names)
    assert plans_of(names[::-1]) == usual
    rng.shuffle(names)
    assert plans_of(names) == usual


def test_a_long_prompt_starves_no_decode_row_and_is_not_starved() -> None:  # M7
    replica = Replica(config(slots=4, token_budget=13), agree=0.5)
    for name in ("d", "c", "b"):
        replica.add(name, tokens(4, seed=ord(name)), max_tokens=300)
    for _ in range(4):
        replica.step()
    replica.add("a", tokens(200), max_tokens=5)
    start = len(replica.plans)
    while not replica.tokens["a"]:
        replica.step()
    during = [plan for plan in replica.plans[start:] if plan.prefill]
    assert all(plan.decode_slots == (0, 1, 2) for plan in during)
    assert all(plan.layout.tokens == 13 for plan in during[:-1])
    assert len(during) == 200 // (13 - 3 * 3)
    replica.run()
    replica.check_tokens()


def test_decode_rows_leave_prefill_its_share_even_when_all_slots_but_one_decode() -> None:
    with pytest.raises(ValueError, match="give at least 13"):
        config(token_budget=12)


def test_mixed_steps_keep_the_full_width() -> None:  # M8
    replica = Replica(config(), agree=1.0)
    replica.add("a", tokens(10), max_tokens=200)
    for _ in range(3):
        replica.step()
    replica.add("b", tokens(300, seed=1), max_tokens=20)
    replica.run()
    mixed = [plan for plan in replica.plans if plan.decode_slots and plan.prefill]
    assert len(mixed) > 3
    assert {(plan.width, plan.drafts) for plan in replica.plans} == {(3, 2)}
    assert replica.scheduler.stats().step_seconds["mixed"].count == len(mixed)
    replica.check_tokens()


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_overshoot_stays_in_pages_of_the_row(width: int, pipeline: int) -> None:  # M10
    # The context ends on every offset in a page; the simulated worker refuses writes to pages the row does not have.
    overshoot = []
    for max_context in range(64, 64 + 67, 3):
        settings = config(max_context=max_context, width=width, pipeline=pipeline, pages=2 + max_context // 8, slots=3)
        replica = Replica(settings, agree=1.0)
        for name in range(3):
            replica.add(str(name), tokens(max_context - 20 - 7 * name, seed=name), max_tokens=10_000)
        replica.run()
        replica.check_tokens()
        assert set(replica.finish.values()) == {"length"}
        bound = max_entries_per_row(max_context, width, pipeline)
        assert replica.worker.highest_entry < bound
        overshoot.append(bound - 1 - replica.worker.highest_entry)
        assert max(state.granted for state in replica.worker.slots) <= max_pages_per_row(max_context, width, pipeline)
    assert min(overshoot) == 0, "the bound is the least one"


def test_a_stop_ends_the_row_while_another_step_of_it_is_in_flight() -> None:  # M10
    for seed in range(20):
        replica = Replica(config(slots=1, pages=max_pages_per_row(100, 3) + 1, max_context=100), agree=0.9, seed=seed)
        replica.add("a", tokens(60, seed), max_tokens=1000, stop_ids=tuple(range(0, VOCAB, 4)))
        replica.add("b", tokens(60, seed + 100), max_tokens=5)
        while "a" not in replica.finish:
            replica.step()
            replica.check_pages()
        replica.run()
        replica.check_tokens()
        replica.check_rest()


def test_tokens_are_cut_at_the_first_stop_inside_the_draft_window() -> None:  # M12
    seen = set()
    for seed in range(40):
        replica = Replica(config(width=4), agree=1.0, seed=seed)
        prompt = tokens(5, seed)
        stops = (3, 17, 30, 31)
        replica.add("a", prompt, max_tokens=500, stop_ids=stops)
        replica.run()
        replica.check_tokens()
        assert replica.finish["a"] == "stop"
        assert [token for token in replica.tokens["a"] if token in stops] == [replica.tokens["a"][-1]]
        last = replica.outputs["a"][-1].tokens
        seen.add(len(last))
        stats = replica.scheduler.stats()
        assert stats.generated_tokens == len(replica.tokens["a"])
        # All drafts agree, so every kept token is a draft but the first token and the last of each full window.
        windows = [len(output.tokens) for output in replica.outputs["a"][1:]]
        assert stats.drafts_accepted == sum(min(size, 3) for size in windows)
        assert stats.drafts_offered == 3 * len(windows)
        assert [output.offered for output in replica.outputs["a"]] == [0, *[3] * len(windows)]
    assert seen == {1, 2, 3, 4}


def test_no_stop_counts_before_min_tokens() -> None:
    scheduler = Scheduler(config(width=4))
    scheduler.add(Request("a", (1, 2), SamplingParams(max_tokens=20, stop_ids=(7,), min_tokens=3)))
    scheduler.plan()
    scheduler.plan()
    assert scheduler.apply(StepResult(1, ((7,),), 0.0))[0].tokens == (7,)
    (output,) = scheduler.apply(StepResult(2, ((7, 7, 7, 8),), 0.0))
    assert (output.tokens, output.finish) == ((7, 7, 7), "stop")


def test_a_row_whose_end_is_certain_is_not_planned_again() -> None:
    for most in (1, 2, 5):
        replica = Replica(config(width=1), agree=0.0)
        replica.add("a", tokens(5), max_tokens=most)
        replica.run()
        assert len(replica.plans) == most


def test_priority_goes_before_arrival_also_within_a_step() -> None:
    replica = Replica(config(slots=2))
    for name, priority in (("low", 5), ("middle", 0), ("high", -1), ("middle2", 0)):
        replica.add(name, tokens(100, seed=priority), priority, max_tokens=2)
    replica.run()
    assert list(replica.finish) == ["high", "middle", "middle2", "low"]


def test_a_more_urgent_prompt_takes_the_budget_of_one_that_is_running() -> None:
    replica = Replica(config())
    replica.add("usual", tokens(300), max_tokens=2)
    replica.plan()
    replica.add("urgent", tokens(100, seed=1), -1, max_tokens=2)
    plan = replica.plan()
    assert plan is not None
    assert [(row.slot, len(row.tokens)) for row in plan.prefill] == [(1, 64)]
    replica.run()
    assert list(replica.finish) == ["urgent", "usual"]


def test_a_slot_is_not_reused_while_a_step_in_flight_has_it() -> None:
    replica = Replica(config(slots=1), agree=0.5)
    replica.add("a", tokens(10), max_tokens=50, stop_ids=tuple(range(0, VOCAB, 2)))
    replica.add("b", tokens(10, seed=1), max_tokens=2)
    while "a" not in replica.finish:
        replica.step()
    if replica.launched:
        assert replica.plan() is None
        replica.apply()
    plan = replica.plan()
    assert plan is not None
    assert [admission.slot for admission in plan.admissions] == [0]
    replica.run()
    replica.check_tokens()


def test_log_probabilities_are_trimmed_to_what_each_request_asked_for() -> None:
    replica = Replica(config())
    replica.add("none", tokens(5), max_tokens=7)
    replica.add("chosen", tokens(5, seed=1), max_tokens=7, logprobs=0)
    replica.add("three", tokens(5, seed=2), max_tokens=7, logprobs=3)
    replica.add("one", tokens(5, seed=3), max_tokens=30, logprobs=1)
    replica.run()
    for name, ids in (("none", None), ("chosen", 0), ("three", 3), ("one", 1)):
        for output in replica.outputs[name]:
            if ids is None:
                assert output.logprobs == ()
            else:
                assert [entry.chosen for entry in output.logprobs] == [-float(token) for token in output.tokens]
                assert all(len(entry.ids) == len(entry.logprobs) == ids for entry in output.logprobs)
    asked = [plan.logprobs for plan in replica.plans]
    assert asked[0] == 3
    assert asked[-1] == 1
    replica.check_tokens()


def test_log_probabilities_end_with_the_tokens() -> None:
    cut = 0
    for seed in range(10):
        replica = Replica(config(width=4), agree=1.0)
        replica.add("a", tokens(5, seed), max_tokens=200, stop_ids=(1, 2, 3), logprobs=1)
        replica.run()
        for output in replica.outputs["a"]:
            assert [entry.chosen for entry in output.logprobs] == [-float(token) for token in output.tokens]
        cut += len(replica.outputs["a"][-1].tokens) < 4
    assert cut


def test_an_unasked_log_probability_costs_nothing() -> None:
    replica = Replica(config())
    replica.add("long", tokens(200), max_tokens=2, logprobs=5)
    replica.run()
    assert [plan.logprobs for plan in replica.plans] == [-1, -1, -1, 5, 5][: len(replica.plans)]


def test_the_history_of_a_request_travels_only_when_penalties_need_it() -> None:
    replica = Replica(config())
    replica.add("plain", tokens(5), max_tokens=2)
    replica.add("penal", tokens(6), max_tokens=2, repetition_penalty=1.2)
    plan = replica.plan()
    assert plan is not None
    assert [admission.history for admission in plan.admissions] == [(), tuple(tokens(6))]


def test_all_tokens_of_a_request_travel_only_when_a_drafter_reads_them() -> None:
    for reads in (False, True):
        replica = Replica(config(reads_tokens=reads))
        replica.add("a", tokens(5), max_tokens=2)
        plan = replica.plan()
        assert plan is not None
        assert [admission.tokens for admission in plan.admissions] == [pack_tokens(tokens(5)) if reads else b""]


def test_at_most_two_plans_are_in_flight() -> None:
    replica = Replica(config())
    replica.add("a", tokens(10), max_tokens=10)
    assert replica.plan()
    assert replica.plan()
    assert replica.scheduler.plan() is None
    replica.apply()
    assert replica.plan()


def test_results_out_of_order_or_of_another_shape_raise() -> None:
    scheduler = Scheduler(config())
    with pytest.raises(RuntimeError, match="no step is in flight"):
        scheduler.apply(StepResult(1, (), 0.0))
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=9, logprobs=0)))
    scheduler.plan()
    scheduler.plan()
    for result, message in (
        (StepResult(2, ((1,),), 0.0), "step 1 is the oldest"),
        (StepResult(1, (), 0.0), "sampled 1 rows, its result has 0"),
        (StepResult(1, ((),), 0.0), "gave sampled row 0"),
        (StepResult(1, ((1, 2),), 0.0), "gave sampled row 0"),
        (StepResult(1, ((-1,),), 0.0), "gave sampled row 0"),
        (StepResult(1, ((1,),), 0.0), "one log-probability"),
    ):
        with pytest.raises(RuntimeError, match=message):
            scheduler.apply(result)


def adaptive(agree: float, tokens_of: int = 300) -> Replica:
    """A replica that has served a request whose drafts are accepted with this probability; steps cost their widths."""
    times = tuple(StepTime(1, width, 0.001 + 0.0005 * (width - 1)) for width in (1, 2, 3))
    replica = Replica(config(adaptive=True, step_times=times, max_context=2000, pages=200), agree=agree)
    plain = replica.worker.execute

    def execute(plan: StepPlan) -> StepResult:
        """Takes as long as was measured: else it would be learnt that drafts cost nothing."""
        return replace(plain(plan), duration=times[plan.width - 1].seconds)

    replica.worker.execute = execute  # type: ignore[method-assign]
    replica.add("a", tokens(10), max_tokens=tokens_of)
    replica.run()
    replica.check_tokens()
    return replica


def test_steps_feed_fewer_tokens_when_drafts_do_not_pay_and_more_when_they_do() -> None:
    replica = adaptive(0.0, 600)
    assert replica.scheduler.stats().width == 1
    widths = [plan.width for plan in replica.plans]
    assert widths.count(1) > 0.85 * len(widths), "some steps try what one draft would give"
    assert 2 in widths[100:]
    assert {(plan.width, plan.drafts) for plan in replica.plans} <= set(DecodeBuckets(4, 3, adaptive=True).modes())
    replica.worker.agree = 1.0
    replica.add("b", tokens(10), max_tokens=1500)
    replica.run()
    replica.check_tokens()
    stats = replica.scheduler.stats()
    assert stats.width == 3
    assert replica.plans[-1].width == 3
    assert len(stats.acceptance) == 2
    assert min(stats.acceptance) > 0.8


def test_a_fixed_width_stays_whatever_is_accepted() -> None:
    replica = Replica(config(), agree=0.0)
    replica.add("a", tokens(10), max_tokens=100)
    replica.run()
    stats = replica.scheduler.stats()
    assert stats.drafts_offered > 100 > 20 * stats.drafts_accepted, "in most steps not one was accepted"
    assert {(plan.width, plan.drafts) for plan in replica.plans} == {(3, 2)}


def test_good_drafts_are_kept() -> None:
    stats = adaptive(0.95).scheduler.stats()
    assert stats.width == 3
    assert stats.drafts_accepted > 0.8 * stats.drafts_offered


def test_statistics_count_what_happened() -> None:
    replica = Replica(config(), agree=0.5)
    prompt = tokens(150)
    replica.add("a", prompt, max_tokens=20)
    stats = replica.scheduler.stats()
    assert (stats.waiting, stats.running, stats.prefill_backlog) == (1, 0, 150)
    replica.plan()
    stats = replica.scheduler.stats()
    assert (stats.waiting, stats.running, stats.prefill_backlog, stats.slots) == (0, 1, 86, 4)
    assert stats.pages_free == stats.pages_total - 3 == 96
    replica.run()
    stats = replica.scheduler.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens, stats.preemptions) == (150, 20, 0, 0)
    steps = len(replica.plans)
    assert stats.drafts_offered >= 2 * (steps - 4)
    seconds = stats.step_seconds
    assert {kind: part.count for kind, part in seconds.items()} == {"decode": steps - 3, "prefill": 3, "mixed": 0}
    # A step of the simulated worker takes a millisecond, which the first bucket holds.
    assert all(part.counts[0] == part.count for part in seconds.values())
    assert sum(part.total for part in seconds.values()) == pytest.approx(0.001 * steps)


def test_steps_are_counted_by_kind_and_size() -> None:
    replica = Replica(config(token_budget=200, prefix_cache=False), agree=0.5)
    for name in "abc":
        replica.add(name, tokens(130, seed=ord(name)), max_tokens=20)
    replica.run()
    stats = replica.scheduler.stats()
    shapes = [(len(plan.decode_slots), sum(len(row.tokens) for row in plan.prefill)) for plan in replica.plans]
    for field, column in (("step_decode_rows", 0), ("step_prefill_tokens", 1)):
        bounds = STEP_BUCKETS[field]
        for kind, part in getattr(stats, field).items():
            mixed = kind == "mixed"
            values = [shape[column] for shape in shapes if shape[column] and (shape[1 - column] > 0) == mixed]
            assert part.total == sum(values)
            assert [sum(part.counts[: i + 1]) for i in range(len(bounds))] == [
                sum(value <= bound for value in values) for bound in bounds
            ]
    assert stats.step_prefill_tokens["prefill"].total + stats.step_prefill_tokens["mixed"].total == 390
    assert stats.step_decode_rows["mixed"].count > 0
    alone_steps = [plan for plan in replica.plans if not plan.prefill]
    assert stats.decode_fed == sum(plan.layout.tokens for plan in alone_steps)
    rows = stats.step_decode_rows["decode"].total
    assert 130 * rows < stats.decode_context < 151 * rows
    contexts = stats.step_context
    assert {kind: part.count for kind, part in contexts.items()} == {
        kind: part.count for kind, part in stats.step_seconds.items()
    }
    assert 130 * contexts["decode"].count < contexts["decode"].total < 151 * contexts["decode"].count
    before = [
        [row.start + at for row in plan.prefill for at in range(len(row.tokens))]
        for plan in replica.plans
        if not plan.decode_slots
    ]
    assert contexts["prefill"].total == pytest.approx(sum(sum(step) / len(step) for step in before))
    least = most = 0.0
    for plan in replica.plans:
        if plan.decode_slots and plan.prefill:
            of_prompts = [row.start + at for row in plan.prefill for at in range(len(row.tokens))]
            fed = plan.width * len(plan.decode_slots)
            least += (sum(of_prompts) + 130 * fed) / (len(of_prompts) + fed)
            most += (sum(of_prompts) + 151 * fed) / (len(of_prompts) + fed)
    assert 0 < least < contexts["mixed"].total < most
    assert alone(replica.requests["a"], 1000)[0] == replica.tokens["a"]
