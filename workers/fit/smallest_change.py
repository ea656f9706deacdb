"""The smallest change of settings with which a model fits GPUs that it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from workers.config import EngineConfig
from workers.families.registry import has_fp8_cache, load_config
from workers.fit.memory_plan import MemoryPlan, memory_plan
from workers.fit.settings import SHARED
from workers.model_folder import config_values
from workers.parallel.mesh import CACHE_SHARDS, INVARIANT_RANKS

LEAST_CONTEXT: Final = 2048
"""Tokens: who gets fewer is told of other changes instead."""
MOST_RANKS: Final = 64


@dataclass(frozen=True)
class Change:
    """Settings that fit, and in words what changes."""

    words: str
    plan: MemoryPlan


def smallest_change(config: EngineConfig, plan: MemoryPlan, larger: dict[str, int]) -> Change | None:
    """The first that fits: a cache in FP8, one that more ranks share out, no engine that stands by, a shorter context,
    fewer rows and tokens per step, more ranks, another GPU (`larger`: bytes by name). None: none does."""
    standby = plan.standby > 0
    if config.kv_cache_dtype != "fp8" and has_fp8_cache(load_config(config.folder)):
        tried = memory_plan(config.model_copy(update={"kv_cache_dtype": "fp8"}), plan.total, standby=standby)
        if tried.fits:
            return Change("--kv-cache-dtype fp8", tried)
    if plan.pages and (shared := _shared_out(config, plan.total, standby)) is not None:
        return shared
    if standby and (tried := memory_plan(config, plan.total)).fits:
        return Change("no --standby", tried)
    if plan.context >= LEAST_CONTEXT:
        return Change(f"--context {plan.context}", plan)
    if plan.room > -plan.graphs:
        rows = max(1, config.max_rows // 4)
        budget = max(rows * config.most_width + 1, config.token_budget // 4)
        smaller = config.model_copy(update={"max_rows": rows, "token_budget": budget})
        if (tried := memory_plan(smaller, plan.total, standby=standby)).fits:
            return Change(f"--max-rows {rows} --token-budget {budget}", tried)
    for ranks in _more_ranks(config):
        more = config.model_copy(update={"tensor_parallel": ranks})
        if (tried := memory_plan(more, plan.total, standby=standby)).fits:
            return Change(f"--tensor-parallel {ranks}", tried)
    for name, size in sorted(larger.items(), key=lambda item: item[1]):
        if size > plan.total and (tried := memory_plan(config, size, standby=standby)).fits:
            return Change(f"--gpu {name}", tried)
    return None


def _shared_out(config: EngineConfig, total: int, standby: bool) -> Change | None:
    """The smallest number of ranks that hold enough where they share out one cache."""
    mesh = config.mesh()
    for shards in CACHE_SHARDS:
        if shards > mesh.cache.size and mesh.heads.size % shards == 0:
            try:
                tried = memory_plan(config.shared_out(shards), total, standby=standby)
            except ValueError:  # what is served, or how, does not go with that
                return None
            if tried.fits:
                return Change(f"--cache-shards {shards}", tried)
    return None


def _more_ranks(config: EngineConfig) -> Iterator[int]:
    """Numbers of ranks that can share the model, more than there are."""
    values = config_values(config.folder)
    text = values.get("text_config")
    values = {**values, **text} if isinstance(text, dict) else values
    shared = math.gcd(*(values[name] for name in SHARED if type(values.get(name)) is int))
    for ranks in range(config.tensor_parallel + 1, MOST_RANKS + 1):
        if shared % ranks == 0 and (not config.invariant or ranks in INVARIANT_RANKS):
            yield ranks
