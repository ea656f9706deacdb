"""Connections of answers that a stream watchdog holds, their journals, and the messages that bring them.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios

MESSAGE = struct.Struct("<BQ")
"""Kind and number. Descriptors come with some kinds; `BEAT` has the thread of the loop as its number, 0 where the
front ends in order, and behind it a byte, which is 1 where there are replicas on other nodes, and the paths of
sockets."""
FOLDER, RELEASE, BEAT, HOLD, HOLD_JOURNAL = 0, 1, 2, 3, 128
"""Kinds of messages. From `HOLD` on, and from `HOLD_JOURNAL` on where a journal comes with the connection, each number
says which last words a connection gets."""
MOST_BYTES = 64 * 1024
"""Bytes of a message, at most."""
_ACKNOWLEDGED = 120
"""Place of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_TCP_INFO_BYTES = 128


class Held:
    """A connection that is guarded."""

    def __init__(self, connection: int, words: int, journal: int | None) -> None:
        """Descriptors, which become this object's; `words`: which last words the connection gets."""
        self.connection, self.words, self.journal = socket.socket(fileno=connection), words, journal

    def close(self) -> None:
        """Let go of it."""
        self.connection.close()
        if self.journal is not None:
            os.close(self.journal)

    @property
    def streams(self) -> bool:
        """Whether the client has begun to get a stream, and no front is done with it."""
        if self.journal is None:
            return True
        valid, given_before, begun = struct.unpack("QQQ", os.pread(self.journal, 24, 0))
        return bool(valid and begun) and given_to(self.connection) > given_before

    @property
    def begun(self) -> bool:
        """Whether the client was sent a part of its answer."""
        if self.journal is None:
            return True
        [given_before] = struct.unpack("Q", os.pread(self.journal, 8, 8))
        return given_to(self.connection) > int(given_before)

    @property
    def noted(self) -> int:
        """Bytes of its journal: its request, and what was made of the answer."""
        return 0 if self.journal is None else int(struct.unpack("Q", os.pread(self.journal, 8, 0))[0])

    @property
    def left(self) -> bool:
        """Whether the client is gone, or says that it sends nothing more, which uvicorn takes for the same."""
        said = select.poll()
        said.register(self.connection, select.POLLRDHUP)
        return bool(said.poll(0))


def given_to(connection: socket.socket) -> int:
    """Bytes that the kernel was given to send over a TCP connection since it was made, whoever gave them."""
    before, now = -1, _acknowledged(connection)
    while now != before:  # what is acknowledged between the two looks would be in neither of them
        before = now
        [queued] = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
        now = _acknowledged(connection)
    return now + int(queued)


def _acknowledged(connection: socket.socket) -> int:
    """Bytes of a TCP connection that the other end has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    [acknowledged] = struct.unpack_from("Q", info, _ACKNOWLEDGED)
    return int(acknowledged)


def owned(journal: int) -> int | None:
    """Own a journal until the descriptor that is returned is closed; None where another process owns it."""
    try:
        # A lock belongs to an open file description, and the descriptor that is handed around shares one with others.
        own = os.open(f"/proc/self/fd/{journal}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(own)
        return None
    return own
