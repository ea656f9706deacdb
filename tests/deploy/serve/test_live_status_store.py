"""Reports of replicas to each other, with a store in place of Ray's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.serve import live_status_store, progress
from deploy.serve.live_status_store import LiveStatusStore
from workers.protocol.messages import EngineStats


class Store:
    """A key-value store; `held` keeps it from answering, `broken` has it raise."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        """Another dictionary after every change, so that whoever goes through one is not disturbed by other threads."""
        self._changing = threading.Lock()
        self.held = threading.Event()
        self.held.set()
        self.broken = False

    def __call__(self, verb: str, key: bytes, value: bytes = b"", **options: Any) -> Any:
        assert self.held.wait(30)
        if self.broken:
            raise ConnectionError("the head is away")
        if verb == "list":
            return [name for name in self.values if name.startswith(key)]
        if verb == "get":
            return self.values.get(key)
        with self._changing:
            kept = {name: kept for name, kept in self.values.items() if name != key}
            self.values = kept if verb == "del" else {**kept, key: value}
        return True


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for module in (live_status_store, progress):
        monkeypatch.setattr(module, "store", store)
    monkeypatch.setattr(live_status_store, "PERIOD_S", 0.01)
    # A machine that is busy for seconds is neither of these.
    monkeypatch.setattr(live_status_store, "PATIENCE_S", 60.0)
    monkeypatch.setattr(live_status_store, "SILENT_S", 30.0)
    return store


def client(running: int) -> Any:
    return SimpleNamespace(stats=EngineStats(running=running))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def silence(status_store: LiveStatusStore) -> None:
    """Silence the store: from now on it tells nothing, not even what it was about to."""
    status_store._telling.cancel()
    with status_store._lock:
        status_store._closed = True


async def seen(status_store: LiveStatusStore) -> dict[str, str]:
    return {state.name: state.state for state in await status_store.states()}


async def test_every_replica_shows_all(store: Store) -> None:
    stores = [LiveStatusStore("app", name) for name in ("b", "a", "c")]
    other = LiveStatusStore("another app", "d")
    await until(lambda: len(store.values) == 4)
    stores[0].serving(client(5))
    stores[1].serving(client(7))
    await until(lambda: sum(b'"serving"' in value for value in store.values.values()) == 2)
    for status_store in stores:
        states = await status_store.states()
        assert [state.name for state in states] == ["a", "b", "c"]
        assert [state.figures.running if state.figures else None for state in states] == [7, 5, None]
        assert [state.state for state in states] == ["serving", "serving", "starting"]
    for status_store in (*stores, other):
        status_store.close()
    assert store.values == {}


async def test_a_cause_is_told_and_a_silence_noticed_and_both_forgotten(store: Store) -> None:
    failing, silent, watching = (LiveStatusStore("app", name) for name in ("failing", "silent", "watching"))
    watching.serving(client(1))
    await until(lambda: len(store.values) == 3)
    failing.failed("rank 1 exited with signal 9")
    await until(lambda: any(b"signal 9" in value for value in store.values.values()))
    silence(failing)
    silence(silent)
    await watching.states()
    real = watching._ages.now
    watching._ages.now = lambda: real() + live_status_store.SILENT_S + 1
    states = {state.name: state for state in await watching.states()}
    assert {name: state.state for name, state in states.items()} == {
        "failing": "failed",
        "silent": "silent",
        "watching": "serving",
    }
    assert states["failing"].cause == "rank 1 exited with signal 9"
    watching._ages.now = lambda: real() + live_status_store.FORGET_S + 1
    assert await seen(watching) == {"watching": "serving"}
    assert [key for key in store.values if b"watching" not in key] == []
    failing.close()  # the fault is not taken back
    watching.close()


@pytest.mark.parametrize("wrong_s", [-86400.0, 86400.0])
async def test_clocks_of_nodes_may_differ_and_jump(
    store: Store, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    here, there = LiveStatusStore("app", "here"), LiveStatusStore("app", "there")
    told = there.report
    monkeypatch.setattr(there, "report", lambda: told().model_copy(update={"at": time.time() + wrong_s}))
    for one in (here, there):
        one.serving(client(1))
    both = {"here": "serving", "there": "serving"}

    async def until_both() -> None:
        async with asyncio.timeout(60):
            while await seen(here) != both or await seen(there) != both:
                await asyncio.sleep(0.005)

    await until_both()
    for _ in range(20):
        assert await seen(here) == await seen(there) == both
        await asyncio.sleep(0.005)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + wrong_s)
    for _ in range(20):
        assert await seen(here) == await seen(there) == both
        await asyncio.sleep(0.005)
    for one in (here, there):
        one.close()


async def test_a_report_of_another_version_is_left_out(store: Store) -> None:
    store.values[b"live/app/old"] = b'{"name": "old", "state": "dancing"}'
    status_store = LiveStatusStore("app", "new")
    assert await seen(status_store) == {"new": "starting"}
    status_store.close()


async def test_a_store_that_fails_or_hangs_keeps_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    status_store, other = LiveStatusStore("app", "a"), LiveStatusStore("app", "b")
    await until(lambda: len(store.values) == 2)
    both = {"a": "starting", "b": "starting"}
    assert await seen(status_store) == both
    store.broken = True
    await asyncio.sleep(0.05)
    assert await seen(status_store) == both  # as they were read last
    store.broken = False
    before = store.values[b"live/app/a"]
    await until(lambda: store.values[b"live/app/a"] != before)  # it goes on when the store does
    monkeypatch.setattr(live_status_store, "PATIENCE_S", 0.02)
    store.held.clear()
    threads = threading.active_count()
    for _ in range(20):
        assert await seen(status_store) == both
    assert threading.active_count() <= threads + 3
    status_store.failed("a rank died")  # waits for nothing
    store.held.set()
    await until(lambda: b"a rank died" in store.values[b"live/app/a"])
    for one in (status_store, other):
        one.close()
