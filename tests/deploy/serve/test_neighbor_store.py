"""Replicas find each other, so that streams of one can go on at another: with a store in place of Ray's."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_live_status_store import Store

from deploy.config.application import ServeConfig
from deploy.serve import neighbor_store, progress
from deploy.serve.asked_front import ANSWER
from deploy.serve.held_connection import MESSAGE
from deploy.serve.journal import Began, Journal
from deploy.serve.neighbor_store import NeighborStore, Offer, Place, fingerprint
from deploy.serve.stream_watchdog import StreamWatchdog
from workers.channel.ports import socket_folder
from workers.processes.client import OutputMailbox
from workers.protocol.front import EngineFault, ModelInfo
from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.plan import SamplingParams

ENGINE = {"model": "demo", "heartbeat_timeout_s": 60.0}
"""A busy machine may be silent for a while."""
CONFIG = ServeConfig.model_validate({"engine": ENGINE, "replicas": 3})
HERE = Place("node", "127.0.0.1")


ROOT = b"sixteen bytes..."


class Engine:
    """Says one token to all who ask."""

    down, died_of_an_error = "", False

    def __init__(self, running: int, root: bytes = ROOT) -> None:
        self.stats = EngineStats(running=running)
        self.info = ModelInfo("demo", 200, 50, (1,), 3, 0, root)

    def host(self, request: Request, mailbox: OutputMailbox) -> None:
        mailbox.put(RequestOutput(request.request_id, (self.stats.running,), "length"))

    def leave(self, request_id: str) -> None:
        pass

    def place_waiting(self) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    for module in (neighbor_store, progress):
        monkeypatch.setattr(module, "store", store)
    monkeypatch.setattr(neighbor_store, "PERIOD_S", 0.01)
    return store


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def opened(
    name: str, running: int = 0, config: ServeConfig = CONFIG, place: Place = HERE, root: bytes = ROOT
) -> NeighborStore:
    made = NeighborStore("app", name, config, place)
    made.open(Engine(running, root), None)  # type: ignore[arg-type]
    return made


async def test_every_replica_can_use_every_other(store: Store) -> None:
    stores = [opened(name, number) for number, name in enumerate("abc")]
    await until(lambda: all(len(one.neighbors()) == 2 for one in stores))
    for number, one in enumerate(stores):
        found = set()
        for client in one.neighbors():
            async for output in client.generate(Request("r", (1, 2), SamplingParams(1))):
                found |= {*output.tokens}
        assert found == {0, 1, 2} - {number}
        assert {client.stats.running for client in one.neighbors()} == found
    for one in stores:
        one.close()


async def test_the_folder_of_every_channel_is_told_and_goes_with_it(store: Store) -> None:
    one, other = NeighborStore("app", "a", CONFIG, HERE), opened("b")
    folders: list[Path | None] = []
    one.on_folder.append(folders.append)
    one.open(Engine(0), None)  # type: ignore[arg-type]
    await until(lambda: one.neighbors() and other.neighbors())
    [folder] = folders
    assert folder is not None
    assert folder.is_dir()
    one.close()
    assert not folder.exists()
    other.close()


async def test_what_serves_otherwise_is_no_neighbor(store: Store) -> None:
    """Such a replica has another model, or numbers that are computed otherwise: the next token might be another one."""
    changed = ServeConfig.model_validate({"engine": {**ENGINE, "invariant": True}, "replicas": 3})
    port = CONFIG.model_copy(update={"port": 1})
    verifying = ServeConfig.model_validate({"engine": {**ENGINE, "least_draft_confidence": 0.3}, "replicas": 3})
    assert fingerprint(verifying, ROOT) == fingerprint(CONFIG, ROOT)
    assert fingerprint(changed, ROOT) != fingerprint(CONFIG, ROOT) == fingerprint(port, ROOT)
    stores = [opened("a"), opened("b"), opened("c", config=changed), opened("d", root=b"of other weights")]
    await until(lambda: all(one.neighbors() for one in stores[:2]))
    await asyncio.sleep(0.1)
    assert [len(one.neighbors()) for one in stores] == [1, 1, 0, 0]
    for one in stores:
        one.close()


async def test_answers_of_a_front_that_dies_go_to_fronts_of_its_node_that_serve_the_same(store: Store) -> None:
    written = ServeConfig.model_validate({"engine": ENGINE, "replicas": 3, "api": {"max_n": 3}})
    there, changed = Place("another", "127.0.0.1"), b"of other weights"
    stores = [
        opened("a"),
        opened("b"),
        opened("c", config=written),
        opened("d", place=there),
        opened("e", root=changed),
    ]
    for one, name in zip(stores, "abcde", strict=True):
        one.heir = f"/heir-of-{name}"
    told: list[tuple[Sequence[str], bool]] = []
    stores[0].on_heirs.append(lambda heirs, elsewhere: told.append((heirs, elsewhere)))
    await until(lambda: sorted(stores[0].heirs()) == ["/heir-of-b", "/heir-of-c"])
    await until(lambda: all(len(one.neighbors()) == 3 for one in stores[:4]))
    assert [list(one.heirs()) for one in stores[3:]] == [[], []]
    assert told[-1] == (stores[0].heirs(), True)
    assert all(one.elsewhere() for one in stores), "d is"
    assert all(before != after for before, after in pairwise(told))
    # Whoever writes answers otherwise is asked, and refuses.
    names = [one.answers_as() for one in stores]
    assert names[0] == names[1] == names[3]
    assert len({*names}) == 3
    for one in stores:
        one.close()
    assert not stores[0].heirs()


async def test_what_a_replica_has_to_say_that_is_new_it_says_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front that dies soon after another one has come up hands its answers to that one, if it knows of it."""
    monkeypatch.setattr(neighbor_store, "PERIOD_S", 1000.0)
    stores = [opened("a")]
    await until(lambda: store.values)
    stores.append(opened("b"))
    stores[1].heir = "/heir-of-b"

    def offered() -> Offer:
        return msgspec.msgpack.decode(store.values[b"neighbors/app/b"], type=Offer)

    await until(lambda: b"neighbors/app/b" in store.values and {*offered().channels} == {"a"})
    assert offered().heir == "/heir-of-b"
    stores[1].heir = "/another"
    await until(lambda: offered().heir == "/another")
    for one in stores:
        one.close()


