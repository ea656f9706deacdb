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
    from collections.abc import Iterable, Sequence

MESSAGE = struct.Struct("<BQ")
"""Kind and number. Descriptors come with some kinds, and the paths of sockets with `BEAT`."""
FOLDER, RELEASE, BEAT, HOLD, HOLD_JOURNAL = 0, 1, 2, 3, 128
"""Kinds of messages. From `HOLD` on, and from `HOLD_JOURNAL` on where a journal comes with the connection, each number
says which last words a connection gets."""
MOST_BYTES = 64 * 1024
"""Bytes of a message, at most."""
ANSWER = struct.Struct("<QB")
"""Of a front that is handed an answer: its number, and whether it, or another front, goes on with it."""
WORD_S = 1.0
"""Seconds in which a front that is handed answers says whether it takes the next one, before others are asked."""
HEIR_S = 10.0
"""The same once all others were asked: about as long as a front may be silent before its own watchdog ends it. A stream
that waits for a busy front is better than one that ends."""
RELEASED_S = 5.0
"""Seconds in which the kernel releases the locks of a front that died, at the most. It takes some milliseconds, and
longer where others need the processors."""
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
    """Hand answers that have a journal to fronts of other replicas; returns those that no front goes on with.

    Every answer is offered to every front until one takes it. They begin at different ones, so that the fronts share
    them. Fronts that said nothing for `WORD_S` are asked once more in the end, for `HEIR_S`: whatever they may have
    taken in the meantime is theirs, since who owns a journal goes on with its answer."""
    left = dict(enumerate(one for one in held if one.journal is not None))
    _wait_until_released(left.values())
    silent = _offer(left, heirs, WORD_S)
    _offer(left, silent, HEIR_S)
    if left:
        asked = ", ".join(heirs) or "there was none"
        print(f"guardian: no front goes on with {len(left)} answers; asked: {asked}", file=sys.stderr, flush=True)
    return [*left.values(), *(one for one in held if one.journal is None)]


def _offer(left: dict[int, Held], heirs: Sequence[str], patience_s: float) -> list[str]:
    """Offer the answers that are left, by their numbers, to one front after the other; those that are taken are left no
    more. Returns the fronts that said nothing for `patience_s`, each of which was asked once."""
    silent: list[str] = []
    for turn in range(len(heirs)):
        lots = []
        for place, heir in enumerate(heirs):
            numbers = [number for number in left if (number + turn) % len(heirs) == place]
            if numbers and heir not in silent:
                lots.append(_Lot(heir, {number: left[number] for number in numbers}))
        _hand_out(lots, patience_s)
        for lot in lots:
            for number in lot.taken:
                left.pop(number).close()
        silent += [lot.heir for lot in lots if lot.silent]
        # A front that died may have owned some of them. One that is silent still does.
        _wait_until_released([left[number] for lot in lots if lot.died for number in lot.answers if number in left])
    return silent


class _Lot:
    """Answers that one front is handed."""

    def __init__(self, heir: str, answers: dict[int, Held]) -> None:
        """`heir`: path of the front's socket. `answers`: by their numbers."""
        self.heir, self.answers = heir, answers
        self.taken: list[int] = []
        """Numbers of those that the front said it, or another one, goes on with."""
        self.silent = self.died = False
        """Whether it said nothing in time; whether it is not there, or no more."""
        self.heard = time.monotonic()
        """When it said something last."""
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self._waiting, self._under_way = list(answers), 0
        try:
            self.channel.connect(heir)
        except BlockingIOError:  # it has not taken in those who came before for long
            self.silent = True
        except OSError:
            self.died = True

    @property
    def over(self) -> bool:
        """Whether nothing more is to be handed over, or heard."""
        return self.silent or self.died or not (self._waiting or self._under_way)

    def hand(self) -> None:
        """Hand over as many as may be under way."""
        try:
            while self._waiting and self._under_way < _UNDER_WAY and not self.over:
                one = self.answers[number := self._waiting[0]]
                assert one.journal is not None
                socket.send_fds(self.channel, [MESSAGE.pack(one.words, number)], [one.connection.fileno(), one.journal])
                del self._waiting[0]
                self._under_way += 1
        except BlockingIOError:
            pass  # there is room again once it has said something
        except OSError:
            self.died = True

    def hear(self) -> None:
        """Take down what it said."""
        try:
            while self._under_way:
                data = self.channel.recv(ANSWER.size)
                if len(data) != ANSWER.size:
                    self.died = True
                    return
                number, goes_on = ANSWER.unpack(data)
                self.heard = time.monotonic()
                self._under_way -= 1
                if goes_on:
                    self.taken.append(number)
        except BlockingIOError:
            pass
        except OSError:
            self.died = True


def _hand_out(lots: Sequence[_Lot], patience_s: float) -> None:
    """Hand several fronts their answers, side by side: who waits for one of them keeps nobody from the others."""
    for lot in lots:
        lot.hand()
    while waiting := {lot.channel.fileno(): lot for lot in lots if not lot.over}:
        said = select.poll()
        for descriptor in waiting:
            said.register(descriptor, select.POLLIN)
        left_s = min(lot.heard for lot in waiting.values()) + patience_s - time.monotonic()
        for descriptor, _ in said.poll(1000 * max(left_s, 0)):
            waiting[descriptor].hear()
            waiting[descriptor].hand()
        now = time.monotonic()
        for lot in waiting.values():
            lot.silent = not lot.over and now >= lot.heard + patience_s
    for lot in lots:
        lot.channel.close()


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


def _wait_until_released(held: Iterable[Held]) -> None:
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
