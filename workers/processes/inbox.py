"""Inbox of the scheduler: messages of the front, taken in a little in every iteration of its loop.

Looking at a prompt's ids and hashing its pages takes time that grows with the prompt. Requests that come together,
however many and however long, must not keep the loop from planning steps: what one iteration does not take in waits
here, in order. Where requests name API keys the keys take turns, so that one which floods keeps no other's out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from workers.channel.sockets import Receiver
from workers.protocol.messages import Cancel, Charges, Request, Requests, Shutdown, TakeOver
from workers.protocol.request import TOKEN_BYTES

ITERATION_TOKENS = 100_000
"""Prompt tokens that one iteration takes in before it stops: a few milliseconds of work. A prompt is never divided, and
counts once for all who share it."""
READ_BYTES = 8 << 20
"""Bytes that one iteration takes off the socket before it stops, which only copies them."""
REQUEST_TOKENS = 250
"""Cost of a request itself, or of any other message, in tokens."""


class Inbox:
    """The requests that wait to be taken in, and the socket behind them."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._waiting: dict[str, Request] = {}
        self._lines: OrderedDict[str, OrderedDict[str, Request]] = OrderedDict()  # by key, the next one's turn first
        self._last: Sequence[int] = ()

    @property
    def waiting(self) -> int:
        """Requests that were received and not taken in."""
        return len(self._waiting)

    def take(self) -> list[Request | Cancel | Charges | TakeOver | Shutdown]:
        """Return the messages that this iteration of the loop takes in. Messages that end something do not wait behind
        those that begin something: a `Shutdown` comes at once, and so does a `Cancel`. A `Cancel` leaves nothing of a
        request that still waits here, not even an output: whoever cancels does not listen any more."""
        taken = self._read()
        spent = 0
        while self._waiting and spent < ITERATION_TOKENS:
            request = self._next()
            taken.append(request)
            spent += self._cost(request)
        return taken

    def _next(self) -> Request:
        key, line = next(iter(self._lines.items()))
        name, request = line.popitem(last=False)
        del self._waiting[name]
        if line:
            self._lines.move_to_end(key)
        else:
            del self._lines[key]
        return request

    def _take_back(self, name: str) -> bool:
        """Forget a request that waits here; whether it did."""
        request = self._waiting.pop(name, None)
        if request is None:
            return False
        line = self._lines[request.key]
        del line[name]
        if not line:
            del self._lines[request.key]
        return True

    def _read(self) -> list[Request | Cancel | Charges | TakeOver | Shutdown]:
        """Take messages off the socket; returns those that wait for nothing."""
        passing: list[Request | Cancel | Charges | TakeOver | Shutdown] = []
        read = 0
        while read < READ_BYTES and (message := self._receiver.receive(timeout_ms=0)) is not None:
            read += REQUEST_TOKENS * TOKEN_BYTES
            match message:
                case Requests():
                    read += len(message.prompt) + REQUEST_TOKENS * TOKEN_BYTES * len(message.choices)
                    read += sum(len(done) for done, _ in message.continued)
                    for request in message.unpack():
                        if request.request_id in self._waiting:
                            passing.append(request)  # the scheduler refuses one of the two
                        else:
                            self._waiting[request.request_id] = request
                            self._lines.setdefault(request.key, OrderedDict())[request.request_id] = request
                case Cancel():
                    if not self._take_back(message.request_id):
                        passing.append(message)
                case Charges() | TakeOver() | Shutdown():
                    passing.append(message)
        return passing

    def _cost(self, request: Request) -> int:
        sampling = request.sampling
        own = REQUEST_TOKENS + len(sampling.logit_bias) + len(sampling.stop_ids) + len(request.done) // TOKEN_BYTES
        shared, self._last = request.prompt is self._last, request.prompt
        return own if shared else own + len(request.prompt)
