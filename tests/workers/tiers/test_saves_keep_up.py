"""Pages of prompts that come all the time are saved as fast as they are computed, and no rank is asked for too many."""

from __future__ import annotations

import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass

import pytest
import torch

from kernels.page import PAGE_TOKENS, Shards
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams, StepPlan, StepResult
from workers.protocol.request import Prompt
from workers.protocol.tiers import Moved, Moves
from workers.scheduler import Scheduler, SchedulerConfig
from workers.tiers.host_memory import HostMemory
from workers.tiers.mover import MOST_STAGING_BYTES, batch_of

MOST_TOKENS = 4096


@dataclass(frozen=True)
class Case:
    """A replica on one node."""

    record_bytes: int
    """Of a page of all caches."""
    ranks: int
    shards: int = 1
    token_budget: int = 8192
    host_pages: int = 20_000

    @property
    def savers(self) -> int:
        return self.ranks // self.shards


V3_FP8, V3, V2_LITE = 64 * 40_672, 64 * 71_424, 64 * 31_104
CASES = {
    "DeepSeek-V3 in FP8 on 8 ranks": Case(V3_FP8, 8),
    "in bf16": Case(V3, 8),
    "with 2 shards": Case(V3, 8, shards=2),
    "with 8 shards": Case(V3_FP8, 8, shards=8),
    "DeepSeek-V2-Lite on one rank": Case(V2_LITE, 1),
    "with a small step": Case(V2_LITE, 1, token_budget=2048),
    "host memory that is full": Case(V3_FP8, 8, host_pages=900),
}


class Ranks:
    """Ranks whose copies take no time; they check how many pages of a message are each one's to save."""

    def __init__(self, case: Case) -> None:
        self.batch = batch_of(case.record_bytes, case.token_budget, case.ranks)
        of_rank = tuple(rank % case.shards for rank in range(case.ranks))
        none_SB = torch.empty(0, 0, dtype=torch.uint8)
        self.memories = [HostMemory(none_SB, rank, of_rank) for rank in range(case.ranks)]
        self.shards = [Shards(case.shards, shard) for shard in of_rank]
        self.largest = 0

    def move(self, moves: Moves) -> None:
        shares: Counter[int] = Counter()
        for page, slot in moves.saves:
            writing = [
                rank
                for rank, (shard, memory) in enumerate(zip(self.shards, self.memories, strict=True))
                if shard.owns(page) and memory.writes(slot)
            ]
            assert len(writing) == 1
            shares.update(writing)
        self.largest = max(self.largest, *shares.values())
        assert self.largest <= self.batch, "a rank has no staging memory for so many"


def prompts_all_the_time(case: Case, batch: int | None = None, savers: int = 0) -> tuple[int, int, int, Ranks]:
    """Pages that were computed, those saved and those lost to others, where each step feeds all that it may. `batch`
    and `savers`: others than the ranks say."""
    steps = 40
    pages = 1 + 16 * (MOST_TOKENS // PAGE_TOKENS + 2)
    ranks, chance = Ranks(case), random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(
            slots=12,
            pages=pages,
            max_context=MOST_TOKENS + 64,
            token_budget=case.token_budget,
            width=1,
            queue_limit=100,
            vocab_size=2**16,
            host_pages=case.host_pages,
            cache_shards=case.shards,
            save_batch=batch or ranks.batch,
            savers=savers or case.savers,
        )
    )
    channel: deque[Moves | StepPlan] = deque()
    number = computed = 0
    for _ in range(steps):
        while len(scheduler._live) < 20:
            ids = chance.choices(range(2**16), k=chance.randrange(1000, MOST_TOKENS))
            scheduler.add(Request(f"{number}", Prompt(array("I", ids).tobytes()), SamplingParams(1, temperature=0.0)))
            number += 1
        while (plan := scheduler.plan()) is not None:
            channel += [*scheduler.moves(), plan]
            scheduler.save_pages()
            channel += scheduler.moves()
        while isinstance(moves := channel.popleft(), Moves):
            ranks.move(moves)
            scheduler.moved(Moved(0, moves.ticket))
            scheduler.save_pages()
            channel += scheduler.moves()
        computed += sum(len(row.tokens) for row in moves.prefill)
        sampled = len(moves.decode_slots) + sum(row.final for row in moves.prefill)
        scheduler.apply(StepResult(moves.step, ((1,),) * sampled, 0.05))
    assert computed > 0.8 * steps * case.token_budget
    stats = scheduler.stats()
    return computed // PAGE_TOKENS, stats.host_saved_pages, stats.host_dropped_pages, ranks


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pages_are_saved_as_fast_as_prompts_are_computed(case: Case) -> None:
    """Prompts end within a page, and the last steps' pages are still to be saved."""
    computed, saved, dropped, ranks = prompts_all_the_time(case)
    in_flight = 4 * case.token_budget // PAGE_TOKENS
    ends = computed * PAGE_TOKENS // 1000
    assert dropped == 0
    assert computed - in_flight - ends <= saved <= computed
    assert ranks.batch * case.record_bytes <= MOST_STAGING_BYTES


def test_saves_that_one_rank_bounds_for_all_are_noticed() -> None:
    """Planted fault: a message has no more pages than one rank has room for, whoever saves them."""
    case = CASES["DeepSeek-V3 in FP8 on 8 ranks"]
    computed, saved, dropped, _ = prompts_all_the_time(case, batch_of(case.record_bytes), savers=1)
    assert dropped > 100
    assert saved < computed / 2
