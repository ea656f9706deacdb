"""What a stream watchdog writes: the end of streams that no front goes on with, lines to stderr, and the cause.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING

from deploy.serve.held_connection import Held, owned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WRITE_TIMEOUT_S = 1.0
"""Seconds for all streams together; a client that reads slower than that sees its connection break."""


def end(held: Sequence[Held], last_words: Sequence[bytes]) -> None:
    """Write the last event and the end of the body to each stream, as far as it takes them; close what is no stream, or
    has none of its answer: proxies ask another replica then. Where a front owns the journal, only that one writes."""
    endings = [b"%x\r\n%s\r\n0\r\n\r\n" % (len(words), words) for words in last_words]
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    for one in held:
        own = None if one.journal is None else owned(one.journal)
        if (one.journal is None or own is not None) and one.streams:
            if own is not None:
                # A front that hung may still have the message: it finds nothing to go on with.
                os.pwrite(own, bytes(8), 0)
            _write(one.connection, endings[one.words], deadline)
        if own is not None:
            os.close(own)
        one.close()


def say(text: str) -> None:
    """Write a line to stderr, where somebody reads it: what did may have died together with the front."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def note(file: Path, text: str, since: float) -> None:
    """Write `text` unless the file was written `since` (Unix time); nothing where its folder is gone."""
    with contextlib.suppress(OSError):
        if not file.exists() or file.stat().st_mtime < since:
            file.write_text(text)


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.setblocking(False)
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            room = select.poll()  # select(2) takes no descriptor above 1,023, and a busy front has more streams
            room.register(connection, select.POLLOUT)
            if not room.poll(1000 * max(deadline - time.monotonic(), 0)):
                return
        except OSError:
            return
