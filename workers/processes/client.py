"""The front's end of a replica: requests out, streams of outputs back, in the front's asyncio loop.

A request's outputs wait for their reader in a mailbox (`OutputMailbox`). Messages to the scheduler are gathered for a
moment (`Outbox`): sequences that continue one prompt travel together.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from workers.channel.heartbeats import AwakeClock
from workers.channel.sockets import Addresses, Sender, connect_receiver, connect_sender, connect_subscriber
from workers.config import EngineConfig
from workers.protocol.front import EngineFault, ModelInfo, Refused, RequestFailed
from workers.protocol.messages import (
    Cancel,
    Charges,
    EngineStats,
    Fault,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    RequestOutput,
    Requests,
    Shutdown,
    TakeOver,
    ToFront,
)
from workers.protocol.plan import SamplingParams
from workers.protocol.report import SelfTestReport

logger = logging.getLogger(__name__)

T = TypeVar("T")
WATCH_PERIOD_S = 0.25
Group = tuple[int, int, str, bytes, SamplingParams, bool]
"""Identity of the prompt, priority, name of the API key, salt of its pages, sampling but for the seed, and whether it
is continued."""


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one."""
    return RequestOutput(
        request_id=outputs[0].request_id,
        tokens=tuple(token for output in outputs for token in output.tokens),
        finish=outputs[-1].finish,
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        cached_tokens=max(output.cached_tokens for output in outputs),
        accepted=tuple(draft for output in outputs for draft in output.drafts),
        prompt=outputs[0].prompt,
        queued=max(output.queued for output in outputs),
        offered=sum(output.offered for output in outputs),
        at=outputs[0].at,
    )


class OutputMailbox:
    """Outputs of one request on their way to one reader; an async iterator for `Engine.generate` to return.

    A reader that lags (a slow consumer holds its stream up) finds everything that arrived meanwhile merged into one
    output, so a slow stream costs one event, not a queue of them.
    """

    def __init__(self, on_abandon: Callable[[], None]) -> None:
        """`on_abandon` is called once if the reader leaves before the end; it cancels the request."""
        self._on_abandon = on_abandon
        self._ready: list[RequestOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, output: RequestOutput) -> None:
        """Add an output; on the reader's loop."""
        if not self._closed:
            self._ready.append(output)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with `error`, after what is already in the box."""
        if self._error is None and not self._closed:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputMailbox:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._ready:
            if self._closed:
                raise StopAsyncIteration
            if self._error is not None:
                self._closed = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        # Merged here, once, and not as they come: a reader that lags by thousands must not cost quadratic time.
        output = self._ready[0] if len(self._ready) == 1 else merge_outputs(self._ready)
        self._ready.clear()
        if output.finish is not None:
            self._closed = True
        return output

    async def aclose(self) -> None:
        """The reader leaves. Cancels the request unless its end was read."""
        if not self._closed:
            self._closed = True
            self._ready.clear()
            self._on_abandon()


class Outbox:
    """Collects the requests of one iteration of the event loop and sends those that differ in their ids, their seeds
    and what is done of them alone, as the choices of a request do, as one message: their prompts are one object.
    Packing a prompt takes a millisecond for some hundred thousand tokens, so the loop turns between two prompts."""

    def __init__(self, sender: Sender, refuse: Callable[[Request, str], None]) -> None:
        """Prepare the outbox, in the running event loop. `refuse` is told of a request that cannot be sent, and why."""
        self._sender, self._refuse = sender, refuse
        self._loop = asyncio.get_running_loop()
        self._groups: dict[Group, dict[str, Request]] = {}
        self._group_of: dict[str, Group] = {}

    def ask(self, request: Request) -> None:
        """Send it, with others that come before the loop turns."""
        if not self._groups:
            self._loop.call_soon(self._send)
        # The request keeps its prompt alive, so no other prompt has this identity meanwhile.
        continued, shared = request.age_s is not None, replace(request.sampling, seed=0)
        group = (id(request.prompt), request.priority, request.key, request.salt, shared, continued)
        self._groups.setdefault(group, {})[request.request_id] = request
        self._group_of[request.request_id] = group

    def cancel(self, request_id: str) -> None:
        """Take a request back: forgotten where it has not left, else the scheduler is told."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            self._sender.send(Cancel(request_id))
        else:
            del self._groups[group][request_id]

    def clear(self) -> None:
        """Send nothing of what has not left."""
        self._groups.clear()
        self._group_of.clear()

    def _send(self) -> None:
        """Send one group, the oldest."""
        if not self._groups:
            return  # cleared meanwhile
        requests = tuple(self._groups.pop(next(iter(self._groups))).values())
        for request in requests:
            del self._group_of[request.request_id]
        if self._groups:
            self._loop.call_soon(self._send)
        if not requests:
            return  # all were taken back
        try:
            message = Requests.of(requests)
        except OverflowError:
            for request in requests:
                self._refuse(request, "the prompt has a token id outside 0 ... 2^32 - 1")
        else:
            self._sender.send(message)


