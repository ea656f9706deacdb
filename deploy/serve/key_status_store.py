"""Use of API keys across replicas. Each replica tells the others once a second, through Ray's key-value store, what its
clients have taken of their keys' limits and what they were given, so that limits and fair shares hold for all of them
together.

What is taken between two reports is known to its own replica alone. A store that hangs holds up one thread and no
request: each replica then goes on with what it heard last.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from deploy.api.limits.keys import KeyRing, Spent
from deploy.serve.progress import others, store
from deploy.serve.report_ages import ReportAges
from workers.processes.failover import FailoverEngine

logger = logging.getLogger("latentserve.replica")

PERIOD_S = 1.0
"""Seconds between two reports."""
FORGET_S = 10.0
"""Seconds without a report after which a replica's sequences count as ended."""
DROP_S = 60.0
"""Seconds after which its report is dropped."""


class _Report(msgspec.Struct):
    at: float
    """Unix time, seconds."""
    keys: dict[str, Spent]


class KeyStatusStore:
    """A replica's own report, and those of all others, which `keys` hear."""

    def __init__(self, application: str, replica: str, keys: KeyRing) -> None:
        """Begin the exchange. Call this in the running event loop."""
        self._prefix, self._own = f"keys/{application}/".encode(), replica
        self._keys, self._ages = keys, ReportAges()
        self._client: FailoverEngine | None = None
        self._exchanging = asyncio.ensure_future(self._keep_exchanging())

    def serving(self, client: FailoverEngine) -> None:
        """Connect `client`: from now on its scheduler says what it gives to keys, and hears what others give them."""
        client.on_charges.append(self._keys.charged)
        self._client = client

    def close(self) -> None:
        """Tell nothing any more; the last report is dropped by others."""
        self._exchanging.cancel()

    async def _keep_exchanging(self) -> None:
        while True:
            mine = msgspec.msgpack.encode(_Report(time.time(), self._keys.spent()))
            try:
                # Awaited: while the store hangs no more threads wait for it.
                reports = await asyncio.to_thread(self._exchange, mine)
                charges = self._keys.hear(
                    self._own,
                    {name: report.keys for name, report in reports.items()},
                    {name: self._ages.age(name, report.at) for name, report in reports.items()},
                )
                if self._client is not None:
                    self._client.charged_elsewhere(charges)
            except Exception:  # Ray's, of many kinds: its head may be away for a while
                logger.debug("what API keys have taken could not be exchanged", exc_info=True)
            await asyncio.sleep(PERIOD_S)

    def _exchange(self, mine: bytes) -> dict[str, _Report]:
        store("put", self._prefix + self._own.encode(), mine, overwrite=True)
        found = {}
        for key, name, value in others(self._prefix, self._own):
            try:
                report = msgspec.msgpack.decode(value, type=_Report)
            except msgspec.MsgspecError:  # of another version, during an update
                continue
            age = self._ages.age(name, report.at)
            if age < FORGET_S:
                found[name] = report
            elif age > DROP_S:
                store("del", key)
        return found
