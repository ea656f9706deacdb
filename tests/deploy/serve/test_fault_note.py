"""A replica's note of its fault, for who asks while there is no replica."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.cluster.haproxy import FAULT_FILE
from deploy.serve import replica
from deploy.serve.replica import EngineReplica


def serving_replica() -> EngineReplica:
    failing = object.__new__(EngineReplica)
    failing.status_store = SimpleNamespace(fail=lambda cause, wait_s: None)  # type: ignore[assignment]
    failing.told = []  # type: ignore[attr-defined]
    failing.live = SimpleNamespace(failed=failing.told.append, close=lambda: None)  # type: ignore[assignment,attr-defined]
    failing.processes = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
    failing.config = SimpleNamespace(health=SimpleNamespace(flush_s=0.1))  # type: ignore[assignment]
    failing._serving, failing._reporter, failing._beating, failing.watchdog = True, None, None, None
    failing._forgetting = failing._standby = failing._keeper = None
    return failing


async def test_a_fault_stays_noted_though_the_last_replicas_was_about_to_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica fails in the seconds in which it still keeps what the one before it had noted."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    failing = serving_replica()
    failing._forgetting = asyncio.get_running_loop().call_later(0.05, replica.note_fault, None)
    failing._failed("rank 1 died")
    while not ended:
        await asyncio.sleep(0.01)
    assert (tmp_path / FAULT_FILE).read_text() == "rank 1 died"


async def test_a_failed_replica_ends_though_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)

    def fail(cause: str, wait_s: float) -> None:
        raise ConnectionError("the controller is gone")

    failing = serving_replica()
    failing.status_store = SimpleNamespace(fail=fail)  # type: ignore[assignment]
    with pytest.raises(ConnectionError):
        failing._failed("rank 1 died")
    assert failing.told == ["rank 1 died"]  # type: ignore[attr-defined]
    while not ended:
        await asyncio.sleep(0.01)
    assert ended == [1]


async def test_streams_are_flushed_however_long_it_takes_to_tell_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board is the network's, and written in the loop that the streams' last events wait for."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    happened: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda status: happened.append("exit"))

    async def stream() -> None:
        for _ in range(5):  # from the engine's client to the socket an event goes through several tasks
            await asyncio.sleep(0)
        happened.append("flushed")

    failing = serving_replica()
    failing.config.health.flush_s = 0.5
    failing.status_store = SimpleNamespace(fail=lambda cause, wait_s: time.sleep(0.6))  # type: ignore[assignment]
    last_event = asyncio.create_task(stream())
    failing._failed("rank 1 died")
    await last_event
    while "exit" not in happened:
        await asyncio.sleep(0.01)
    assert happened == ["flushed", "exit"]
