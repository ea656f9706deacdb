"""The process behind `deploy.serve.stream_watchdog`.

It must outlive the front and weigh nothing: no imports but the standard library's and a few files beside this one that
hold to the same, a few megabytes, no work per token.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    # Started by its path and without `site`, so nothing else says where the project is; behind the standard library,
    # which nobody's package may stand in for.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from deploy.serve.front_silence import BEAT_S, Silence
from deploy.serve.hand_over import hand_over
from deploy.serve.held_connection import BEAT, FOLDER, HOLD, HOLD_JOURNAL, MESSAGE, MOST_BYTES, RELEASE, Held
from deploy.serve.last_words import end, note, say
from deploy.serve.newcomers import Newcomers

SPARE = 8
"""Descriptors that stay free for handing over and for last words, however many connections are held."""


class Others:
    """What a front's last beat told of other fronts."""

    def __init__(self) -> None:
        self.heirs: list[str] = []
        """Sockets of those of its node that take answers over."""
        self.elsewhere = False
        """Whether there are some on other nodes, which can answer what has not begun."""


def keep(
    channel: socket.socket,
    silence_s: float = math.inf,
    folders: list[str] | None = None,
    others: Others | None = None,
) -> list[Held]:
    """The watchdog's life: keep connections while the front lives; returns those that are left. `folders` become those
    that are to be removed then, `others` what the last beat told."""
    held: dict[int, Held] = {}
    front = os.getppid()
    silence = Silence(front, silence_s)
    while True:
        if not select.select([channel], [], [], BEAT_S)[0]:
            if (wrong := silence.grows()) and os.getppid() == front:
                say(f"stream watchdog: the front {wrong} and is killed")
                os.kill(front, signal.SIGKILL)
            continue
        silence.sign()
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
        elif kind == BEAT:
            silence.beat(number)
            if others is not None:
                others.elsewhere, paths = data[MESSAGE.size] == 1, data[MESSAGE.size + 1 :]
                others.heirs = [os.fsdecode(path) for path in paths.split(b"\0")] if paths else []


def _opened(process: int) -> int | None:
    """A descriptor of a process; None where it has ended, or kernel or Python have none."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):  # Pythons that were built for old systems lack the function
        return None


if __name__ == "__main__":
    # It ends after its front, and has most to do where somebody signals both.
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    # Nothing but the channel: an inherited descriptor could keep a port or a pipe of the front open.
    number = int(sys.argv[1])
    os.closerange(3, number)
    os.closerange(number + 1, 1024)
    told = json.loads(sys.argv[2])
    starter, shared = _opened(told["starter"]), told["shared"]
    folders = [told["folder"]] if told["folder"] else []
    others = Others()
    spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(SPARE)]
    held = keep(socket.socket(fileno=number), told["silence_s"], folders, others)
    for descriptor in spare:
        os.close(descriptor)
    if told["note"]:  # first, for clients that ask why their stream ended
        file, text, since = told["note"]
        note(Path(file), text, since)
    words = [bytes.fromhex(one) for one in told["last_words"]]
    newcomers = Newcomers(shared, told["patience_s"], starter, others.elsewhere, told["sent_again_bytes"])
    try:
        left = hand_over(held, others.heirs, newcomers, lambda over: end(over, words))
    except Exception as error:  # whatever it is, no stream ends without its last words
        say(f"stream watchdog: answers cannot be handed over: {error!r}")
        left = [one for one in held if one.connection.fileno() >= 0]
    end(left, words)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if shared:
        with contextlib.suppress(OSError):  # others are there
            os.rmdir(shared)
