"""Budget of prompts in a step, by what they are expected to cost."""

from __future__ import annotations

import random

import pytest

from workers.protocol.plan import token_buckets
from workers.scheduler.prompt_budget import FEWEST, PIECE, WORTHWHILE, Costs, PromptBudget, padded

BUDGET = 2048


@pytest.mark.parametrize("buckets", [(), token_buckets(BUDGET)], ids=["exact", "padded"])
def test_prompts_of_one_step_share_its_time(buckets: tuple[int, ...]) -> None:
    """Entries before each of the prompts do not matter for that; and the first tokens of a step are free."""
    rng = random.Random(0)
    for _ in range(400):
        costs = Costs(
            fixed=rng.choice([0.0, 3e-3]),
            each=rng.uniform(1e-6, 2e-5),
            piece=rng.choice([0.0, 1e-3]),
            entry=rng.choice([0.0, 1e-7]),
            deeper=rng.choice([0.0, 1e-9, 5e-8]),
            own={(step, deep): rng.uniform(-0.2, 0.2) for step in buckets for deep in (False, True)},
            counts=rng.choice([float, lambda tokens: max(0.3 * tokens, tokens - 700.0), lambda tokens: 0.0]),
        )
        seconds, beside, generous = rng.uniform(0, 0.05), rng.randrange(1, 200), rng.random() < 0.5
        most = BUDGET - beside
        prompt_budget = PromptBudget(
            most, seconds=seconds, costs=costs, generous=generous, beside=beside, buckets=buckets
        )
        chunks: list[tuple[int, int]] = []

        def took(further: tuple[int, int]) -> float:
            """Return the seconds with one more chunk."""
            every = [*chunks, further]  # noqa: B023
            step = padded(beside + sum(count for _, count in every), buckets)  # noqa: B023
            entries = sum(before for before, _ in every)
            deep = costs.deeper * sum(count * (before + count / 2) for before, count in every)  # noqa: B023
            each = costs.each * (costs.counts(step) - costs.counts(beside))  # noqa: B023
            added = costs.fixed + costs.before(entries) + each + deep  # noqa: B023
            return added * (1 + costs.own.get((step, entries > 0), 0.0))  # noqa: B023

        before = rng.choice([0, rng.randrange(20_000), rng.randrange(150_000)])
        bound = max(seconds, 2 * (costs.fixed + costs.before(before))) if generous else seconds
        while prompt_budget.open and (not chunks or prompt_budget.suits(before, BUDGET)):
            offered = prompt_budget.tokens(before, 2 * BUDGET)
            assert offered > 0
            if took((before, offered)) > bound * (1 + 1e-9):  # the fewest, or a single one
                assert sum(count for _, count in chunks) + offered <= FEWEST or (offered == 1 and chunks)
            count = min(offered, rng.randrange(1, 700))
            prompt_budget.take(before, count)
            chunks.append((before, count))
            before = rng.choice([0, rng.randrange(20_000), rng.randrange(150_000)])
        tokens = sum(count for _, count in chunks)
        assert min(chunks[-1][1], FEWEST) <= tokens <= most
        if (
            tokens <= most - WORTHWHILE and prompt_budget.open
        ):  # another chunk that is worth while takes it past what there is
            assert took((before, WORTHWHILE)) > seconds * (1 - 1e-9)


def test_a_chunk_fills_the_step_that_it_is_padded_to() -> None:
    buckets = token_buckets(BUDGET)
    costs = Costs(fixed=1e-3, each=1e-5, piece=0.0, entry=0.0, deeper=0.0)
    for beside in (1, 33, 100):
        for seconds in (2e-3, 5e-3, 9e-3, 0.015):
            count = PromptBudget(BUDGET - beside, seconds=seconds, costs=costs, beside=beside, buckets=buckets).tokens(
                0, BUDGET
            )
            assert beside + count in buckets
            assert 1e-5 * count <= seconds - 1e-3 < 1e-5 * (padded(beside + count + 1, buckets) - beside)


def test_a_small_prompt_is_in_where_there_is_room_for_it() -> None:
    """The prompt is in also where nothing costs anything, and at the end of the budget."""
    costs = Costs(fixed=0.0, each=1e-3, piece=0.0, entry=0.0, deeper=0.0)
    prompt_budget = PromptBudget(BUDGET, seconds=0.08, costs=costs)
    prompt_budget.take(0, 75)
    assert prompt_budget.suits(0, 5)
    assert not prompt_budget.suits(0, 6)
    prompt_budget.insist()
    assert prompt_budget.suits(0, 6)
    assert prompt_budget.tokens(0, 1000) == FEWEST
    free = PromptBudget(BUDGET)
    free.take(0, BUDGET - 8)
    assert free.suits(70_000, 1000)
    assert free.tokens(70_000, 1000) == 8


def test_pieces_are_those_of_all_prompts_together() -> None:
    costs = Costs(fixed=0.0, each=1e-5, piece=1e-3, entry=0.0, deeper=0.0)
    prompt_budget = PromptBudget(BUDGET, seconds=5e-3, costs=costs)
    for _ in range(4):
        prompt_budget.take(PIECE // 4, 50)
    assert prompt_budget.tokens(0, BUDGET) == 200
    assert prompt_budget.tokens(1, BUDGET) == 100


def test_a_few_tokens_more_end_a_prompt() -> None:
    """Rather than to take a step of their own; but no more than the step's budget."""
    costs = Costs(fixed=1e-3, each=1e-5, piece=0.0, entry=0.0, deeper=0.0)

    def offered(left: int, most: int = BUDGET) -> int:
        return PromptBudget(most, seconds=6e-3, costs=costs, beside=32).tokens(0, left)

    assert [offered(left) for left in (100, 500, 501, 575, 576, 2000)] == [100, 500, 501, 575, 500, 500]
    assert offered(540, most=520) == 520
