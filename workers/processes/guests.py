"""Streams of a neighbor: what the front of a replica does for another front whose engine is away.

For each neighbor a front binds a channel like a scheduler's (`workers.channel`). At the other end is an ordinary
`EngineClient`, so a front continues requests at a neighbor in no other way than with an engine of its own. What comes
over the channel is asked of this replica's engine, and what that says goes back.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Protocol

from typing_extensions import override

from workers.channel.sockets import Addresses, Binding, PeerGone
from workers.processes.client import OutputMailbox
from workers.protocol.front import EngineFault, ModelInfo, Refused, RequestFailed
from workers.protocol.messages import (
    Cancel,
    EngineStats,
    Fault,
    FromWorker,
    Heartbeat,
    Outputs,
    Ready,
    Request,
    RequestOutput,
    Requests,
    Shutdown,
    ToFront,
    ToScheduler,
)

PULSE_S: Final = 0.25
"""Seconds between two signs of life to a neighbor."""


class Host(Protocol):
    """Engine of this replica, as far as guests need it."""

    @property
    def down(self) -> str:
        """Cause for which no engine serves at present; empty while one does."""

    @property
    def died_of_an_error(self) -> bool:
        """Whether the engine that is away died of an error in a step."""

    @property
    def info(self) -> ModelInfo:
        """Description of the served model."""

    @property
    def stats(self) -> EngineStats:
        """The newest figures of the scheduler."""

    def host(self, request: Request, mailbox: OutputMailbox) -> None:
        """Have the engine that serves generate for a request of another front; outputs go to `mailbox`, which is told
        of the engine's death, too."""

    def leave(self, request_id: str) -> None:
        """Drop a request that nobody wants any more."""


class _GuestMailbox(OutputMailbox):
    """Hands outputs on to the neighbor as they come."""

    def __init__(self, channel: GuestChannel, request_id: str) -> None:
        super().__init__(on_abandon=lambda: None)
        self._channel, self._name = channel, request_id

    @override
    def put(self, output: RequestOutput) -> None:
        if output.finish is not None:
            self._channel.guests.discard(self._name)
        self._channel.say(Outputs((output,)))

    @override
    def fail(self, error: Exception) -> None:
        self._channel.guests.discard(self._name)
        match error:
            case EngineFault():
                self._channel.engine_died(str(error))
            case Refused():
                refused = RequestOutput(
                    self._name, (), refused=error.reason, overloaded=error.overloaded, unavailable=error.unavailable
                )
                self._channel.say(Outputs((refused,)))
            case RequestFailed():
                failed = RequestOutput(self._name, (), failed=str(error), dead_end=error.dead_end)
                self._channel.say(Outputs((failed,)))


class GuestChannel:
    """The end of a channel that one neighbor connects to."""

    def __init__(self, engine: Host, host: str | None, folder: Path | None = None) -> None:
        """Bind the channel. Call this in the running event loop. `host`: ip of this node when the neighbor is on
        another; otherwise sockets are files in `folder`, by default a fresh one."""
        self._engine = engine
        self._binding = Binding(0, host, ToScheduler, FromWorker, folder)
        # A neighbor that is not there, or not yet, holds this front's loop up for nothing.
        self._binding.outputs.never_wait()
        self._binding.pulse.never_wait()
        self.guests: set[str] = set()
        """Requests of the neighbor that run here."""
        self._loop = asyncio.get_running_loop()
        self._fd = self._binding.requests.socket.fileno()
        self._loop.add_reader(self._fd, self._drain)
        self._beating = self._loop.create_task(self._beat())

    @property
    def addresses(self) -> Addresses:
        """Addresses to which the neighbor connects."""
        return self._binding.addresses

    def say(self, message: ToFront) -> None:
        """Tell the neighbor, unless it has left: then nobody is told, and nothing goes on for it."""
        try:
            self._binding.outputs.send(message)
        except PeerGone:
            self._turn_out()

    def engine_died(self, cause: str) -> None:
        """Whoever has streams here takes them elsewhere."""
        self.guests.clear()
        self.say(Fault(cause, in_step=self._engine.died_of_an_error))

    def close(self) -> None:
        """Close the channel and go on with no guest."""
        self._beating.cancel()
        self._turn_out()
        self.say(Fault("the replica is shutting down"))
        self._loop.remove_reader(self._fd)
        self._binding.close()

    def _turn_out(self) -> None:
        for name in tuple(self.guests):
            self._engine.leave(name)
        self.guests.clear()

    async def _beat(self) -> None:
        """An engine that serves is ready, and says how busy it is; one that is away says nothing."""
        while True:
            self._drain()  # what came before anybody listened
            if not self._engine.down:
                info = self._engine.info
                self._binding.pulse.send(Heartbeat(-1))
                self.say(Ready(-1, 0, info.max_context, info.vocab_size, info.max_width, info.eos_ids, root=info.root))
                self.say(self._engine.stats)
            await asyncio.sleep(PULSE_S)

    def _drain(self) -> None:
        while (message := self._binding.requests.receive(timeout_ms=0)) is not None:
            match message:
                case Requests():
                    for request in message.unpack():
                        self._take_in(request)
                case Cancel():
                    self.guests.discard(message.request_id)
                    self._engine.leave(message.request_id)
                case Shutdown():
                    if self.guests:
                        self._turn_out()
                        # Whoever is there by now may have asked already, and is to know that nothing comes.
                        self.engine_died("the channel was closed")

    def _take_in(self, request: Request) -> None:
        if self._engine.down:
            self.engine_died(self._engine.down)
            return
        self.guests.add(request.request_id)
        self._engine.host(request, _GuestMailbox(self, request.request_id))