async def test_a_watchdog_knows_at_once_who_takes_answers_over_and_which_folders_are_to_go(
    store: Store,
) -> None:
    """This front dies before its next beat."""
    heir = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = socket_folder(len("heir") + 1)
    heir.bind(path := str(folder / "heir"))
    heir.listen()
    heir.settimeout(60)
    watchdog = StreamWatchdog([b"words"])
    one, other = NeighborStore("app", "a", CONFIG, HERE), opened("b")
    other.heir = path
    with heir, socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as front:
            journal, memory = Journal.begin(Began("", "", b"", [], b"", b"", 0.0, 0.0, 0, ordinary=True), 0)
            watchdog.hold(front.fileno(), 0, memory)
            journal.close()
        one.open(Engine(0), watchdog)  # type: ignore[arg-type]
        await until(lambda: [*one.heirs()] == [path] and one._channels)
        [channel] = one._channels.values()
        assert channel.addresses.folder is not None
        watchdog._socket.close()  # as where its process ends
        with (await asyncio.to_thread(heir.accept))[0] as handed:
            handed.settimeout(60)
            data, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, handed, MESSAGE.size, 2)
            assert len(descriptors) == 2
            handed.send(ANSWER.pack(MESSAGE.unpack(data)[1], True))
        await until(lambda: not channel.addresses.folder.exists())
        for descriptor in (*descriptors, memory):
            os.close(descriptor)
    for each in (one, other):
        each.close()
    watchdog._process.wait(60)
    shutil.rmtree(folder)


async def test_an_exchange_ends_when_it_is_cancelled_in_the_moment_of_news(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbor_store, "PERIOD_S", 1000.0)
    one = opened("a")
    await until(lambda: store.values)
    await asyncio.sleep(0.05)  # it waits for news
    exchanging = one._exchanging
    assert exchanging is not None
    one.heir = "/news"
    one.close()
    done, _ = await asyncio.wait([exchanging], timeout=60)
    assert done == {exchanging}
    assert exchanging.cancelled()


