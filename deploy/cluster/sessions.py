"""A Ray of our own is kept out of reach of signals to our process group, and is ended to the last process all the same.

`timeout`, shells and supervisors signal the whole group of what they end. Ray's daemons would end at once, and with
them the streams and every way to end the rest in order. So each daemon begins a session of its own: only this process
hears the signal, and ends Ray when it is done with it. Where somebody signals every single process, Ray is gone, and
what asks it for anything waits for a minute: then `Watch` ends this process. A Ray that was joined may be gone as well.

Written for Ray 2.60.0, which starts its daemons by a private part of it. Where it does not, a line is logged, and they
stay in our process group.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from deploy.cluster import cleanup_process
from deploy.cluster.cleanup_process import CleanupProcess
from kernels.private_api import PrivateApi

_DAEMONS: Final = PrivateApi(
    "ray",
    ("ray._private.services.ConsolePopen",),
    "Ray's daemons stay in this command's process group: a signal to the group ends them, and every stream, at once; "
    "and where this process is killed nobody ends them for it",
)

LEAVE_S = 2.0
"""Seconds that processes of a Ray that has ended may take to end by themselves."""
LIMIT_S = 5.0
"""Seconds until all of them must be gone."""
HURRY_S = 10.0
"""Seconds that ending a Ray in order may take where nothing else is waited for."""
LOOK_S = 0.2
KNOCK_PERIOD_S = 1.0
"""Seconds between two attempts to reach a Ray that was joined."""
KNOCK_TIMEOUT_S = 2.0
"""Longest time of one."""
KNOCKS: Final = 3
"""Attempts in a row that fail where that Ray has ended: a head node that is busy, or restarts, may miss one."""


class Sessions:
    """The sessions of a Ray of our own, one a daemon, and the folder of its temporary files. A Ray that was joined has
    sessions of somebody else, and is looked for at its address."""

    def __init__(self) -> None:
        self._joined, self._failed, self._knocked = "", 0, -math.inf
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._missing: list[subprocess.Popen[bytes]] = []
        self._others: set[int] = set()
        self._folders: set[Path] = set()
        self._closing = self._broken = False
        self._folder: Path | None = None
        self._cleanup: CleanupProcess | None = None
        self._lock = threading.Lock()

    def keep(self, folder: Path) -> None:
        """Remove `folder` with the last process, even if this one is killed."""
        self._folder, self._cleanup = folder, CleanupProcess(folder)
        for leader in self._others:
            self._cleanup.add(leader)
        for each in self._folders:
            self._cleanup.add_folder(each)

    def add(self, leader: int, folder: Path) -> None:
        """Have the session that this process leads be killed once Ray has ended, though it is none of its daemons, and
        have its `folder` removed. Before `keep`. Its id must stay its own: nobody waits for it until `end`."""
        self._others.add(leader)
        self._folders.add(folder)

    @contextmanager
    def of_their_own(self) -> Iterator[None]:
        """The daemons that Ray starts within begin sessions of their own, where this Ray lets them. After `keep`."""
        if not _DAEMONS.there():
            yield
            return
        from ray._private import services

        popen: Any = services.ConsolePopen

        def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            process: subprocess.Popen[bytes] = popen(*arguments, **options, start_new_session=True)
            self._daemons.append(process)
            assert self._cleanup is not None
            self._cleanup.add(process.pid)
            return process

        services.ConsolePopen = start
        try:
            yield
        finally:
            services.ConsolePopen = popen
        if not self._daemons:
            _DAEMONS.lost("daemon that ray._private.services.ConsolePopen starts")

    def forget(self) -> bool:
        """Kill the daemons of a Ray that has not come up, with their sessions, for another one in its place. Whether
        there were any: where Ray starts them otherwise, nobody here knows them."""
        with self._lock:
            daemons, self._daemons = self._daemons, []
            cleanup_process.end({daemon.pid for daemon in daemons}, 0.0, LIMIT_S)
            self._missing.clear()
            self._broken = False
        return bool(daemons)

    def join(self, address: str) -> None:
        """Note that somebody else's Ray is used, whose head node listens at `address` (host:port)."""
        self._joined = address

    @property
    def joined(self) -> bool:
        """Whether the Ray is somebody else's."""
        return bool(self._joined)

    @property
    def begun(self) -> bool:
        """Whether there is a Ray: not before one is started or joined."""
        return self.joined or bool(self._daemons)

    def look(self, ending: bool) -> bool:
        """Whether somebody else has ended Ray; to be called again and again. While it is `ending` any of its daemons
        says so, before only those without which it answers nobody: the others may have failed long ago.

        Signalled together with the others, those two take ten seconds to end, in which whoever asks them waits. A Ray
        that was joined is looked for only while this process is `ending`: it has ended where nobody listens."""
        if self.joined:
            return ending and self._nobody_listens()
        for daemon in self._daemons:
            if not self._closing and daemon not in self._missing and daemon.poll() is not None:
                self._missing.append(daemon)
                self._broken |= ending or _is_needed(daemon)
        return self._broken

    def _nobody_listens(self) -> bool:
        if time.monotonic() - self._knocked >= KNOCK_PERIOD_S:
            host, _, port = self._joined.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), KNOCK_TIMEOUT_S).close()
            except OSError:
                self._failed += 1
            else:
                self._failed = 0
            self._knocked = time.monotonic()
        return self._failed >= KNOCKS

    def closing(self) -> None:
        """Note that from now on this process ends Ray itself."""
        self._closing = True

    def end(self) -> None:
        """Wait a moment for every process to end, kill those that have not, remove the folder."""
        with self._lock:
            self._closing = True
            cleanup_process.kill(self._others)  # whoever could have told them to end has gone
            leaders = {daemon.pid for daemon in self._daemons} | self._others
            cleanup_process.end(leaders, LEAVE_S, LIMIT_S)
            for each in self._folders:
                cleanup_process.remove(each)
            self._daemons.clear()
            self._others.clear()
            self._folders.clear()
            if self._folder is not None and self._cleanup is not None:
                cleanup_process.remove(self._folder)
                self._cleanup.close()
            self._folder = self._cleanup = None


