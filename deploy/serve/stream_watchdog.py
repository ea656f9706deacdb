"""Hands the answers of a front that died without a word to another one: SIGKILL, out of memory, a crash in native code.

A replica that fails tells its streams so itself. One that is killed cannot, and its clients would only see their
connection break. So the connections of answers are also held by a small process of its own
(`deploy.serve.watchdog_process`), which does nothing until the front's end of their socket pair closes. Then it hands
each connection to the front of another replica, with the journal of its answer (`deploy.serve.journal`), and that one
writes the rest. Where there is none, answers wait for one that comes. For streams that nobody takes it writes the error
event and the end of the body that the front could not, and notes the cause for those who come next. A front that hangs,
or was stopped, it ends: Ray Serve would take half a minute to notice, and then wait for its streams.
"""

from __future__ import annotations

import array
import json
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Sequence
from pathlib import Path

from deploy.serve import watchdog_process
from deploy.serve.held_connection import BEAT, FOLDER, HOLD, HOLD_JOURNAL, MESSAGE, MOST_BYTES, RELEASE

LEAVE_S = 0.5
"""Seconds in which a watchdog reads what it was sent before, when a front that ends has something to say: less than a
loop may stand still."""


class StreamWatchdog:
    """The front's handle of its stream watchdog."""

    def __init__(
        self,
        last_words: Sequence[bytes],
        folder: Path | None = None,
        note: tuple[Path, str] | None = None,
        silence_s: float = 10.0,
        shared: Path | None = None,
        patience_s: float = 0.0,
        sent_again_bytes: float = math.inf,
    ) -> None:
        """`last_words`: the events that streams end with, such as `data: {"error": ...}` and a blank line; `hold` says
        which of them a stream does. `folder`: where the replica's socket files are, to be removed in the front's place.
        `note`: a file and its text, written unless somebody wrote there in this front's time: then it noted the cause
        itself. `silence_s`: seconds without a `beat` after which this process is killed, counted from the first; no
        fewer than `LEAST_SILENCE_S`, and fewer seconds do where the kernel says that it hangs (`STOPPED_S` and others).
        `shared`: the folder of this node's fronts (`deploy.serve.heir.shared_folder`), in which answers that no front
        goes on with wait `patience_s` seconds for one that comes. `sent_again_bytes`: requests up to this long whose
        answers have not begun are sent to replicas of other nodes by proxies, if there are any, and do not wait."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._next = 0
        self._loop: AbstractEventLoop | None = None
        self._told = b"\0"
        """What the last beat said of other fronts."""
        self._unsent: dict[int, tuple[int, Sequence[int]]] = {}
        """Messages that the channel has no room for yet: by number their kind and descriptors to hold, if any."""
        told = {
            "silence_s": silence_s,
            "patience_s": patience_s,
            "sent_again_bytes": sent_again_bytes,
            "last_words": [words.hex() for words in last_words],
            "folder": str(folder or ""),
            "shared": str(shared or ""),
            "starter": os.getppid(),
            "note": (str(note[0]), note[1], time.time()) if note else None,
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-SE", watchdog_process.__file__, str(theirs.fileno()), json.dumps(told)],
                pass_fds=(theirs.fileno(),),
                # Its own session: a signal to the front's process group must not reach it.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the stream watchdog."""
        return self._process.pid

    def hold(self, connection: int, words: int = 0, journal: int | None = None) -> int | None:
        """Guard a connection (file descriptor) whose chunked body has begun, and which gets the last words of that
        number; or one whose answer has a `journal`, a memfd, before anything of it is written. Returns what `release`
        takes.

        None when it cannot be guarded: then nothing is lost but the last words.
        """
        self._next += 1
        kind, descriptors = HOLD + words, [connection]
        if journal is not None:
            kind, descriptors = HOLD_JOURNAL + words, [connection, journal]
        if self._unsent or not self._send(kind, self._next, descriptors):
            kept: list[int] = []
            try:
                for descriptor in descriptors:  # it may be closed, and its number another's, by then
                    kept.append(os.dup(descriptor))
            except OSError:
                for descriptor in kept:
                    os.close(descriptor)
                return None
            self._keep(self._next, kind, kept)
        return self._next

    def release(self, held: int | None) -> None:
        """The body is complete, or the client left."""
        if held is None:
            return
        if (unsent := self._unsent.pop(held, None)) is not None:
            for descriptor in unsent[1]:
                os.close(descriptor)
        elif self._unsent or not self._send(RELEASE, held):
            self._keep(held, RELEASE, ())

    def remove_at_end(self, folder: Path | None) -> None:
        """Name the folder that has the replica's socket files from now on; None: there are none."""
        if folder is None:
            return
        self._next += 1
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if self._unsent or not self._send(FOLDER, self._next, (descriptor,)):
            self._keep(self._next, FOLDER, (descriptor,))
        else:
            os.close(descriptor)

    def beat(self, heirs: Sequence[str] = (), elsewhere: bool = False) -> None:
        """The front's loop turns; to be called every `BEAT_S`, in its thread. `heirs`: the sockets at which fronts of
        other replicas take answers over, if this one dies before its next beat. `elsewhere`: whether there are replicas
        on other nodes, which can answer what has not begun."""
        paths, size = [], MESSAGE.size + 1
        for path in map(os.fsencode, heirs):
            if (size := size + len(path) + 1) > MOST_BYTES:
                break
            paths.append(path)
        self._told = bytes([elsewhere]) + b"\0".join(paths)
        self._send(BEAT, threading.get_native_id(), more=self._told)

    def leave(self) -> None:
        """The front ends in order, and its loop may stand still meanwhile: its silence says nothing any more. Waits
        `LEAVE_S` at the most for the watchdog to read. What the last beat told of other fronts stays."""
        deadline = time.monotonic() + LEAVE_S
        while not self._send(BEAT, 0, more=self._told) and (left_s := deadline - time.monotonic()) > 0:
            room = select.poll()
            room.register(self._socket, select.POLLOUT)
            room.poll(1000 * left_s)

    def _send(self, kind: int, number: int, descriptors: Sequence[int] = (), more: bytes = b"") -> bool:
        """False when there is no room: the watchdog is given the processor after everybody else."""
        rights = [array.array("i", descriptors)] if descriptors else []
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right) for right in rights]
        try:
            self._socket.sendmsg([MESSAGE.pack(kind, number) + more], ancillary)
        except BlockingIOError:
            return False
        except OSError:
            return True  # it is gone, and nobody is waited for
        return True

    def _keep(self, number: int, kind: int, descriptors: Sequence[int]) -> None:
        if self._loop is None:
            self._loop = get_running_loop()
        if not self._unsent:
            self._loop.add_writer(self._socket, self._send_kept)
        self._unsent[number] = kind, descriptors

    def _send_kept(self) -> None:
        """Send what was kept, now that there is room again."""
        while self._unsent:
            number, (kind, descriptors) = next(iter(self._unsent.items()))
            if not self._send(kind, number, descriptors):
                return
            del self._unsent[number]
            for descriptor in descriptors:
                os.close(descriptor)
        assert self._loop is not None
        self._loop.remove_writer(self._socket)

    def close(self) -> None:
        """End it; no stream is left. Its end is not waited for."""
        self._process.kill()
        if self._loop is not None:
            self._loop.remove_writer(self._socket)
        self._socket.close()
