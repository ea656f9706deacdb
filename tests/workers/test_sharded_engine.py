"""Replicas whose ranks share out one latent cache give the tokens that one rank gives, whatever happens to a row."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pydantic import ValidationError

from kernels.page import NULL_PAGE
from tests.rank_processes import run_ranks
from tests.tiny_models import VOCAB, write_tiny
from tests.workers.harness import InlineEngine
from tests.workers.processes.test_replica_processes import collect
from tests.workers.processes.test_replica_processes import config as processes_config
from workers.config import EngineConfig
from workers.models.attention import expanded
from workers.parallel.group import Group
from workers.processes.launch import local_engine
from workers.protocol.plan import PageGrant, SamplingParams
from workers.rank.runner import PlanError

CPU = torch.device("cpu")
BORDERS = (63, 62, 65, 1, 127, 129, 257)
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
"""Two are enough to be taken for each other: one dense, one with experts, which attends to what the other has selected
where models share that. Ranks take longer to wait for each other than to compute, in each layer anew."""


def config(folder: Path, **settings: Any) -> EngineConfig:
    defaults = {"width": 3, "max_rows": 8, "token_budget": 96, "max_context": 450, "device": "cpu"}
    defaults |= {"heartbeat_timeout_s": 60.0}  # processes of a busy machine are silent at times
    return EngineConfig(model=str(folder), **{**defaults, **settings})


def random_prompts() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of lengths around pages' borders, and others with a common beginning, few of which fit at once. The first
    three come to their third page at about one time, when there are two pages for them."""
    rng = random.Random(8)
    shared = [rng.randrange(VOCAB) for _ in range(140)]
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in BORDERS]
    prompts += [[*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 60)))] for _ in range(5)]
    tokens = [86 if 1 < len(prompt) < 70 else 8 for prompt in prompts]
    return prompts, [
        SamplingParams(count, temperature=float(index % 2), seed=index) for index, count in enumerate(tokens)
    ]


def generated(folder: Path, group: Group, **settings: Any) -> dict[str, Any]:
    engine = InlineEngine(config(folder, **settings), group=group)
    for layer in engine.runner.parts.cache.layers:
        layer[NULL_PAGE] = torch.nan  # nobody may read it
    tokens = engine.generate(*random_prompts())
    stats = engine.scheduler.stats()
    assert stats.pages_free == stats.pages_total
    beyond = PageGrant(0, 0, (engine.scheduler.config.pages,))
    plan = msgspec.structs.replace(engine.plans[-1], step=engine.plans[-1].step + 1, grants=(beyond,))
    with pytest.raises(PlanError, match="granted pages"):
        engine.runner.launch(plan)
    return {
        "tokens": tokens,
        "preemptions": stats.preemptions,
        "cached": stats.cached_tokens,
        "pages": stats.pages_total,
    }


def rank_main(rank: int, folder: Path, settings: dict[str, Any], entries: int) -> None:
    torch.set_num_threads(1)
    expanded.CONTEXT_ENTRIES = entries  # type: ignore[misc]
    made = config(folder / "model", **settings)
    at = f"file://{folder}/rendezvous{made.cache_shards}"
    group = Group.connect(made.mesh(rank), at, CPU, timeout_s=120)
    try:
        torch.save(generated(folder / "model", group, **settings), folder / f"rank{rank}.pt")
    finally:
        group.close()


CASES = [("v3", 2, 2, 64), ("v3", 4, 2, 4096), ("v3", 4, 4, 64)]
CASES += [("v32", 4, 2, 64), ("glm5", 2, 2, 64), ("axk2", 2, 2, 64), ("hyv4", 4, 4, 64)]


@pytest.mark.parametrize(
    ("kind", "ranks", "shards", "entries"), [pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_hits_preemptions_drafts_and_mixed_steps_change_no_token(
    tmp_path: Path, kind: str, ranks: int, shards: int, entries: int
) -> None:
    """As many pages in all as one rank has, so that all is planned alike; cached context in pieces of so many
    `entries`. Planted faults that this finds: the table of a preempted row is kept; a rank writes another's pages; the
    null page is read."""
    chosen = LAYERS if kind in ("glm5", "hyv4") else {"num_hidden_layers": LAYERS["num_hidden_layers"]}
    folder = write_tiny(tmp_path / "model", kind, seed=3, **chosen)
    pages = 8
    want = generated(folder, Group(), cache_pages=pages + 1)
    settings = {"tensor_parallel": ranks, "cache_shards": shards, "cache_pages": pages // shards + 1}
    run_ranks(rank_main, ranks, tmp_path, settings, entries)
    for rank in range(ranks):
        assert torch.load(tmp_path / f"rank{rank}.pt") == want
    assert want["preemptions"] > 0
    assert want["cached"] > 0
    assert want["pages"] == pages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 4, "cache_shards": 3}, "by a number that divides theirs: give 1 or 2 or 4"),
        ({"cache_shards": 2}, "by a number that divides theirs: give 1"),
        ({"tensor_parallel": 3, "cache_shards": 3}, "over 1, 2, 4 or 8 ranks, .*: give 1 "),
        (
            {"tensor_parallel": 2, "cache_shards": 2, "dtype": "float16"},
            "does not go with dtype float16, .*: give dtype bfloat16 or float32",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(tmp_path, **settings)


PAGE_BYTES = 64 * 4 * 40 * 3
"""Of the model below: 3 layers of 40 features in fp32."""


@pytest.mark.long
@pytest.mark.parametrize("size", [{"cpu_cache_bytes": 7 * PAGE_BYTES}, {"cache_pages": 7}], ids=["bytes", "pages"])
async def test_ranks_choose_how_many_share(tmp_path: Path, size: dict[str, int]) -> None:
    """A cache of 6 pages on each rank, for requests of 8: two ranks share it, and say why. A planted fault: the
    scheduler takes the settings' number for it."""
    folder, lines = write_tiny(tmp_path / "v3", "v3", seed=3), list[str]()
    made = processes_config(folder, max_rows=2, max_context=450, selftest=False, tensor_parallel=2, width=1)
    made = made.model_copy(update={"cache_shards": "auto", "cache_pages": None, **size})
    async with local_engine(made, lines.append) as client:
        got = await collect(client, "r0", list(range(100)) * 4, SamplingParams(8, temperature=0.0))
        assert client.stats.cache_shards == client.info.cache_shards == 2
        assert client.stats.pages_total == 2 * 6
    assert len(got) == 8
    assert any(re.search(r"started in [\d.]+ s: choice of shards [\d.]+ s, weights", line) for line in lines)
    said = [line for line in lines if "cache_shards = 2 (auto): the smallest number with which the cache holds" in line]
    assert len(said) == 1
