"""Neighbors at which a replica's streams can go on while its engine is away. The replicas of an application tell each
other once a second, and at once when it is something new, through Ray's key-value store, what serves there and where to
connect.

A front binds a channel for each neighbor and connects to the one that each neighbor has bound for it, before any of
them is needed (`workers.processes.guests`). A store that hangs holds up one thread and no stream: what is connected
stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from deploy.config.application import ServeConfig
from deploy.serve.progress import others, store
from deploy.serve.report_ages import ReportAges
from deploy.serve.stream_watchdog import StreamWatchdog
from workers.channel.sockets import Addresses
from workers.processes.client import EngineClient
from workers.processes.failover import FailoverEngine
from workers.processes.guests import GuestChannel

logger = logging.getLogger("latentserve.replica")

PERIOD_S: Final = 1.0
"""Seconds between two reports."""
FORGET_S: Final = 10.0
"""Seconds without a report after which a replica is no neighbor any more."""


@dataclass(frozen=True)
class Place:
    """Node and address of a front."""

    node: str
    """Ray's node id."""
    ip: str


class Offer(msgspec.Struct):
    """Offer of a replica to its neighbors, to continue their streams."""

    at: float
    """Unix time, seconds."""
    fingerprint: str
    node: str
    channels: dict[str, Addresses]
    """Addresses of the channels, by the name of the neighbor that each is for."""
    heir: str = ""
    """Path of the socket at which it takes answers over from fronts of its node (`deploy.serve.heir`)."""


