"""Journals of the answers that a front writes, and what it holds for each: the connection under guard, and a transport
that takes down what is written."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from starlette.types import Scope

from deploy.api.generation.journaling import CONVERSATION, WritePiece
from deploy.api.http.body import BODY
from deploy.api.http.draws import Draws
from deploy.api.http.errors import failure_of
from deploy.serve.held_connection import given_to
from deploy.serve.journal import Began, Journal, JournalledTransport
from deploy.serve.stream_watchdog import StreamWatchdog

logger = logging.getLogger("latentserve.replica")

MOST_BYTES: Final = 1 << 30
"""Bytes of all journals together; answers that come beyond them have none."""
CHECK_EVERY: Final = 16
"""Journals that are begun between two looks at how much all of them take."""
LINGER_S: Final = 0.05
"""Seconds between two looks at what a slow client still has to read of an answer."""
CLOSING_S: Final = 60.0
"""Seconds for which it is looked at where the connection is being closed."""


class Journals:
    """Begins and ends the journals of a front's answers."""

    def __init__(self, watchdog: StreamWatchdog, fingerprint: Callable[[], str], most_bytes: int = MOST_BYTES) -> None:
        """`fingerprint`: what is served here, as `NeighborStore.answers_as` has it."""
        self._watchdog, self._fingerprint, self._most_bytes = watchdog, fingerprint, most_bytes
        self._begun, self._full = 0, False
        self._held: dict[Journal, tuple[int | None, Any]] = {}
        self._lingering: dict[Any, Journal] = {}
        """By transport: of answers that are complete, and that the kernel did not have all of."""

    @property
    def lingering(self) -> bool:
        """Whether there are journals of answers that are complete."""
        return bool(self._lingering)

    def begin(self, scope: Scope, cycle: Any, checksum: int, ordinary: bool) -> Journal | None:
        """Begin the journal of the answer to a request of which nothing is written yet. `cycle`: uvicorn's object of
        the request. `checksum`: of its prompts. `ordinary`: see `Began`. None where there is no room for one."""
        transport = cycle.transport
        connection, draws = transport.get_extra_info("socket"), scope["latentserve.draws"]
        if not isinstance(draws, Draws) or connection is None or transport.get_write_buffer_size():
            return None
        self.release_before(transport)
        began = Began(
            self._fingerprint(),
            scope["path"],
            scope["query_string"],
            [(bytes(name), bytes(value)) for name, value in scope["headers"]],
            scope[BODY],
            draws.secret,
            draws.created,
            draws.arrived,
            checksum,
            ordinary,
            scope.get(CONVERSATION),
        )
        scope[BODY] = b""
        if self._begun % CHECK_EVERY == 0:
            self._full = sum(journal.size for journal in self._held) > self._most_bytes
        self._begun += 1
        if self._full:
            return None
        try:
            with socket.socket(fileno=os.dup(connection.fileno())) as own:
                given = given_to(own)
            journal, memory = Journal.begin(began, given)
        except OSError:  # no descriptors, no memory, no TCP
            logger.warning("an answer has no journal", exc_info=True)
            return None
        try:
            held = self._watchdog.hold(connection.fileno(), failure_of(scope["path"]), memory)
        finally:
            os.close(memory)
        self._held[journal] = held, transport
        cycle.transport = JournalledTransport(transport, journal)
        journal.write_piece = _piece_writer(cycle)
        return journal

    def end(self, journal: Journal, cycle: Any) -> None:
        """An answer is complete, or its client left. Its journal stays until the kernel has all of it."""
        _, cycle.transport = self._held[journal]
        self._release(journal, CLOSING_S)

    def release_before(self, transport: Any) -> None:
        """The next answer of a connection is about to begin: release the journal of the one before where the kernel has
        all of it. If this front died, the last words of that one would go into the next one."""
        if not transport.get_write_buffer_size() and (journal := self._lingering.get(transport)) is not None:
            self._let_go(journal)

    def _release(self, journal: Journal, left_s: float) -> None:
        if journal not in self._held:
            return  # the next answer has begun
        _, transport = self._held[journal]
        if transport.get_write_buffer_size() and left_s > 0:
            left_s -= LINGER_S if transport.is_closing() else 0
            self._lingering[transport] = journal
            asyncio.get_running_loop().call_later(LINGER_S, self._release, journal, left_s)
            return
        self._let_go(journal)

    def _let_go(self, journal: Journal) -> None:
        held, transport = self._held.pop(journal)
        self._lingering.pop(transport, None)
        self._watchdog.release(held)
        journal.end()


def _piece_writer(cycle: Any) -> WritePiece | None:
    """Return what writes a piece as uvicorn's object of the request does, but for what it asks first: nothing of that
    concerns a piece in the middle of an answer, unless the client is slow or has left. None where it is another object
    than that of the uvicorn this was written for."""
    if not all(hasattr(cycle, name) for name in ("flow", "chunked_encoding", "response_complete", "disconnected")):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_piece(body: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or flow.write_paused:
            return False
        # In HTTP/1.1 an empty chunk is the last one.
        write(b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        return True

    return write_piece