async def test_replicas_of_other_nodes_are_reached_over_tcp_with_keys(store: Store) -> None:
    stores = [opened("a"), opened("b", place=Place("another", "127.0.0.1"))]
    await until(lambda: all(one.neighbors() for one in stores))
    offers = [msgspec.msgpack.decode(value, type=Offer) for value in store.values.values()]
    for offer in offers:
        for addresses in offer.channels.values():
            assert addresses.requests.startswith("tcp://127.0.0.1:")
            assert addresses.keys is not None
    for one in stores:
        one.close()


async def test_who_is_silent_for_long_is_forgotten_and_who_comes_back_is_found(store: Store) -> None:
    stores: list[Any] = [opened("a"), opened("b")]
    await until(lambda: all(one.neighbors() for one in stores))
    stores[1]._exchanging.cancel()
    real = stores[0]._ages.now
    stores[0]._ages.now = lambda: real() + neighbor_store.FORGET_S + 1
    await until(lambda: not stores[0].neighbors())
    assert not stores[0]._channels
    stores[1]._exchanging = asyncio.ensure_future(stores[1]._keep_exchanging())
    await until(lambda: all(one.neighbors() for one in stores))
    for one in stores:
        one.close()


@pytest.mark.parametrize("wrong_s", [-86400.0, 86400.0])
async def test_clocks_of_nodes_may_differ_and_jump(
    store: Store, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    stores: list[Any] = [opened("a"), opened("b")]
    told = stores[1].offer

    def by_another_clock() -> Offer:
        offer = told()
        offer.at += wrong_s
        return offer

    monkeypatch.setattr(stores[1], "offer", by_another_clock)
    await until(lambda: all(one.neighbors() for one in stores))
    await asyncio.sleep(0.1)
    clients = [one.neighbors() for one in stores]
    assert [len(each) for each in clients] == [1, 1]
    real = neighbor_store.time.time
    monkeypatch.setattr(neighbor_store.time, "time", lambda: real() + wrong_s)
    await asyncio.sleep(0.2)
    assert [one.neighbors() for one in stores] == clients  # no channel was closed
    for one in stores:
        one.close()


async def test_a_neighbor_whose_engine_died_is_used_again_once_it_serves(store: Store) -> None:
    stores: list[Any] = [opened("a"), opened("b")]
    await until(lambda: all(one.neighbors() for one in stores))
    [client] = stores[0].neighbors()
    stores[1]._engine.down = "rank 0 died"
    stream = client.generate(Request("r", (1, 2), SamplingParams(1)))
    with pytest.raises(EngineFault, match="rank 0 died"):
        await anext(stream)
    assert not stores[0].neighbors()
    stores[1]._engine.down = ""
    await until(lambda: stores[0].neighbors())
    assert stores[0].neighbors() != [client]
    for one in stores:
        one.close()


async def test_a_neighbor_whose_front_dies_is_none_any_more_before_it_is_missed(store: Store) -> None:
    patient = {"engine": {"model": "demo", "heartbeat_timeout_s": 600.0}, "replicas": 3}
    stores = [opened(name, config=ServeConfig.model_validate(patient)) for name in "ab"]
    await until(lambda: all(one.neighbors() for one in stores))
    [client] = stores[0].neighbors()
    stream = client.generate(Request("r", (1, 2), SamplingParams(9)))
    [channel] = stores[1]._channels.values()
    channel._beating.cancel()
    channel.say = lambda message: None  # type: ignore[method-assign]
    channel._binding.outputs.close(linger_ms=0)  # as the kernel does it for a process that ends
    with pytest.raises(EngineFault, match="the connection broke"):
        await asyncio.wait_for(anext(stream), 20)
    assert stores[0].neighbors() == []
    for one in stores:
        one.close()


async def test_a_store_that_fails_keeps_what_is_connected(store: Store) -> None:
    stores = [opened("a"), opened("b")]
    await until(lambda: all(one.neighbors() for one in stores))
    store.broken = True
    await asyncio.sleep(0.1)
    assert all(one.neighbors() for one in stores)
    for one in stores:
        one.close()
