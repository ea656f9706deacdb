"""The process behind `deploy.serve.stream_watchdog`.

It must outlive the front and weigh nothing: no imports but the standard library's, a few megabytes, no work per token.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import socket
import struct
import sys
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MESSAGE = struct.Struct("<BQ")
"""Kind and number. Descriptors come with some kinds, and the paths of sockets with `BEAT`."""
FOLDER, RELEASE, BEAT, HOLD, HOLD_JOURNAL = 0, 1, 2, 3, 128
"""Kinds of messages. From `HOLD` on, and from `HOLD_JOURNAL` on where a journal comes with the connection, each number
says which last words a connection gets."""
MOST_BYTES = 64 * 1024
"""Bytes of a message, at most."""
ANSWER = struct.Struct("<QB")
"""Of a front that is handed an answer: its number, and whether it, or another front, goes on with it."""
HEIR_S = 10.0
"""Seconds in which a front that is handed answers says whether it takes the next one: about as long as a front may be
silent before its own watchdog ends it. A stream that waits for a busy front is better than one that ends."""
RELEASED_S = 1.0
"""Seconds in which the kernel releases the locks of a front that died, at the most; it takes some milliseconds."""
_UNDER_WAY = 32
"""Answers that one front is handed before it has said anything."""
_ACKNOWLEDGED = 120
"""Place of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_TCP_INFO_BYTES = 128
BEAT_S = 0.25
"""Seconds between two signs of life of a front."""
LEAST_SILENCE_S = 4 * BEAT_S
"""However short the patience: a sign may come a little late."""
WRITE_TIMEOUT_S = 1.0
"""Seconds for all streams together; a client that reads slower than that sees its connection break."""


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
        """Whether the client has begun to get a stream."""
        if self.journal is None:
            return True
        given_before, begun = struct.unpack("QQ", os.pread(self.journal, 16, 8))
        return bool(begun) and given_to(self.connection) > given_before


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


def keep(
    channel: socket.socket,
    silence_s: float = math.inf,
    folders: list[str] | None = None,
    heirs: list[str] | None = None,
) -> list[Held]:
    """The watchdog's life: keep connections while the front lives; returns those that are left. `folders` become those
    that are to be removed then, `heirs` the sockets of fronts that take answers over."""
    held: dict[int, Held] = {}
    front, beats, quiet = os.getppid(), False, 0.0
    while True:
        # Counted, not measured: a machine that stood still for a while let nobody give a sign.
        if not select.select([channel], [], [], BEAT_S)[0]:
            quiet += BEAT_S
            if beats and quiet >= max(silence_s, LEAST_SILENCE_S) and os.getppid() == front:
                print(f"guardian: the front was silent for {quiet:g} s and is killed", file=sys.stderr, flush=True)
                os.kill(front, signal.SIGKILL)
            continue
        quiet = 0.0
        data, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, 2)
        if not data:
            return list(held.values())
        kind, number = MESSAGE.unpack_from(data)
        if kind >= HOLD_JOURNAL and len(descriptors) == 2:
            held[number] = Held(descriptors[0], kind - HOLD_JOURNAL, descriptors[1])
        elif HOLD <= kind < HOLD_JOURNAL and len(descriptors) == 1:
            held[number] = Held(descriptors[0], kind - HOLD, None)
        elif kind >= HOLD:  # the kernel leaves out what a process has no numbers for
            for descriptor in descriptors:
                os.close(descriptor)
        elif kind == FOLDER and descriptors:
            if folders is not None:
                folders.append(os.readlink(f"/proc/self/fd/{descriptors[0]}"))
            os.close(descriptors[0])
        elif kind == RELEASE and number in held:
            held.pop(number).close()
        elif kind == BEAT and heirs is not None:
            heirs[:] = map(os.fsdecode, data[MESSAGE.size :].split(b"\0") if data[MESSAGE.size :] else ())
        beats |= kind == BEAT


def hand_over(held: Sequence[Held], heirs: Sequence[str]) -> list[Held]:
    """Hand answers that have a journal to fronts of other replicas, each to the next one; returns those that no front
    goes on with."""
    left, rest = [one for one in held if one.journal is not None], [one for one in held if one.journal is None]
    _wait_until_released(left)
    for turn in range(len(heirs)):
        lots: list[list[Held]] = [[] for _ in heirs]
        for number, one in enumerate(left):
            lots[(number + turn) % len(heirs)].append(one)
        left = [one for heir, lot in zip(heirs, lots, strict=True) for one in _hand_to(heir, lot)]
        _wait_until_released(left)
    return left + rest


def _owned(journal: int) -> int | None:
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


def _wait_until_released(held: Sequence[Held]) -> None:
    """Wait until no process owns the journals, `RELEASED_S` at the most.

    The channel of a front that died may close before its locks are released. A front that was handed an answer in
    between would find its journal taken, and nobody would go on with it."""
    waiting, deadline = list(held), time.monotonic() + RELEASED_S
    while True:
        taken = []
        for one in waiting:
            assert one.journal is not None
            if (own := _owned(one.journal)) is None:
                taken.append(one)
            else:
                os.close(own)
        waiting = taken
        if not waiting or time.monotonic() >= deadline:
            return
        time.sleep(0.001)


def _hand_to(heir: str, lot: list[Held]) -> list[Held]:
    """Hand answers to one front; returns those that it did not say it takes, or that another has."""
    given = dict(enumerate(lot))
    waiting = list(given)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(HEIR_S)
            channel.connect(heir)
            under_way = 0
            while waiting or under_way:
                if waiting and under_way < _UNDER_WAY:
                    one = given[number := waiting.pop(0)]
                    assert one.journal is not None
                    socket.send_fds(channel, [MESSAGE.pack(one.words, number)], [one.connection.fileno(), one.journal])
                    under_way += 1
                    continue
                data = channel.recv(ANSWER.size)
                if len(data) != ANSWER.size:
                    break
                number, taken = ANSWER.unpack(data)
                under_way -= 1
                if taken:
                    given.pop(number).close()
    except OSError:
        pass  # it has died, too, or hangs; who owns the journals says what it had taken
    return list(given.values())


def end(held: Sequence[Held], last_words: Sequence[bytes]) -> None:
    """Write the last event and the end of the body to each stream, as far as it takes them; close what is no stream, or
    has none of its answer: proxies ask another replica then. Where a front owns the journal, only that one writes."""
    endings = [b"%x\r\n%s\r\n0\r\n\r\n" % (len(words), words) for words in last_words]
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    for one in held:
        own = None if one.journal is None else _owned(one.journal)
        if (one.journal is None or own is not None) and one.streams:
            if own is not None:
                # A front that hung may still have the message: it finds nothing to go on with.
                os.pwrite(own, bytes(8), 0)
            _write(one.connection, endings[one.words], deadline)
        if own is not None:
            os.close(own)
        one.close()


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


if __name__ == "__main__":
    # It ends after its front, and has most to do where somebody signals both.
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    # Nothing but the channel: an inherited descriptor could keep a port or a pipe of the front open.
    number = int(sys.argv[1])
    os.closerange(3, number)
    os.closerange(number + 1, 1024)
    folders = [sys.argv[4]] if sys.argv[4] else []
    heirs: list[str] = []
    left = keep(socket.socket(fileno=number), float(sys.argv[2]), folders, heirs)
    if sys.argv[5:]:  # first, for clients that ask why their stream ended
        note(Path(sys.argv[5]), sys.argv[6], float(sys.argv[7]))
    end(hand_over(left, heirs), [bytes.fromhex(words) for words in sys.argv[3].split(",")])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
