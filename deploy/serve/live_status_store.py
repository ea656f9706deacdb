"""Current state of the replicas of an application. Each tells the others its own once a second, through Ray's key-value
store.

A replica that dies without a word is noticed by its silence, so nobody has to be asked, and whoever answers `/live`
waits for no other replica. A store that hangs holds up one thread and no stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any, Literal

from pydantic import ValidationError

from deploy.observability.live import PERIOD_S, ReplicaState, Window
from deploy.serve.progress import others, store
from deploy.serve.report_ages import ReportAges
from workers.processes.failover import FailoverEngine
from workers.processes.hot_standby import HotStandby

logger = logging.getLogger("latentserve.replica")

SILENT_S = 5.0
"""Seconds without a report after which a replica counts as silent."""
FORGET_S = 60.0
"""Seconds after which the report of a replica that failed or fell silent is dropped."""
PATIENCE_S = 1.0
"""Seconds that an answer waits for the store; after them what was read last is shown."""


class LiveStatusStore:
    """A replica's own report, and those of all others: the `Replicas` of its front."""

    def __init__(self, application: str, replica: str) -> None:
        self.own = replica
        self._prefix = f"live/{application}/".encode()
        self._state: Literal["starting", "serving", "failed"] = "starting"
        self._cause = ""
        self._client: FailoverEngine | None = None
        self.standby: HotStandby[Any] | None = None
        """What keeps a second engine standing by, where one is asked for."""
        self._window = Window()
        self._lock = threading.Lock()
        self._closed = False
        self._ages = ReportAges()
        self._others: dict[str, tuple[ReplicaState, float]] = {}
        """The last report of each other replica, and the time at which it was made."""
        self._reading: asyncio.Task[None] | None = None
        self._telling = asyncio.ensure_future(self._keep_telling())

    def serving(self, client: FailoverEngine) -> None:
        """Report the figures of `client` from now on."""
        self._client, self._state, self._cause = client, "serving", ""

    def starting_again(self, cause: str) -> None:
        """The engine died of `cause`, and is started again."""
        self._state, self._cause = "starting", cause

    def failed(self, cause: str) -> None:
        """Tell the cause of the replica's end at once, and wait for nothing: streams are to be told, too."""
        self._telling.cancel()
        self._state, self._cause = "failed", cause
        threading.Thread(target=self._put, daemon=True).start()

    def close(self) -> None:
        """The replica ends in order: take its report away."""
        self._telling.cancel()
        if self._state != "failed":
            thread = threading.Thread(target=self._take_away, daemon=True)
            thread.start()
            thread.join(PATIENCE_S)

    async def states(self) -> list[ReplicaState]:
        """Return the states of all replicas, in the order of their names."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
        await asyncio.wait({self._reading}, timeout=PATIENCE_S)
        now = self._ages.now()
        others = [shown(state, now - made) for state, made in self._others.values() if now - made < FORGET_S]
        return sorted([*others, self.report()], key=lambda state: state.name)

    def report(self) -> ReplicaState:
        """Return the current state of this replica."""
        figures = None if self._client is None else self._window.figures(self._client.stats)
        standby: Literal["ready", "away"] | None = None
        if self.standby is not None:
            standby = "ready" if self.standby.ready else "away"
        state, cause = self._state, self._cause
        return ReplicaState(name=self.own, state=state, cause=cause, at=time.time(), standby=standby, figures=figures)

    async def _keep_telling(self) -> None:
        while True:
            if self._client is not None:
                self._window.sample(self._client.stats)
            # Awaited: while the store hangs no more threads wait for it.
            await asyncio.to_thread(self._put)
            await asyncio.sleep(PERIOD_S)

    def _put(self) -> None:
        with self._lock:  # what is told last is what was known last
            if self._closed:
                return
            try:
                store("put", self._key(self.own), self.report().model_dump_json().encode(), overwrite=True)
            except Exception:  # Ray's, of many kinds: its head may be away for a while
                logger.debug("this replica's figures could not be told", exc_info=True)

    def _take_away(self) -> None:
        with self._lock:
            self._closed = True
            try:
                store("del", self._key(self.own))
            except Exception:
                logger.debug("this replica's figures could not be taken away", exc_info=True)

    def _read(self) -> None:
        try:
            self._others = self._found()
        except Exception:
            logger.debug("the figures of other replicas could not be read", exc_info=True)

    def _found(self) -> dict[str, tuple[ReplicaState, float]]:
        found = {}
        for key, name, value in others(self._prefix, self.own):
            try:
                state = ReplicaState.model_validate_json(value)
            except ValidationError:  # of another version, during an update
                continue
            made = self._ages.made(name, state.at)
            if self._ages.now() - made < FORGET_S:
                found[name] = state, made
            else:
                store("del", key)
        return found

    def _key(self, replica: str) -> bytes:
        return self._prefix + replica.encode()


def shown(state: ReplicaState, age_s: float) -> ReplicaState:
    """A report that was made `age_s` seconds ago, as it counts now."""
    silent = state.state != "failed" and age_s > SILENT_S
    return state.model_copy(update={"state": "silent", "figures": None}) if silent else state
