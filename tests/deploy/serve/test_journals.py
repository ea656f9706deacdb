"""Journals that a front begins and ends on connections that its clients use again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Scope

from deploy.api.http.body import BODY
from deploy.api.http.draws import Draws
from deploy.serve import journals
from deploy.serve.heir import _Answer
from deploy.serve.journals import Journals
from deploy.serve.splice import Splice
from deploy.serve.stream_watchdog import StreamWatchdog


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