def fingerprint(config: ServeConfig, root: bytes) -> str:
    """Hash of everything that decides which tokens follow. It is equal where one replica may continue what another one
    began. `root`: that of the engine's page keys, which names its weights (`ModelInfo.root`)."""
    no_token = {"record_plans", "record_prompts", "least_draft_confidence"}
    numerics = config.engine.model_dump_json(exclude=no_token)
    parts = (config.model_name, numerics, version("latentserve"), version("torch"), root.hex())
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class NeighborStore:
    """A replica's own offer, and what follows from those of all others."""

    def __init__(self, application: str, replica: str, config: ServeConfig, place: Place) -> None:
        """Prepare the store; nothing is told yet."""
        self._prefix, self._own = f"neighbors/{application}/".encode(), replica
        self._config, self._place = config, place
        self._ages = ReportAges()
        self._engine: FailoverEngine | None = None
        self._channels: dict[str, GuestChannel] = {}
        self._clients: dict[str, tuple[Addresses, EngineClient]] = {}
        self._exchanging: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        api = config.api.model_dump_json(exclude={"api_keys", "otlp_endpoint"})
        self._api = blake2b(api.encode(), digest_size=16).hexdigest()
        self._known: tuple[bytes, str] | None = None
        """Root of the engine and the fingerprint of what is served with it."""
        self._heirs: list[str] = []
        self._elsewhere = False
        self._heir = ""
        self._news = asyncio.Event()
        """Set where the next offer says more than the last one."""
        self.on_folder: list[Callable[[Path | None], None]] = []
        """Told of the folder of each channel that is bound."""
        self.on_heirs: list[Callable[[Sequence[str], bool], None]] = []
        """Told of `heirs` and `elsewhere` when they are others than before."""

    @property
    def heir(self) -> str:
        """Path of the socket at which this front takes answers over; empty while it takes none."""
        return self._heir

    @heir.setter
    def heir(self, path: str) -> None:
        self._heir = path
        self._news.set()

    def open(self, engine: FailoverEngine, watchdog: StreamWatchdog | None) -> None:
        """Let streams of neighbors go on at `engine` from now on. Call this in the running event loop. `watchdog`: of
        this front's streams, which hears of folders and heirs at once; None where streams are guarded by none."""
        self._engine = engine
        if watchdog is not None:
            self.on_folder.append(watchdog.remove_at_end)
            self.on_heirs.append(watchdog.beat)
        self._exchanging = asyncio.ensure_future(self._keep_exchanging())

    def fingerprint(self) -> str:
        """Return what decides which tokens follow here; see the function of this name."""
        assert self._engine is not None
        root = self._engine.info.root
        if self._known is None or self._known[0] != root:
            self._known = root, fingerprint(self._config, root)
        return self._known[1]

    def answers_as(self) -> str:
        """Return a hash of everything that decides how an answer goes on: of `fingerprint`, and of how answers are
        written."""
        return f"{self.fingerprint()}-{self._api}"

    def neighbors(self) -> Sequence[EngineClient]:
        """The engines of other replicas that can be used now."""
        return [client for _, client in self._clients.values() if client.serves]

    def heirs(self) -> Sequence[str]:
        """Return the sockets at which fronts of this node take answers over, if this front dies."""
        return self._heirs

    def elsewhere(self) -> bool:
        """Return whether there are replicas on other nodes, whatever they serve."""
        return self._elsewhere

    def close(self) -> None:
        """Use no neighbor any more, and let none in; the last offer is forgotten by the others."""
        if self._exchanging is not None:
            self._exchanging.cancel()
        self._heirs = []
        for name in {*self._channels, *self._clients}:
            self._forget(name)

    async def _keep_exchanging(self) -> None:
        assert self._engine is not None
        while True:
            self._news.clear()
            try:
                # Awaited: while the store hangs no more threads wait for it.
                self.heed(await asyncio.to_thread(self._exchange, msgspec.msgpack.encode(self.offer())))
                self._engine.place_waiting()
            except Exception:  # Ray's, of many kinds: its head may be away for a while
                logger.debug("neighbors could not be found", exc_info=True)
            # A replica that was just started is of use to its neighbors once they know where to connect.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()

    def offer(self) -> Offer:
        """Return the current offer of this replica."""
        channels = {name: channel.addresses for name, channel in self._channels.items()}
        return Offer(time.time(), self.fingerprint(), self._place.node, channels, self.heir)

    def heed(self, offers: dict[str, Offer]) -> None:
        """Bind a channel for each neighbor, and connect to those that neighbors bound for this replica."""
        assert self._engine is not None
        own = self.fingerprint()
        wanted = {name: offer for name, offer in offers.items() if offer.fingerprint == own}
        heirs = [offer.heir for offer in wanted.values() if offer.heir and offer.node == self._place.node]
        elsewhere = any(offer.node != self._place.node for offer in offers.values())
        if (heirs, elsewhere) != (self._heirs, self._elsewhere):
            self._heirs, self._elsewhere = heirs, elsewhere
            for listener in self.on_heirs:
                listener(heirs, elsewhere)
        for name in {*self._channels, *self._clients} - wanted.keys():
            self._forget(name)
        for name, offer in wanted.items():
            if name not in self._channels:
                host = None if offer.node == self._place.node else self._place.ip
                channel = self._channels[name] = GuestChannel(self._engine, host)
                self._news.set()
                for callback in self.on_folder:
                    callback(channel.addresses.folder)
            addresses = offer.channels.get(self._own)
            known = self._clients.get(name)
            if addresses is None or (known is not None and known[0] == addresses and known[1].fault is None):
                continue
            if known is not None:
                self._leave(known[1])
            client = EngineClient(self._config.engine, addresses, self._config.model_name, connected=True)
            self._clients[name] = addresses, client

    def _forget(self, name: str) -> None:
        if (channel := self._channels.pop(name, None)) is not None:
            channel.close()
        if (known := self._clients.pop(name, None)) is not None:
            self._leave(known[1])

    def _leave(self, client: EngineClient) -> None:
        task = asyncio.ensure_future(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _exchange(self, mine: bytes) -> dict[str, Offer]:
        store("put", self._prefix + self._own.encode(), mine, overwrite=True)
        found = {}
        for key, name, value in others(self._prefix, self._own):
            try:
                offer = msgspec.msgpack.decode(value, type=Offer)
            except msgspec.MsgspecError:  # of another version, during an update
                continue
            if self._ages.age(name, offer.at) < FORGET_S:
                found[name] = offer
            else:
                store("del", key)
        return found
