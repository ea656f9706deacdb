"""Failover of a front from the engine of its replica to the next one, when the engine has died.

A front has everything that an engine does not lose with its processes: what was asked for, and which tokens were
delivered. Noise is a function of a sequence's seed, of the position and of the token id, so a request that another
engine continues behind the delivered tokens gets the tokens that it would have had. A `FailoverEngine` therefore keeps
the streams of an engine that died, has another one started in its place, and asks that one for what is left of each.
Where there are other replicas, their engines go on at once. Who reads a stream waits, and sees nothing else.

An engine that died cannot say anything more: the next one has sockets, and between nodes keys, of its own, and every
output says at which token it begins, which must be the next one that its stream lacks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final
from weakref import WeakSet

from msgspec.structs import replace
from typing_extensions import override

from workers.processes.client import EngineClient, OutputMailbox, tell
from workers.protocol.front import EngineFault, ModelInfo, RequestFailed
from workers.protocol.messages import Charges, EngineStats, Request, RequestOutput
from workers.protocol.report import SelfTestReport
from workers.protocol.request import pack_tokens, unpack_tokens

logger = logging.getLogger(__name__)

MOST_ERRORS: Final = 2
"""Engines that may die of errors in their steps while they hold a request: it may be what they die of, so a third one
does not get it."""
MOST_DEATHS: Final = 4
"""Engines that may die in any way while they hold a request."""
MOST_LOSSES: Final = 3
"""Engines that may die within `LOSSES_S`; then the replica is given up, and no other one is started in its place."""
LOSSES_S: Final = 60.0

Restart = Callable[[], Awaitable[EngineClient]]
"""Ends what is left of the engine that died, starts another and waits until it can serve."""
Neighbors = Callable[[], Sequence[EngineClient]]
"""Engines of other replicas that serve the same, as `workers.processes.guests` lets them be used."""


class FailoverMailbox(OutputMailbox):
    """Outputs of one request on their way to its reader, from whichever engine has the request."""

    def __init__(self, request: Request, engine: FailoverEngine, arrived: float) -> None:
        """`arrived`: seconds, of the engine's clock. What is done of the request was delivered by another front."""
        super().__init__(on_abandon=partial(engine.abandon, request.request_id))
        self._request, self._engine, self._arrived = request, engine, arrived
        self._done = unpack_tokens(request.done)
        """Tokens that were delivered, whether they were read or not."""
        self._asked = self._deaths = self._errors = 0
        self.holder: EngineClient | None = None
        """The engine that was asked for it and lives."""
        self.root = engine.info.root if request.done else b""
        """Root (`ModelInfo.root`) of the engines that may go on with it: of the one that was asked first."""
        self.name = request.request_id
        """Name under which the request was asked for: another one each time, so that an engine that is asked twice
        mistakes neither for the other."""

    @override
    def put(self, output: RequestOutput) -> None:
        if output.tokens:
            if output.at != len(self._done):
                wrong = f"the engine gave tokens from number {output.at} on where number {len(self._done)} was due"
                self._engine.abandon(self._request.request_id)
                super().fail(RequestFailed(wrong))
                return
            self._done.extend(output.tokens)
        if output.finish is not None:
            self._engine.forget(self._request.request_id)
        super().put(output)

    @override
    def fail(self, error: Exception) -> None:
        """End with `error`; not with the death of an engine, after which `FailoverEngine` says what becomes of it."""
        if not isinstance(error, EngineFault):
            self._engine.forget(self._request.request_id)
            super().fail(error)

    @property
    def begun(self) -> bool:
        """Whether any token was delivered."""
        return bool(self._done)

    def end(self, error: EngineFault) -> None:
        """No engine goes on with it."""
        self._engine.forget(self._request.request_id)
        super().fail(error)

    def ask(self, client: EngineClient, now: float, *, new: bool = False) -> None:
        """Ask an engine for what is left of it; `new`: it arrived just now."""
        request = self._request
        if not new:
            if self._asked:
                self.name = f"{request.request_id}.{self._asked}"
            done = pack_tokens(self._done)
            request = replace(request, request_id=self.name, done=done, age_s=now - self._arrived)
        if not self.begun:
            self.root = client.info.root
        self._asked += 1
        self.holder = client
        client.generate(request, self)

    def continues_at(self, client: EngineClient) -> bool:
        """Whether an engine may go on with it: one with the same weights, once tokens of it were delivered."""
        return not self.begun or self.root == client.info.root

    def engine_died(self, of_an_error: bool) -> bool:
        """The engine that had it died; whether another one may have it."""
        self.holder = None
        self._deaths += 1
        self._errors += of_an_error
        return self._deaths < MOST_DEATHS and self._errors < MOST_ERRORS


