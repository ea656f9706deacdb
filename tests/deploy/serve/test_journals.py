"""Journals that a front begins and ends on connections that its clients use again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.types import Scope

from deploy.api.http.body import BODY
from deploy.api.http.draws import Draws
from deploy.serve import journals
from deploy.serve.heir import _Answer
from deploy.serve.journals import Journals
from deploy.serve.splice import Splice
from deploy.serve.stream_watchdog import StreamWatchdog
from workers.protocol.messages import RequestOutput


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Journals, asyncio.Transport, socket.socket]]:
    """Journals of a front, the transport of a connection, and its client."""
    loop, watchdog = asyncio.get_running_loop(), StreamWatchdog([b"words"] * 3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        front, _ = listener.accept()
    client.setblocking(False)
    with client:
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, front)
        yield Journals(watchdog, lambda: "same"), transport, client
        transport.abort()
    watchdog.close()


def asked(created: float | None = None) -> Scope:
    draws = Draws(None, created)
    return {
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
        BODY: b"{}",
        "latentserve.draws": draws,
    }


def cycle_of(transport: asyncio.Transport) -> Any:
    """As far as uvicorn's object of a request is looked at."""
    return SimpleNamespace(transport=transport)


async def test_the_age_of_a_stream_that_was_resumed_counts_from_the_request_that_resumed_it() -> None:
    async with connected() as (kept, transport, client):
        before, cycle = time.time(), cycle_of(transport)
        journal = kept.begin(asked(created=1_700_000_000.0), cycle, 0, True)
        assert journal is not None
        recorded = journal.read()
        began = recorded.began
        assert began.created == 1_700_000_000.0
        assert before <= began.arrived <= time.time()
        at_heir = _Answer(client, journal, recorded, Splice(b"", [], 0), (b"", b""))
        assert at_heir.age_s is not None
        assert at_heir.age_s <= time.time() - before
        kept.end(journal, cycle)


async def test_a_journal_is_released_before_the_next_answer_of_its_connection_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journals, "LINGER_S", 3600.0)
    async with connected() as (kept, transport, client):
        cycle = cycle_of(transport)
        first = kept.begin(asked(), cycle, 0, True)
        assert first is not None
        cycle.transport.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 24))
        assert transport.get_write_buffer_size()
        kept.end(first, cycle)
        assert list(kept._held) == [first]  # the client lacks some of it
        while transport.get_write_buffer_size():
            await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        second = kept.begin(asked(), cycle_of(transport), 0, True)
        assert second is not None
        assert list(kept._held) == [second]


async def test_the_journal_of_a_complete_answer_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    memories: list[int] = []

    def hold(self: StreamWatchdog, connection: int, words: int, journal: int) -> int:
        memories.append(os.dup(journal))
        return 1

    monkeypatch.setattr(StreamWatchdog, "hold", hold)
    async with connected() as (kept, transport, _):
        cycle = cycle_of(transport)
        journal = kept.begin(asked(), cycle, 0, True)
        assert journal is not None
        [memory] = memories
        assert os.pread(memory, 8, 0) > bytes(8)
        kept.end(journal, cycle)
        assert os.pread(memory, 8, 0) == bytes(8)
        os.close(memory)


PIECES = [b"data: a\n\n", b"", b"data: " + b"b" * 300 + b"\n\n", b"data: \xc3\xa4\n\n"]


async def test_pieces_that_are_written_straight_to_a_client_are_those_that_uvicorn_would_write() -> None:
    """And both ways a journal has them, in their order."""
    watchdog = StreamWatchdog([b"words"] * 3)
    kept = Journals(watchdog, lambda: "same")
    recorded: list[Any] = []
    directly = SimpleNamespace(wanted=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        journal = kept.begin({**scope, **asked(created=1.0)}, receive.__self__, 0, True)
        assert journal is not None
        assert journal.write_piece is not None
        assert not journal.write_piece(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for token, piece in enumerate(PIECES):
            journal.feeder(0)(RequestOutput("r", (token,), at=token))
            if not directly.wanted or not journal.write_piece(piece):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not journal.write_piece(b"too late")
        found = journal.read()
        recorded.append((found.head, found.written, found.outputs))
        kept.end(journal, receive.__self__)

    settings = uvicorn.Config(app, http="httptools", lifespan="off", log_level="error", date_header=False)
    server = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        answers: list[bytes] = []
        for directly.wanted in (False, True):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answers.append(await reader.read())
            writer.close()
        server.should_exit = True
        await serving
    watchdog.close()
    assert answers[0] == answers[1]
    assert all(piece in answers[0] for piece in PIECES)
    assert recorded[0] == recorded[1]
    assert [output.tokens for output in recorded[0][2][0]] == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("cycle", "disconnected", True),
        ("cycle", "response_complete", True),
        ("cycle", "chunked_encoding", False),
        ("cycle", "chunked_encoding", None),
        ("flow", "write_paused", True),
    ],
)
async def test_a_client_that_is_slow_or_has_left_is_written_to_by_uvicorn(where: str, name: str, value: Any) -> None:
    async with connected() as (kept, transport, client):
        flow = SimpleNamespace(write_paused=False)
        cycle = SimpleNamespace(
            transport=transport, flow=flow, chunked_encoding=True, response_complete=False, disconnected=False
        )
        journal = kept.begin(asked(), cycle, 0, True)
        assert journal is not None
        assert journal.write_piece is not None
        assert journal.write_piece(b"piece")
        setattr(cycle if where == "cycle" else flow, name, value)
        assert not journal.write_piece(b"another")
        assert await asyncio.get_running_loop().sock_recv(client, 100) == b"5\r\npiece\r\n"
        kept.end(journal, cycle)
        # With another uvicorn all is sent.
        other = kept.begin(asked(), cycle_of(transport), 0, True)
        assert other is not None
        assert other.write_piece is None