def _is_needed(daemon: subprocess.Popen[bytes]) -> bool:
    command: Any = daemon.args
    return Path(command[0]).name in ("gcs_server", "raylet")


class Watch:
    """Ends this process where it does not end by itself in time, once it should. A thread of its own, as what the main
    thread asks of a Ray that has ended holds it for a minute."""

    def __init__(self, sessions: Sessions, within_s: float, say: Callable[[str], None]) -> None:
        """`within_s`: seconds from `stop` on."""
        self._sessions, self._within_s, self._say = sessions, within_s, say
        self._deadline = math.inf
        self._over = threading.Event()
        threading.Thread(target=self._run, name="watch-end", daemon=True).start()

    def stop(self) -> None:
        """Note that this process should end from now on. A signal handler may call it."""
        self._deadline = min(self._deadline, time.monotonic() + self._within_s)

    def hurry(self) -> None:
        """Note that this process should end at once."""
        self._deadline = min(self._deadline, time.monotonic() + HURRY_S)

    def over(self) -> None:
        """Note that this process has done what there was to do."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            ending = self._deadline < math.inf
            if not self._sessions.begun:
                continue
            broken = self._sessions.look(ending)
            late = time.monotonic() >= self._deadline and not self._sessions.joined  # that one is not ours to end
            if ending and (broken or late) and not self._over.is_set():  # it may be over since the loop began to look
                self._end("Ray was ended by somebody else" if broken else "Ray did not end in time")
                return

    def _end(self, cause: str) -> None:
        stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)  # Ray's libraries in this process tell what they miss of Ray, line by line
        self._sessions.end()
        os.dup2(stderr, 2)
        for descriptor in (stderr, nowhere):
            os.close(descriptor)
        with suppress(OSError):
            self._say(f"stopped; {cause}, so streams that still ran were broken off")
        os._exit(0)
