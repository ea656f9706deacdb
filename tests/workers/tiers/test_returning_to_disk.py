"""Sessions that return to a replica of real processes after all of them were killed: their pages are on disk."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import write_tiny
from tests.workers.processes.test_replica_processes import collect, config
from tests.workers.tiers.test_host_cache_engine import engine, tokens
from workers.processes.client import EngineClient
from workers.processes.launch import LocalReplica, local_engine
from workers.protocol.front import EngineFault
from workers.protocol.plan import SamplingParams

SESSIONS = [tokens(560, seed=number) for number in range(3)]
"""8 full pages each: fewer are not worth a look at the disk."""
PAGE_BYTES = 1 << 16
"""More than a page of all caches takes."""
ONCE_MORE = SamplingParams(5, temperature=1.0, seed=1)


def settings(disk: Path, **changes: Any) -> dict[str, Any]:
    """Two ranks with room for one session, host memory for two, and a disk for all."""
    sizes = {"max_rows": 2, "max_context": 600, "cache_pages": 12, "tensor_parallel": 2, "selftest": False}
    tiers = {"host_cache_bytes": 10 * PAGE_BYTES, "disk_cache_bytes": 8 << 20, "disk_cache_dir": str(disk)}
    return {**sizes, **tiers, "invariant": True, **changes}


async def told(client: EngineClient, turn: str = "") -> list[list[int]]:
    return [await collect(client, f"{turn}{number}", session, ONCE_MORE) for number, session in enumerate(SESSIONS)]


async def counted(client: EngineClient, name: str, least: int) -> int:
    """A counter of the scheduler's, once it is so high."""
    async with asyncio.timeout(60):
        while getattr(client.stats, name) < least:
            await asyncio.sleep(0.02)
    return int(getattr(client.stats, name))


@pytest.mark.long
@pytest.mark.parametrize(
    "shared", [{}, {"cache_pages": 7, "cache_shards": 2, "invariant": False}], ids=["whole caches", "shards"]
)
async def test_who_is_killed_while_it_writes_finds_its_sessions_again(tmp_path: Path, shared: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3, max_position_embeddings=1024)
    disk, lines = tmp_path / "disk", list[str]()
    # In invariant mode one rank gives the tokens of two, and so it does here with others.
    roomy = engine(folder, invariant=shared.get("invariant", True), width=1, max_context=600)
    expected = roomy.generate(SESSIONS, ONCE_MORE)
    given = config(folder, **settings(disk, **shared))
    replica = LocalReplica(given)
    async with local_engine(given, lines.append, replica=replica) as client:
        assert await told(client) == expected
        assert await counted(client, "disk_saved_pages", 16) <= 24
        # More is being written while all processes of the replica are killed.
        writing = asyncio.create_task(collect(client, "more", tokens(560, seed=9), ONCE_MORE))
        await asyncio.sleep(0.1)
        for process in replica.processes:
            process.kill()
        with pytest.raises(EngineFault):
            await client.health_check()
        with suppress(EngineFault):  # it was over by then, where this process was late
            await writing
    assert any("disk behind that" in line for line in lines)
    lines.clear()
    async with local_engine(config(folder, **settings(disk, **shared)), lines.append) as client:
        assert client.stats.disk_lost_pages == 0
        assert await told(client, "again ") == expected
        async with asyncio.timeout(60):  # late where this machine is busy
            while client.stats.disk_loaded_pages + client.stats.disk_late_loads == 0:
                await asyncio.sleep(0.02)
        assert client.stats.disk_pages >= 16
    assert any("pages are there from before" in line and " 0 pages" not in line for line in lines)


@pytest.mark.long
async def test_a_disk_that_is_not_to_be_had_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    (tmp_path / "file").write_text("")
    caplog.set_level(logging.CRITICAL)
    for changes, match in (
        ({"disk_cache_bytes": 1}, "is less than one page"),
        ({"disk_cache_dir": str(tmp_path / "file")}, "cannot be used .* give a folder"),
    ):
        given = settings(tmp_path / "disk", max_context=400, tensor_parallel=1, **changes)
        with pytest.raises(EngineFault, match=match):
            async with local_engine(config(folder, **given)):
                pass
