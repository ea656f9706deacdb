"""Sessions that return to a replica of real processes, whose ranks share host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny
from tests.workers.processes.test_replica_processes import collect, config
from tests.workers.tiers.test_host_cache_engine import tokens
from workers.processes.launch import local_engine
from workers.protocol.front import EngineFault
from workers.protocol.plan import SamplingParams


async def told(folder: Path, **settings: Any) -> tuple[list[list[int]], int, list[str]]:
    """What four sessions of three turns got, how many pages came from host memory, and what the start said."""
    histories = [tokens(300, seed=number) for number in range(4)]
    answers, lines = [], list[str]()
    sizes = {"max_rows": 2, "max_context": 500, "invariant": True, "selftest": False}
    async with local_engine(config(folder, **{**sizes, **settings}), lines.append) as client:
        for turn in range(3):
            for number, history in enumerate(histories):
                got = await collect(client, f"{number} {turn}", history, SamplingParams(5, temperature=1.0, seed=1))
                answers.append(got)
                history += [*got, *tokens(20, seed=100 * turn + number)]
        return answers, client.stats.host_loaded_pages, lines


@pytest.mark.long
@pytest.mark.parametrize(
    "shared",
    [{"cache_pages": 11}, {"cache_pages": 6, "cache_shards": 2, "invariant": False}],
    ids=["whole caches", "shards"],
)
async def test_ranks_give_the_tokens_of_a_replica_that_never_lost_a_page(
    tmp_path: Path, shared: dict[str, Any]
) -> None:
    """Two ranks with room for one session and host memory for all, beside one rank with room for all."""
    folder = write_tiny(tmp_path, "v3", seed=3)
    expected, none, _ = await told(folder, invariant=shared.get("invariant", True))
    got, loaded, lines = await told(folder, tensor_parallel=2, host_cache_bytes=32 << 20, **shared)
    assert got == expected
    assert none == 0
    assert loaded >= 16
    assert any("host memory behind it" in line for line in lines)


async def test_host_memory_that_is_not_to_be_had_is_said_at_the_start(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    with pytest.raises(
        EngineFault, match=r"host_cache_bytes = \d+, but only \d+ bytes of memory are free .* give less"
    ):
        await told(folder, host_cache_bytes=1 << 50)
