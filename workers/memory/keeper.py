"""Handles of a weight keeper (`workers.memory.keeper_process`): of who starts it, and of those who talk to it. No torch
here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from workers.memory import keeper_process
from workers.memory.keeper_process import Kept, Message, receive, send

_FOLDER: Final = "latentserve-weights-"
_SOCKET: Final = "keeper"
_SHORT: Final = "/tmp"
_SOCKET_PATH: Final = 107
"""Most bytes of a socket's path on Linux, see unix(7)."""
_PATIENCE_S: Final = 30.0
"""Seconds for an answer: others may be asking, each for `keeper_process.PATIENCE_S` at the most."""
_KILLED_S: Final = 5.0
"""Seconds for the end of a keeper that was killed: who closes it may be an event loop."""


class WeightKeeper:
    """A weight keeper, in the process that starts it and in whose life it lives."""

    def __init__(self) -> None:
        """Prepare; the process begins with the first `path`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def path(self) -> Path:
        """Where ranks connect. Starts the process where there is none, or none any more: then nothing is kept yet."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        assert self._folder is not None
        return self._folder / _SOCKET

    @property
    def pid(self) -> int | None:
        """Process id; None before it is started."""
        return None if self._process is None else self._process.pid

    def lacks(self, slots: Sequence[str]) -> str:
        """Why not all of these slots have something, and will have nothing before somebody hands it in anew; empty
        where they do. Waits for an answer: not for an event loop. OSError where the process lives and gives none."""
        process, folder = self._process, self._folder  # another thread may start the next one meanwhile
        if process is None or folder is None:
            return "no weight keeper could be started"
        if process.poll() is not None:
            return "the weight keeper has ended"
        there = KeeperClient(folder / _SOCKET).slots()
        missing = [slot for slot in slots if slot not in there]
        return f"the weight keeper has nothing of {', '.join(missing)}" if missing else ""

    def _start(self) -> None:
        self._folder = _new_folder()
        # Bound here: who connects before the process runs waits for it.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._folder / _SOCKET))
            listener.listen(64)
            number = listener.fileno()
            # Signals that the process ignores wait until it does.
            ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-SE", keeper_process.__file__, str(number), str(self._folder)],
                    stdin=subprocess.PIPE,
                    pass_fds=(number,),
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the process, and all that it keeps; harmless when repeated. Waits a few seconds at most."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.kill()
            self._process.stdin.close()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # the kernel frees its memory, and Python forgets it later
                self._process.wait(_KILLED_S)
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class KeeperClient:
    """What a rank asks a weight keeper. All raise OSError where there is none, or none that answers."""

    def __init__(self, path: Path) -> None:
        """`path`: see `WeightKeeper.path`."""
        self._path = path

    def ask(self, slot: str, fingerprint: str, *, let_go: bool = True) -> tuple[Message, list[int]] | None:
        """What is kept in this slot, with its descriptors, which are the caller's to close. None if nothing is; what
        is there with another fingerprint is let go, unless somebody else needs it."""
        question = {"kind": "ask", "slot": slot, "fingerprint": fingerprint, "let_go": let_go}
        answer, descriptors = self._talk(question)
        return None if answer["what"] is None else (answer["what"], descriptors)

    def keep(self, slot: str, what: Message, descriptors: Sequence[int]) -> None:
        """Keep copies of these descriptors, in the place of what is in the slot. `what`: what `ask` gives, with a
        `fingerprint` and the `size` in bytes."""
        self._talk({"kind": "keep", "slot": slot, "what": what}, descriptors)

    def forget(self, slot: str) -> None:
        """Let go what is in this slot."""
        self._talk({"kind": "forget", "slot": slot})

    def slots(self) -> frozenset[str]:
        """Slots that have something."""
        return frozenset(self._talk({"kind": "slots"})[0]["slots"])

    def drop(self) -> dict[str, int]:
        """Let everything go; the bytes that were kept, by slot."""
        dropped: dict[str, int] = self._talk({"kind": "drop"})[0]["dropped"]
        return dropped

    def note(self, key: str, value: Any) -> None:
        """Remember a value, which JSON can say."""
        self._talk({"kind": "note", "key": key, "value": value})

    def recall(self, key: str) -> Any:
        """The value that was noted; None where none was."""
        return self._talk({"kind": "recall", "key": key})[0]["value"]

    def _talk(self, message: Message, descriptors: Sequence[int] = ()) -> tuple[Message, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(_PATIENCE_S)
            channel.connect(str(self._path))
            send(channel, message, list(descriptors))
            try:
                answer, found = receive(channel)
            except ValueError as error:
                raise ConnectionError(f"no weight keeper answers at {self._path}: {error}") from error
        if "error" in answer:
            keeper_process.close_all(found)
            raise ConnectionError(f"the weight keeper at {self._path} says: {answer['error']}")
        return answer, found


class LaterKeeper(KeeperClient):
    """Takes the place of a weight keeper that is not there yet: what a rank gives it stays in this process, until all
    of that is handed to one. Threads may use it side by side."""

    def __init__(self) -> None:
        """It has nothing."""
        super().__init__(Path())
        self._kept: Kept | None = Kept()
        self._there, self._lock = False, threading.Lock()

    def hand_over(self, path: Path | None) -> None:
        """Give all of it to the weight keeper at `path`, and talk to that one from now on. OSError where it does not
        answer: then nothing is kept any more, nor where `path` is None."""
        with self._lock:
            kept, self._kept = self._kept, None
            assert kept is not None, "this is done once"
            try:
                if path is not None:
                    self._path, self._there = path, True
                    for message, descriptors in kept.all():
                        super()._talk(message, descriptors)
            finally:
                kept.close()

    @override
    def _talk(self, message: Message, descriptors: Sequence[int] = ()) -> tuple[Message, list[int]]:
        with self._lock:
            if self._kept is None:
                if not self._there:
                    raise ConnectionError("there is no weight keeper")
                return super()._talk(message, descriptors)
            said: Message = json.loads(json.dumps(message))  # as another process has it
            answer, found = self._kept.answer(said, [os.dup(each) for each in descriptors])
            return answer, [os.dup(each) for each in found]


def cache_slot(rank: int) -> str:
    """Slot of the cache of a rank that serves."""
    return f"rank {rank}, cache"


def drop_all() -> dict[Path, dict[str, int]]:
    """Let everything go that keepers of this user on this machine keep: the bytes by slot, of each keeper."""
    dropped = {}
    for folder in sorted({*Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"), *Path(_SHORT).glob(f"{_FOLDER}*")}):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            dropped[folder] = KeeperClient(folder / _SOCKET).drop()
    return dropped


def _new_folder() -> Path:
    """A folder that only this user enters, whose name leaves room for a socket's path."""
    usual = tempfile.gettempdir()
    longest = len(os.fsencode(usual)) + len(f"/{_FOLDER}12345678/{_SOCKET}")
    return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=usual if longest <= _SOCKET_PATH else _SHORT))
