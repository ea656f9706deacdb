"""Choice of the number of ranks that share out one latent cache, where settings leave it open (`cache_shards = auto`).

It goes by memory alone: by what the plan of memory says before a start, with which every rank, and `latentserve fit`,
finds the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from workers.config import EngineConfig
from workers.fit.cache_budget import SHORT
from workers.fit.memory_plan import MemoryPlan, memory_plan
from workers.parallel.mesh import CACHE_SHARDS
from workers.weights.source import DryRun


@dataclass(frozen=True)
class ShardChoice:
    """A number of ranks, and why it is that, as a line for people."""

    shards: int
    words: str


def choose_shards(
    config: EngineConfig, total: int, *, cache_bytes: int | None = None, standby: bool = False
) -> ShardChoice:
    """Choose the smallest number of ranks with which the cache holds one request of the context that is asked for, and
    `max_rows` of an eighth of it; the largest where none does, and 1 where more cannot share or the cache holds
    nothing. A number of `cache_pages` is taken at its word, as a start takes it.

    `total`, `cache_bytes`, `standby`: see `memory_plan`, which says what this raises.
    """
    if config.cache_pages is not None:
        cache_bytes = sys.maxsize
    known: DryRun.Known = {}
    plan = memory_plan(config.shared_out(1), total, cache_bytes=cache_bytes, known=known, standby=standby)
    chosen, whole, why = 1, plan, ""
    for shards in CACHE_SHARDS[1:]:
        if config.mesh().heads.size % shards or plan.pages > plan.wanted_pages or whole.pages < 2:
            break
        try:
            made = config.shared_out(shards)
            plan = memory_plan(made, total, cache_bytes=cache_bytes, known=known, standby=standby)
            chosen = shards
        except ValueError as error:
            # pydantic puts lines of its own around what a validator says.
            why = str(error).split("Value error, ")[-1].split(" [type=")[0]
            break
    return ShardChoice(chosen, _words(config, chosen, plan, whole, why))


def _words(config: EngineConfig, chosen: int, plan: MemoryPlan, whole: MemoryPlan, why: str) -> str:
    short = -(-plan.asked_context // SHORT)
    wanted = f"a request of {plan.asked_context:,} tokens, and {config.max_rows} of {short:,}"
    if whole.pages < 2:
        return "cache_shards = 1 (auto): there is no room for a cache, which shards would not give"
    if plan.pages > plan.wanted_pages:
        reason = f"the cache holds {plan.tokens:,} tokens: {wanted}"
        if chosen > 1:
            reason = f"the smallest number with which {reason}; on each rank alone it would hold {whole.tokens:,}"
    else:
        reason = f"the largest number that there may be; the cache holds {plan.tokens:,} tokens, too few for {wanted}"
    return f"cache_shards = {chosen} (auto): {reason}" + (f" ({why})" if why else "")
