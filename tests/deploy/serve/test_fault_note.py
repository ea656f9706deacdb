"""A replica's note of its fault, for who asks while there is no replica."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy import replica
from deploy.haproxy import FAULT_FILE
from deploy.replica import EngineReplica


def serving_replica() -> EngineReplica:
    failing = object.__new__(EngineReplica)
    failing.board = SimpleNamespace(fail=lambda cause: None)  # type: ignore[assignment]
    failing.processes = SimpleNamespace(kill=lambda: None)  # type: ignore[assignment]
    failing.config = SimpleNamespace(health=SimpleNamespace(flush_s=0.1))  # type: ignore[assignment]
    failing._serving, failing._reporter, failing._beating, failing.guardian = True, None, None, None
    failing._forgetting = None
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

    def fail(cause: str) -> None:
        raise ConnectionError("the controller is gone")

    failing = serving_replica()
    failing.board = SimpleNamespace(fail=fail)  # type: ignore[assignment]
    with pytest.raises(ConnectionError):
        failing._failed("rank 1 died")
    while not ended:
        await asyncio.sleep(0.01)
    assert ended == [1]
