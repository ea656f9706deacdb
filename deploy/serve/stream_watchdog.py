"""Ends the streams of a front that died without a word: SIGKILL, out of memory, a crash in native code.

A replica that fails tells its streams so itself. One that is killed cannot, and its clients would only see their
connection break. So every streaming connection is also held by a small process of its own, which does nothing until the
front's end of their socket pair closes, then writes the error event and the end of the body that the front could not,
and notes the cause for those who come next. A front that hangs, or was stopped, it ends: Ray Serve would take half a
minute to notice, and then wait for its streams.

It must outlive the front and weigh nothing: no imports but the standard library's, a few megabytes, no work per token.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Sequence

_MESSAGE = struct.Struct("<BQ")
_FOLDER, _RELEASE, _BEAT, _HOLD = 0, 1, 2, 3
"""Kinds of messages. Behind `_HOLD` each number says which last words a connection gets."""
BEAT_S = 0.25
"""Seconds between two signs of life of a front."""
LEAST_SILENCE_S = 4 * BEAT_S
"""However short the patience: a sign may come a little late."""
WRITE_TIMEOUT_S = 1.0
"""Seconds for all streams together; a client that reads slower than that sees its connection break."""


class StreamWatchdog:
    """The front's handle of its stream watchdog."""

    def __init__(
        self,
        last_words: Sequence[bytes],
        folder: Path | None = None,
        note: tuple[Path, str] | None = None,
        silence_s: float = 10.0,
    ) -> None:
        """`last_words`: the events that streams end with, such as `data: {"error": ...}` and a blank line; `hold` says
        which of them a stream does. `folder`: where the replica's socket files are, to be removed in the front's place.
        `note`: a file and its text, written unless somebody wrote there in this front's time: then it noted the cause
        itself. `silence_s`: seconds without a `beat` after which this process is killed, counted from the first; no
        fewer than `LEAST_SILENCE_S`."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._next = 0
        self._loop: AbstractEventLoop | None = None
        self._unsent: dict[int, tuple[int, int | None]] = {}
        """Messages that the channel has no room for yet: by number their kind and a descriptor to hold, if any."""
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-SE", __file__, str(theirs.fileno()), str(silence_s), _packed(last_words)),
                    *(str(folder or ""), *(map(str, (*note, time.time())) if note else ())),
                ],
                pass_fds=(theirs.fileno(),),
                # Its own session: a signal to the front's process group must not reach it.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the stream watchdog."""
        return self._process.pid

    def hold(self, connection: int, words: int = 0) -> int | None:
        """Guard a connection (file descriptor) whose chunked body has begun, and which gets the last words of that
        number; returns what `release` takes.

        None when it cannot be guarded: then nothing is lost but the last words.
        """
        self._next += 1
        if self._unsent or not self._send(_HOLD + words, self._next, connection):
            try:
                self._keep(
                    self._next, _HOLD + words, os.dup(connection)
                )  # it may be closed, and its number another's, by then
            except OSError:
                return None
        return self._next

    def release(self, held: int | None) -> None:
        """The body is complete, or the client left."""
        if held is None:
            return
        if (unsent := self._unsent.pop(held, None)) is not None:
            if unsent[1] is not None:
                os.close(unsent[1])
        elif self._unsent or not self._send(_RELEASE, held):
            self._keep(held, _RELEASE, None)

    def remove_at_end(self, folder: Path | None) -> None:
        """Name the folder that has the replica's socket files from now on; None: there are none."""
        if folder is None:
            return
        self._next += 1
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if self._unsent or not self._send(_FOLDER, self._next, descriptor):
            self._keep(self._next, _FOLDER, descriptor)
        else:
            os.close(descriptor)

    def beat(self) -> None:
        """The front's loop turns; to be called every `BEAT_S`."""
        self._send(_BEAT, 0)

    def _send(self, kind: int, number: int, descriptor: int | None = None) -> bool:
        """False when there is no room: the watchdog is given the processor after everybody else."""
        rights = [] if descriptor is None else [array.array("i", [descriptor])]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right) for right in rights]
        try:
            self._socket.sendmsg([_MESSAGE.pack(kind, number)], ancillary)
        except BlockingIOError:
            return False
        except OSError:
            return True  # it is gone, and nobody is waited for
        return True

    def _keep(self, number: int, kind: int, descriptor: int | None) -> None:
        if self._loop is None:
            from asyncio import get_running_loop  # the watchdog itself, which runs this file, does without

            self._loop = get_running_loop()
        if not self._unsent:
            self._loop.add_writer(self._socket, self._send_kept)
        self._unsent[number] = kind, descriptor

    def _send_kept(self) -> None:
        """Send what was kept, now that there is room again."""
        while self._unsent:
            number, (kind, descriptor) = next(iter(self._unsent.items()))
            if not self._send(kind, number, descriptor):
                return
            del self._unsent[number]
            if descriptor is not None:
                os.close(descriptor)
        assert self._loop is not None
        self._loop.remove_writer(self._socket)

    def close(self) -> None:
        """End it; no stream is left. Its end is not waited for."""
        self._process.kill()
        if self._loop is not None:
            self._loop.remove_writer(self._socket)
        self._socket.close()


def keep(
    channel: socket.socket, silence_s: float = math.inf, folders: list[str] | None = None
) -> list[tuple[socket.socket, int]]:
    """The watchdog's life: keep connections while the front lives; returns those that are left, and which words each
    gets. `folders` become those that are to be removed then."""
    held: dict[int, tuple[socket.socket, int]] = {}
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
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE.size, 1)
        if not data:
            return list(held.values())
        kind, number = _MESSAGE.unpack(data)
        if kind >= _HOLD and descriptors:
            held[number] = socket.socket(fileno=descriptors[0]), kind - _HOLD
        elif kind == _FOLDER and descriptors:
            if folders is not None:
                folders.append(os.readlink(f"/proc/self/fd/{descriptors[0]}"))
            os.close(descriptors[0])
        elif kind == _RELEASE and number in held:
            held.pop(number)[0].close()
        beats |= kind == _BEAT


def end(connections: list[tuple[socket.socket, int]], last_words: Sequence[bytes]) -> None:
    """Write the last event and the end of the body to each, as far as it takes them."""
    endings = [b"%x\r\n%s\r\n0\r\n\r\n" % (len(words), words) for words in last_words]
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    for connection, words in connections:
        _write(connection, endings[words], deadline)
        connection.close()


def note(file: Path, text: str, since: float) -> None:
    """Write `text` unless the file was written `since` (Unix time); nothing where its folder is gone."""
    with contextlib.suppress(OSError):
        if not file.exists() or file.stat().st_mtime < since:
            file.write_text(text)


def _packed(last_words: Sequence[bytes]) -> str:
    return ",".join(words.hex() for words in last_words)


def _unpacked(last_words: str) -> list[bytes]:
    return [bytes.fromhex(words) for words in last_words.split(",")]


def _write(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.setblocking(False)
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            if not select.select([], [connection], [], max(deadline - time.monotonic(), 0))[1]:
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
    left = keep(socket.socket(fileno=number), float(sys.argv[2]), folders)
    if sys.argv[5:]:  # first, for clients that ask why their stream ended
        note(Path(sys.argv[5]), sys.argv[6], float(sys.argv[7]))
    end(left, _unpacked(sys.argv[3]))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