class FailoverEngine:
    """Implements `workers.protocol.front.Engine` over one engine after the other, each an `EngineClient`.

    While its own engine is away, streams go on at the neighbor that has least to do, and to their end there; where
    there is none, they wait for the engine's return."""

    def __init__(
        self,
        client: EngineClient,
        restart: Restart,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
        neighbors: Neighbors = tuple,
    ) -> None:
        """`client`: an engine that is ready. `restart`: starts the next one. `patience_s`: how long streams wait for
        an engine; with 0 none is started, and the first death is the end. `neighbors`: those that can be used now."""
        self._restart, self._patience_s, self._clock = restart, patience_s, clock
        self._neighbors = neighbors
        self._streams: dict[str, FailoverMailbox] = {}  # in the order of their arrival
        self._losses: deque[float] = deque()
        self._closed = False
        self._reviving: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._watched: WeakSet[EngineClient] = WeakSet()
        """Neighbors of whose deaths this hears."""
        self._alive = self._newest = client
        """The engine that serves, or that served last."""
        self._info = client.info
        self.down = ""
        """Cause for which no engine serves at present; empty while one does."""
        self.fault: str | None = None
        """Cause with which requests are answered: no engine came within the patience, or none will."""
        self.over = False
        """No engine will serve here any more."""
        self.on_loss: list[Callable[[str], None]] = []
        """Functions that are called with the cause when an engine has died and another one is to be started."""
        self.on_return: list[Callable[[float], None]] = []
        """Functions that are called once it serves, with the seconds that passed."""
        self.on_fault: list[Callable[[str], None]] = []
        """Called once, with the cause, when the replica is given up. By then every stream has been told."""
        self.on_charges: list[Callable[[Charges], None]] = []
        self._adopt(client)

    @property
    def info(self) -> ModelInfo:
        """Description of the served model."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The newest figures of the scheduler; of one that died, its last ones."""
        return self._newest.stats

    @property
    def serving(self) -> EngineClient | None:
        """The engine of this replica that serves at present; None while none does."""
        return None if self.down else self._alive

    @property
    def selftest(self) -> SelfTestReport | None:
        """Report of the self-test of the serving engine; None if it did not run."""
        return self._newest.selftest

    @property
    def died_of_an_error(self) -> bool:
        """Whether the engine that is away died of an error in a step."""
        return self._alive.died_of_an_error

    @property
    def streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Those of them that no engine has."""
        return sum(stream.holder is None for stream in self._streams.values())

    def generate(self, request: Request) -> OutputMailbox:
        """Outputs of one request until it finishes, whichever engines come and go meanwhile. Closing the iterator early
        cancels the request.

        Iterating raises Refused if the scheduler does not take it, RequestFailed if it cannot be computed, EngineFault
        if no engine is there to go on with it in time.
        """
        now = self._clock()
        stream = FailoverMailbox(request, self, now - (request.age_s or 0.0))
        self._streams[request.request_id] = stream
        if not self.down:
            stream.ask(self._alive, now, new=True)
        else:
            self._at_neighbors((stream,))
            self._end_if_hopeless((stream,))
        return stream

    def abandon(self, request_id: str) -> None:
        """The reader of a request has left."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and stream.holder is not None:
            stream.holder.abandon(stream.name)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._streams.pop(request_id, None)

    def host(self, request: Request, mailbox: OutputMailbox) -> None:
        """Have the engine that serves generate for a request of another front (`workers.processes.guests`)."""
        self._alive.generate(request, mailbox)

    def leave(self, request_id: str) -> None:
        """Drop a request that nobody wants any more."""
        self._alive.abandon(request_id)

    def place_waiting(self) -> None:
        """Let streams that have no engine go on at a neighbor, if there is one by now."""
        waiting = [stream for stream in self._streams.values() if stream.holder is None]
        if waiting and not self.over:
            self._at_neighbors(waiting)

    def charged_elsewhere(self, charges: Charges) -> None:
        """Tell the scheduler what other replicas gave to API keys."""
        if not self.down:
            self._alive.charged_elsewhere(charges)

    async def health_check(self) -> None:
        """One real token through every rank; EngineFault when it does not come. It waits for no engine's return."""
        if self.down:
            raise EngineFault(self.fault or f"{self.down}; it is being started again")
        await self._alive.health_check()

    async def close(self) -> None:
        """End every stream, tell the engine to stop and leave its channel."""
        self._closed = True
        if self._reviving is not None:
            self._reviving.cancel()
        self._end("the replica is shutting down")
        await self._newest.close()

    def _adopt(self, client: EngineClient) -> None:
        self._alive = self._newest = client
        client.on_charges.append(lambda charges: tell(self.on_charges, charges))
        if client.fault is not None:
            self._lost(client, client.fault)
        else:
            client.on_fault.append(partial(self._lost, client))

    def _lost(self, client: EngineClient, cause: str) -> None:
        """The engine died."""
        if self._closed or client is not self._alive or self.down:
            return
        now = self._clock()
        self.down = cause
        self._losses.append(now)
        while self._losses[0] <= now - LOSSES_S:
            self._losses.popleft()
        bereaved = self._without(client, cause)
        if self._patience_s <= 0 or client.fault_is_lasting:
            self._give_up(cause)
        elif len(self._losses) >= MOST_LOSSES:
            self._give_up(f"{cause}; that is the third engine of this replica to die within {LOSSES_S:.0f} s")
        else:
            loop = asyncio.get_running_loop()
            if self._patience is None:
                self._patience = loop.call_later(self._patience_s, self._lose_patience, cause)
            self._at_neighbors(bereaved)
            elsewhere = sum(stream.holder is not None for stream in bereaved)
            logger.warning("%s; of %d streams %d go on at neighbors", cause, len(bereaved), elsewhere)
            self._reviving = loop.create_task(self._revive(client, cause, now))
            tell(self.on_loss, cause)

    def _neighbor_lost(self, client: EngineClient, cause: str) -> None:
        """An engine of another replica died, or cannot be heard any more."""
        bereaved = self._without(client, cause)
        if self._closed or not bereaved:
            return
        logger.warning("the engine of a neighbor is lost (%s), and %d streams go on elsewhere", cause, len(bereaved))
        if not self.down:
            now = self._clock()
            for stream in bereaved:
                self._ask_own(stream, cause, now)
        else:
            self._at_neighbors(bereaved)
            self._end_if_hopeless(bereaved)

    def _ask_own(self, stream: FailoverMailbox, cause: str, now: float) -> None:
        """Let a stream go on at this replica's engine, which serves; what other weights have begun ends."""
        if stream.continues_at(self._alive):
            stream.ask(self._alive, now)
        else:
            stream.end(EngineFault(f"{cause}; the next engine has other weights, or computes otherwise"))

    def _end_if_hopeless(self, streams: Sequence[FailoverMailbox]) -> None:
        """End streams that have no engine where nobody waits for one any more."""
        for stream in streams:
            if stream.holder is None and self.fault is not None:
                stream.end(EngineFault(self.fault))

    def _without(self, client: EngineClient, cause: str) -> list[FailoverMailbox]:
        """The streams that an engine had when it died, but for those that no other one may have, which end."""
        bereaved = [stream for stream in self._streams.values() if stream.holder is client]
        kept = []
        for stream in bereaved:
            if stream.engine_died(client.died_of_an_error):
                kept.append(stream)
            else:
                stream.end(EngineFault(cause))
        return kept

    def _at_neighbors(self, streams: Sequence[FailoverMailbox]) -> None:
        """Let streams go on at the neighbors that have least to do, those for which there is one."""
        load = {
            neighbor: neighbor.stats.running + neighbor.stats.waiting
            for neighbor in self._neighbors()
            if neighbor.fault is None
        }
        for neighbor in load:
            if neighbor not in self._watched:
                self._watched.add(neighbor)
                neighbor.on_fault.append(partial(self._neighbor_lost, neighbor))
        now = self._clock()
        for stream in streams:
            if able := [neighbor for neighbor in load if stream.continues_at(neighbor)]:
                chosen = min(able, key=load.__getitem__)
                load[chosen] += 1
                stream.ask(chosen, now)

    async def _revive(self, dead: EngineClient, cause: str, died: float) -> None:
        try:
            await dead.close()
            client = await self._restart()
        except Exception as error:
            logger.exception("the engine was not started again")
            self._give_up(f"{cause}; it could not be started again: {error or type(error).__name__}")
            return
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self.down, self.fault = "", None
        self._info = dataclasses.replace(client.info, created=self._info.created)
        self._adopt(client)
        if not self.down:
            now = self._clock()
            for stream in tuple(self._streams.values()):
                if stream.holder is None:
                    self._ask_own(stream, cause, now)
            tell(self.on_return, now - died)

    def _lose_patience(self, cause: str) -> None:
        """End the streams that wait for an engine. The engine's start goes on, and so do streams at neighbors."""
        self._patience = None
        self.fault = f"{cause}; no engine took its place within {self._patience_s:g} s"
        for stream in tuple(self._streams.values()):
            if stream.holder is None:
                stream.end(EngineFault(self.fault))

    def _give_up(self, cause: str) -> None:
        self.down = self.fault = cause
        self.over = True
        self._end(cause)
        tell(self.on_fault, cause)

    def _end(self, cause: str) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        for stream in tuple(self._streams.values()):
            if stream.holder is not None:
                stream.holder.abandon(stream.name)
            stream.end(EngineFault(cause))
