"""Ends a Ray of our own where the process that started it was killed, and could not: SIGKILL, out of memory.

The kernel ends Ray's daemons then, but their agents live on for a minute, and nobody removes the folder. So a process
of a few megabytes waits for the end of a pipe. It is told what there would be to do: the folder, and the daemons, each
of which leads a session.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that the cleanup process ignores: it is needed last, so it does not end with the others."""


class CleanupProcess:
    """Handle of a cleanup process, in the process that it cleans up after."""

    def __init__(self, folder: Path) -> None:
        """`folder`: to be removed."""
        # What is blocked here is blocked there: until it ignores these signals they wait, and are then dropped.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-SE", __file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def add(self, leader: int) -> None:
        """Remember a session by the process that leads it."""
        self._tell(f"{leader}\n".encode())

    def add_folder(self, folder: Path) -> None:
        """Remember another folder that is to be removed."""
        self._tell(os.fsencode(folder) + b"\n")

    def close(self) -> None:
        """End the cleanup process: there is nothing left to do."""
        self._tell(b"over\n")
        self._process.communicate()

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it
            self._process.stdin.write(line)
            self._process.stdin.flush()


def members(leaders: set[int]) -> list[int]:
    """Ids of the processes in the sessions that `leaders` began, but for those that only wait to be reaped."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name, which is in brackets: state, parent, group, session.
            state, _, _, session = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in leaders and state not in "ZX":
                found.append(int(entry))
    return found


def end(leaders: set[int], patience_s: float, limit_s: float) -> None:
    """Wait until the sessions are empty; after `patience_s` kill what is left in them. Returns after `limit_s` in any
    case: a process that waits for a device ends when the device lets it."""
    begin = time.monotonic()
    while leaders and (left := members(leaders)) and time.monotonic() < begin + limit_s:
        if time.monotonic() >= begin + patience_s:
            _kill(left)
        time.sleep(0.05)


def kill(leaders: set[int]) -> None:
    """Kill what is in the sessions, and do not wait."""
    if leaders:
        _kill(members(leaders))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def remove(folder: Path) -> None:
    """Remove the whole folder; a front that has just been ended may still be noting that there."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait, then act."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    lines = [os.fsdecode(line) for line in sys.stdin.buffer.read().split(b"\n") if line]
    if "over" not in lines:
        end({int(line) for line in lines if line.isdecimal()}, patience_s=1.0, limit_s=5.0)
        for folder in (sys.argv[1], *(line for line in lines if not line.isdecimal())):
            remove(Path(folder))


if __name__ == "__main__":
    main()