class EngineClient:
    """Implements `workers.protocol.front.Engine` over the channel. Single use: after a fault it only reports that
    (`workers.processes.failover` goes on with the next one)."""

    def __init__(self, config: EngineConfig, addresses: Addresses, name: str, connected: bool = False) -> None:
        """Connects in the running event loop; `ready` tells when the replica can serve. `connected`: it is given up
        when its connection breaks; for an engine whose processes are watched by nobody here."""
        self._config, self._name = config, name
        self._requests = connect_sender(addresses.requests, addresses.keys)
        self._outbox = Outbox(self._requests, self._refuse)
        self._outputs = connect_receiver(addresses.outputs, ToFront, addresses.keys)
        self._pulse = connect_subscriber(addresses.pulse, Heartbeat, addresses.keys)
        self._streams: dict[str, OutputMailbox] = {}
        self._closed = False
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._clock = AwakeClock()
        self._heard = self._clock.time
        self.stats = EngineStats()
        self.selftest: SelfTestReport | None = None
        self.start_s: dict[str, float] = {}
        self.fault: str | None = None
        self.fault_is_lasting = False
        """Another start would end the same."""
        self.died_of_an_error = False
        """The fault is an error in a step, which what was asked of the engine may have caused."""
        self.on_fault: list[Callable[[str], None]] = []
        """Functions that are called once, with the first cause."""
        self.on_progress: list[Callable[[str], None]] = []
        self.on_selftest: list[Callable[[SelfTestReport], None]] = []
        """Functions that are called before `ready`, once more when all graphs are captured where that is later, and
        before the fault that a failed self-test ends in."""
        self.on_charges: list[Callable[[Charges], None]] = []
        self._loop = asyncio.get_running_loop()
        self._fds = [receiver.socket.fileno() for receiver in (self._outputs, self._pulse)]
        for fd in self._fds:
            self._loop.add_reader(fd, self._drain)
        self._connected = connected
        if connected:
            self._fds.append(self._outputs.watch_connection())
            self._loop.add_reader(self._fds[-1], self._look_at_connection)
        self._watcher = self._loop.create_task(self._watch())

    @property
    def info(self) -> ModelInfo:
        """Description of the served model; RuntimeError before `ready`."""
        if not self._ready.done():
            raise RuntimeError("the replica is not ready yet")
        return self._ready.result()

    @property
    def serves(self) -> bool:
        """Whether it is ready and lives."""
        return self._ready.done() and self.fault is None

    async def ready(self, timeout_s: float | None = None) -> ModelInfo:
        """Wait until every rank is ready; EngineFault when one fails, TimeoutError after `timeout_s`."""
        # Messages may have arrived before the reader was added: the descriptor is edge-triggered.
        self._drain()
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._ready)

    async def take_over(self, timeout_s: float) -> ModelInfo:
        """Let an engine that stands by take the place of the one that served, whose processes must have ended. What was
        asked of it before ends with EngineFault. Returns what it is now. EngineFault when it cannot, TimeoutError after
        `timeout_s`."""
        if self.fault is not None:
            raise EngineFault(self.fault)
        rehearsals, self._streams = list(self._streams.values()), {}
        for mailbox in rehearsals:
            mailbox.fail(EngineFault("it takes the place of another engine"))
        self._outbox.clear()
        self._ready = self._loop.create_future()
        self._requests.send(TakeOver())
        return await self.ready(timeout_s)

    def generate(self, request: Request, mailbox: OutputMailbox | None = None) -> OutputMailbox:
        """Outputs of one request until it finishes, in `mailbox` if one is given: then whoever made that calls
        `abandon` when its reader leaves. Closing the iterator early cancels the request.

        Iterating raises Refused if the scheduler does not take it, RequestFailed if it cannot be computed, EngineFault
        if the replica fails meanwhile.
        """
        request_id = request.request_id
        mailbox = mailbox or OutputMailbox(on_abandon=lambda: self.abandon(request_id))
        if self.fault is not None:
            mailbox.fail(EngineFault(self.fault))
        else:
            self._streams[request_id] = mailbox
            self._outbox.ask(request)
        return mailbox

    def abandon(self, request_id: str) -> None:
        """Stop the output of a request that nobody reads any more: cancel it, unless it has ended."""
        if self._streams.pop(request_id, None) is not None and self.fault is None:
            self._outbox.cancel(request_id)

    def _refuse(self, request: Request, reason: str) -> None:
        self._deliver(RequestOutput(request.request_id, (), refused=reason))

    def charged_elsewhere(self, charges: Charges) -> None:
        """Tell the scheduler what other replicas gave to API keys."""
        if self.fault is None and charges.items:
            self._requests.send(charges)

    async def health_check(self) -> None:
        """Send one real token through every rank; EngineFault when it does not come."""
        request = Request(f"probe-{uuid.uuid4().hex}", (0,), SamplingParams(max_tokens=1, temperature=0.0), priority=-1)
        stream = self.generate(request)
        try:
            async for _ in stream:
                pass
        finally:
            await stream.aclose()  # who no longer waits must not leave it in the queue

    def fail(self, cause: str, lasting: bool = False, of_an_error: bool = False) -> None:
        """Declare the replica failed: every stream ends with EngineFault. Only the first cause counts. `lasting`,
        `of_an_error`: see `Fault`."""
        if self.fault is not None:
            return
        self.fault, self.fault_is_lasting, self.died_of_an_error = cause, lasting, of_an_error
        for mailbox in self._streams.values():
            mailbox.fail(EngineFault(cause))
        self._streams.clear()
        if not self._ready.done():
            self._ready.set_exception(EngineFault(cause, lasting))
            self._ready.exception()  # read here, so that nobody waiting is no warning
        tell(self.on_fault, cause)

    async def close(self) -> None:
        """Tell the replica to stop and leave the channel; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._watcher.cancel()
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._outbox.clear()
        self._requests.send(Shutdown())
        self.fail("the replica is shutting down")
        self._requests.close()
        self._outputs.close()
        self._pulse.close()

    def _drain(self) -> None:
        """Read all that has arrived. ZeroMQ's descriptors are edge-triggered: they must be read until empty."""
        try:
            while self._pulse.receive(timeout_ms=0) is not None:
                self._heard = self._clock.look()
            while (message := self._outputs.receive(timeout_ms=0)) is not None:
                self._dispatch(message)
        except msgspec.MsgspecError as error:
            self.fail(f"unreadable message from the scheduler: {error}")

    def _look_at_connection(self) -> None:
        """Before it serves, whoever is to be there may come yet, and ZeroMQ connects again."""
        if self._outputs.broke():
            self._drain()  # what was said before
            if self.serves:
                self.fail("the connection broke: the process at its other end has ended")

    def _dispatch(self, message: ToFront) -> None:
        self._heard = self._clock.look()
        match message:
            case Outputs():
                for item in message.items:
                    self._deliver(item)
            case EngineStats():
                self.stats = message
            case Ready():
                self.start_s = message.start_s
                if not self._ready.done():
                    self._ready.set_result(
                        ModelInfo(
                            name=self._name,
                            max_context=message.max_context,
                            vocab_size=message.vocab_size,
                            eos_ids=message.eos_ids,
                            max_width=message.width,
                            created=int(time.time()),
                            root=message.root,
                            cache_shards=message.cache_shards,
                        )
                    )
            case Charges():
                tell(self.on_charges, message)
            case Progress():
                who = f"rank {message.rank}" if message.rank >= 0 else "scheduler"
                tell(self.on_progress, f"{who}: {message.text}")
            case SelfTestReport():
                self.selftest = message
                tell(self.on_selftest, message)
            case Fault():
                self.fail(message.cause, message.lasting, message.in_step)

    def _deliver(self, item: RequestOutput) -> None:
        mailbox = self._streams.get(item.request_id)
        if mailbox is None:
            return
        if item.refused:
            mailbox.fail(Refused(item.refused, overloaded=item.overloaded, unavailable=item.unavailable))
        elif item.failed:
            mailbox.fail(RequestFailed(item.failed, item.dead_end))
        else:
            mailbox.put(item)
        if item.refused or item.failed or item.finish is not None:
            self._streams.pop(item.request_id, None)  # it may have been abandoned for what it got

    async def _watch(self) -> None:
        """The scheduler gives a sign of life several times a second; silence means it is gone, stopped or stuck."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            self._drain()
            if self._connected:
                self._look_at_connection()
            silent = self._clock.look() - self._heard
            if self._ready.done() and silent > self._config.heartbeat_timeout_s:
                self.fail(f"the scheduler has been silent for {silent:.1f} s")
            if self.fault is not None:
                return


def tell(callbacks: Sequence[Callable[[T], None]], news: T) -> None:
    """Call each with the news. One that fails keeps nobody from the messages behind this one, nor from the watch over
    the scheduler."""
    for callback in callbacks:
        try:
            callback(news)
        except Exception:
            logger.exception("a callback failed")
