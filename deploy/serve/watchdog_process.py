"""The process behind `deploy.serve.stream_watchdog`.

It must outlive the front and weigh nothing: no imports but the standard library's, a few megabytes, no work per token.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
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
    from collections.abc import Callable, Iterable, Sequence

MESSAGE = struct.Struct("<BQ")
"""Kind and number. Descriptors come with some kinds; `BEAT` has the thread of the loop as its number, 0 where the
front ends in order, and behind it a byte, which is 1 where there are replicas on other nodes, and the paths of
sockets."""
FOLDER, RELEASE, BEAT, HOLD, HOLD_JOURNAL = 0, 1, 2, 3, 128
"""Kinds of messages. From `HOLD` on, and from `HOLD_JOURNAL` on where a journal comes with the connection, each number
says which last words a connection gets."""
MOST_BYTES = 64 * 1024
"""Bytes of a message, at most."""
ANSWER = struct.Struct("<QB")
"""Of a front that is handed an answer: its number, and whether it, or another front, goes on with it."""
WORD_S = 1.0
"""Seconds in which a front that is handed an answer says whether it takes it, before the next one is asked as well."""
HEIR_S = 10.0
"""Seconds until all answers have a front or end: about as long as a front may be silent before its own watchdog ends
it. A stream that waits for a busy front is better than one that ends."""
RELEASED_S = 5.0
"""Seconds in which the kernel releases the locks of a front that died, at the most. It takes some milliseconds, and
longer where others need the processors."""
_UNDER_WAY = 32
"""Answers that one front is handed before it has said anything."""
LOOK_MS = 20
"""Milliseconds between two looks at fronts that could not be handed an answer, and at those that say nothing."""
WAIT_MS = 100
"""The same where no front is there, and all answers wait for one that comes."""
HEIR = "heir"
"""Name of the socket at which a front takes answers over. All fronts of an application on a node have it in folders of
their own below one that they share."""
SPARE = 8
"""Descriptors that stay free for handing over and for last words, however many connections are held."""
_ACKNOWLEDGED = 120
"""Place of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_TCP_INFO_BYTES = 128
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group: Linux's `struct ucred`."""
BEAT_S = 0.25
"""Seconds between two signs of life of a front."""
LEAST_SILENCE_S = 4 * BEAT_S
"""However short the patience: a sign may come a little late."""
STOPPED_S, BLOCKED_S, BUSY_S = 1.0, 2.0, 3.0
"""Seconds after which a silent front is given up where the kernel says why it is silent: it was stopped; its loop waits
for something, and was not given the processor once in this time; its loop computes, and has had the processor for so
long. A busy machine is none of these: whoever waits for the processor neither sleeps nor has had it. The longest turn
of a loop that was seen takes 0.05 s (`bench/front_stalls.py`)."""
WRITE_TIMEOUT_S = 1.0
"""Seconds for all streams together; a client that reads slower than that sees its connection break."""


class Others:
    """What a front's last beat told of other fronts."""

    def __init__(self) -> None:
        self.heirs: list[str] = []
        """Sockets of those of its node that take answers over."""
        self.elsewhere = False
        """Whether there are some on other nodes, which can answer what has not begun."""


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


class Silence:
    """How long a front has given no sign of life, and whether it hangs."""

    def __init__(self, front: int, silence_s: float) -> None:
        """`front`: its process. `silence_s`: the longest silence."""
        self._front, self._silence_s = front, max(silence_s, LEAST_SILENCE_S)
        self._thread = 0
        self._quiet = self._stopped = self._blocked = 0.0
        self._before: tuple[str, float, int] | None = None
        """State, seconds of the processor and context switches of its thread when it was looked at last."""
        self._had: float | None = None
        """Seconds of the processor at the first look that the kernel answered since the last sign; None before it."""
        self._counts = False
        """Whether this kernel counts context switches."""

    def sign(self) -> None:
        """It gave one."""
        self._quiet = self._stopped = self._blocked = 0.0
        self._had = None

    def beat(self, thread: int) -> None:
        """It gave the one that its loop gives, in this thread (`threading.get_native_id`); 0: its loop ends, and how
        long it is silent from here on says nothing."""
        self._thread = thread
        if self._before is None:
            self._before = self._look()

    def grows(self) -> str:
        """`BEAT_S` passed without a sign. Return what is wrong with the front, empty as long as nothing is.

        Time is counted in these, and not measured: on a machine that stood still for a while nobody gave a sign."""
        if not self._thread:
            return ""
        self._quiet += BEAT_S
        if (now := self._look()) is not None:
            state, had, switches = now
            before, self._before = self._before, now
            self._had = had if self._had is None else self._had
            self._counts |= before is not None and switches > before[2]
            self._stopped = self._stopped + BEAT_S if state == "T" else 0.0
            sleeps = self._counts and state == "S" and before == now
            self._blocked = self._blocked + BEAT_S if sleeps else 0.0
            if self._stopped >= STOPPED_S:
                return f"was stopped {self._stopped:g} s ago"
            if self._blocked >= BLOCKED_S:
                return f"has waited for {self._blocked:g} s in its loop"
            if had - self._had >= BUSY_S:
                return f"has computed for {had - self._had:.1f} s in its loop"
        return f"was silent for {self._quiet:g} s" if self._quiet >= self._silence_s else ""

    def _look(self) -> tuple[str, float, int] | None:
        """State, seconds of the processor and context switches of its loop's thread; None where they are not known."""
        task = f"/proc/{self._front}/task/{self._thread}"
        try:
            with open(f"{task}/stat") as stat, open(f"{task}/status") as status:
                fields = stat.read().rpartition(")")[2].split()
                switches = [int(line.split()[1]) for line in status if "ctxt_switches:" in line]
            return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), sum(switches)
        except (OSError, ValueError, IndexError):
            return None


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
                say(f"guardian: the front {wrong} and is killed")
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


class Newcomers:
    """Fronts of the node that nobody told of, and those that come while answers wait for one."""

    def __init__(
        self,
        shared: str,
        patience_s: float,
        starter: int | None,
        elsewhere: bool = False,
        most_bytes: float = math.inf,
    ) -> None:
        """`shared`: the folder in which they have their folders; empty: nobody comes. `patience_s`: how long it is
        waited for one. `starter`: descriptor of the process that starts fronts here (pidfd); once that has ended no
        other front comes, and likewise where it is None. `elsewhere`: what has not begun waits for none, because a
        replica of another node can answer it, if its request has no more than `most_bytes`: proxies keep no longer one
        to send it again."""
        self._shared, self._starter = shared, starter
        self._elsewhere, self._most_bytes = elsewhere, most_bytes
        self._until = time.monotonic() + patience_s if shared and starter is not None else 0.0
        self._known: set[str] = set()

    @property
    def may_come(self) -> bool:
        """Whether it is worth waiting for one."""
        if self._starter is None or time.monotonic() >= self._until:
            return False
        ended = select.poll()
        ended.register(self._starter, select.POLLIN)
        return not ended.poll(0)

    def needed_by(self, held: Held) -> bool:
        """Whether an answer has nobody but a front that comes here."""
        return not self._elsewhere or held.begun or held.noted > self._most_bytes

    def new(self, known: Iterable[str]) -> list[str]:
        """Return the sockets that were not there at the last call, nor are `known` otherwise."""
        found: list[str] = []
        if self._until:
            with contextlib.suppress(OSError):
                found = sorted(f"{self._shared}/{name}/{HEIR}" for name in os.listdir(self._shared))
        self._known.update(known)
        found = [path for path in found if path not in self._known and os.path.exists(path)]
        self._known.update(found)
        return found


def hand_over(
    held: Sequence[Held],
    heirs: Sequence[str],
    newcomers: Newcomers | None = None,
    finish: Callable[[list[Held]], object] | None = None,
) -> list[Held]:
    """Hand answers that have a journal to fronts of other replicas; returns those that no front goes on with, and that
    `finish` was not given: it gets those that are over while others still wait.

    Every answer is offered to one front first, and to the next one as soon as that one refuses it, dies or says nothing
    of it for `WORD_S`. Answers begin at different fronts, so that these share them. Fronts that say nothing come last,
    all at once, and are heard whenever they speak. After `HEIR_S` none of them is waited for any more: whatever a front
    may have taken without a word is its own, since who owns a journal goes on with its answer.

    An answer that no front refused waits for `newcomers`, which have as long to say something; so does one of which
    fronts that are there say nothing: they may hang. One that a front refused does not: what comes may well be like
    that one, as in an update to other weights, and the answer would end later."""
    newcomers = newcomers or Newcomers("", 0.0, None)
    deadline = time.monotonic() + HEIR_S
    fronts = [_Front(heir) for heir in heirs]
    left: dict[int, _Answer] = {}
    for number, one in enumerate(one for one in held if one.journal is not None):
        first = number % len(fronts) if fronts else 0
        left[number] = _Answer(number, one, [*fronts[first:], *fronts[:first]], newcomers.needed_by(one))
    known: Sequence[str] = heirs
    unguarded = [one for one in held if one.journal is None]
    try:
        while True:
            late = time.monotonic() >= deadline
            if late or not any(answer.undecided for answer in left.values()):
                if not newcomers.may_come:
                    break
                for answer in left.values() if late else ():
                    answer.pass_by_silent_fronts()
                if not any(answer.undecided or answer.waits for answer in left.values()):
                    break
            for front in map(_Front, newcomers.new(known)):
                fronts.append(front)
                deadline = time.monotonic() + HEIR_S
                for answer in left.values():
                    answer.unasked.append(front)
            known = ()
            for answer in left.values():
                answer.offer()
            for front in fronts:
                front.hand()
            _wait_for_a_word(fronts, left.values())
            for front in fronts:
                front.hear()
            for number in [number for number, answer in left.items() if answer.taken]:
                left.pop(number).held.close()
            if finish is not None and not any(answer.undecided for answer in left.values()):
                over = [left.pop(number) for number, answer in [*left.items()] if not answer.waits]
                for answer in over:
                    answer.over = True
                finish([*(answer.held for answer in over), *unguarded])
                unguarded = []
    finally:
        for front in fronts:
            front.close()
    if left:
        asked = ", ".join(front.heir for front in fronts) or "there was none"
        say(f"guardian: answers that no front said it goes on with: {len(left)}; asked: {asked}")
    return [*(answer.held for answer in left.values()), *unguarded]


class _Answer:
    """An answer that is offered to fronts."""

    def __init__(self, number: int, held: Held, fronts: list[_Front], may_wait: bool = True) -> None:
        """`number`: by which fronts speak of it. `fronts`: in the order in which they are asked. `may_wait`: whether it
        needs a front that comes, see `Newcomers`."""
        self.number, self.held = number, held
        self._may_wait = may_wait
        self.unasked, self.asked = fronts, set[_Front]()
        """Fronts that are still to be asked, and those that were and have not said whether they take it."""
        self.taken = self.refused = False
        """Whether one of them said that it, or another one, goes on with it; and whether one said that it does not."""
        self.over = False
        """Whether it is ended, and is handed to nobody any more."""
        self._next_at = 0.0
        """When the next one is asked, even if the one before has said nothing."""
        self._locked_until: float | None = time.monotonic() + RELEASED_S

    @property
    def locked(self) -> bool:
        """Whether a front that died may still own it."""
        return self._locked_until is not None

    @property
    def undecided(self) -> bool:
        """Whether a front may still take it, or has to release it."""
        return not self.taken and bool(self.locked or self.asked or self.unasked)

    @property
    def waits(self) -> bool:
        """Whether it is one for a front that comes later."""
        return self._may_wait and not (self.taken or self.refused or self.undecided or self.held.left)

    @property
    def due(self) -> bool:
        """Whether the next front is to be asked now."""
        return bool(self.unasked) and not self.locked and time.monotonic() >= self._next_at

    def offer(self) -> None:
        """Ask the next front, once it is time."""
        now = time.monotonic()
        self.unasked = [front for front in self.unasked if not front.died]
        if self._locked_until is not None:
            # The channel of a front that died may close before its locks are released. A front that was handed the
            # answer in between would find its journal taken, and nobody would go on with it.
            assert self.held.journal is not None
            if (own := _owned(self.held.journal)) is not None:
                os.close(own)
            elif now < self._locked_until:
                return
            self._locked_until = None
        if not self.due:
            return
        for front in [front for front in self.unasked if not front.silent][:1] or self.unasked[:]:
            self.unasked.remove(front)
            self.asked.add(front)
            front.take_in(self)
        self._next_at = now + WORD_S

    def pass_by_silent_fronts(self) -> None:
        """Wait no longer for fronts that have it and say nothing. They are still heard: one that wakes up may take it,
        and only one front ever owns its journal."""
        self.asked = {front for front in self.asked if not front.silent}

    def said(self, front: _Front, goes_on: bool) -> None:
        """A front said whether it, or another one, goes on with it."""
        self.taken |= goes_on
        self.refused |= not goes_on
        self.died(front)

    def died(self, front: _Front) -> None:
        """A front that was to be handed it is not there, and the next one is asked."""
        self.asked.discard(front)
        self._next_at = 0.0

    def died_with(self, front: _Front) -> None:
        """A front that was handed it died. It may have owned it; so may another one that was, and has not died."""
        self.died(front)
        if not self.asked:
            self._locked_until = time.monotonic() + RELEASED_S


class _Front:
    """A front that is handed answers."""

    def __init__(self, heir: str) -> None:
        """`heir`: path of its socket."""
        self.heir = heir
        self.channel: socket.socket | None = None
        """To its socket; None while it cannot be connected to."""
        self.died = False
        """Whether it is not there, or no more."""
        self._waiting: dict[int, _Answer] = {}
        self._handed: dict[int, _Answer] = {}
        """By their numbers, the answers that it is to be handed, and those of which it has said nothing yet."""
        self._heard = 0.0

    @property
    def silent(self) -> bool:
        """Whether it could have said something for `WORD_S`, and did not."""
        return bool(self._waiting or self._handed) and time.monotonic() >= self._heard + WORD_S

    def take_in(self, answer: _Answer) -> None:
        """Hand it an answer as soon as may be."""
        if not (self._waiting or self._handed):
            self._heard = time.monotonic()
        self._waiting[answer.number] = answer

    def hand(self) -> None:
        """Hand over as many as may be under way."""
        waiting = self._waiting.items()
        self._waiting = {number: answer for number, answer in waiting if not (answer.taken or answer.over)}
        if self._waiting and self.channel is None:
            self._connect()
        try:
            while self._waiting and self.channel is not None and len(self._handed) < _UNDER_WAY:
                number, answer = next(iter(self._waiting.items()))
                one = answer.held
                assert one.journal is not None
                socket.send_fds(self.channel, [MESSAGE.pack(one.words, number)], [one.connection.fileno(), one.journal])
                self._handed[number] = self._waiting.pop(number)
        except OSError as error:
            # There is room again later, in its queue or among the descriptors that are under way to all fronts.
            if not isinstance(error, BlockingIOError) and error.errno != errno.ETOOMANYREFS:
                self.hear()
                self._end()

    def _connect(self) -> None:
        try:
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return  # no descriptors: each answer that is taken sets two free
        try:
            channel.setblocking(False)
            channel.connect(self.heir)
        except OSError as error:
            channel.close()
            if not isinstance(error, BlockingIOError):  # otherwise it has not taken in those who came before
                self._end()
            return
        if (user := _user_of(channel)) != os.getuid():
            say(f"guardian: no answer is handed to user {user}, who listens at {self.heir}")
            channel.close()
            self._end()
            return
        self.channel = channel

    def hear(self) -> None:
        """Take down what it said."""
        while self.channel is not None:
            try:
                data = self.channel.recv(ANSWER.size)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left with messages unread, and the kernel says so once, before the words it had said
            except OSError:
                data = b""
            if len(data) != ANSWER.size:
                self._end()
                return
            number, goes_on = ANSWER.unpack(data)
            self._heard = time.monotonic()
            if (answer := self._handed.pop(number, None)) is not None:
                answer.said(self, bool(goes_on))

    def _end(self) -> None:
        self.died = True
        self.close()
        for answer in self._waiting.values():
            answer.died(self)
        for answer in self._handed.values():
            answer.died_with(self)
        self._waiting, self._handed = {}, {}

    def close(self) -> None:
        """Hear no more of it."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _user_of(channel: socket.socket) -> int:
    """User who listens at a socket of the node that was connected to."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _wait_for_a_word(fronts: Iterable[_Front], answers: Iterable[_Answer]) -> None:
    """Wait until a front has said something or there is something to do."""
    said = select.poll()
    for front in fronts:
        if front.channel is not None:
            said.register(front.channel, select.POLLIN)
    wait_ms = WAIT_MS
    for answer in answers:
        if not answer.waits:
            wait_ms = min(wait_ms, LOOK_MS)
        if answer.locked:
            wait_ms = min(wait_ms, 1)
        elif answer.due:
            wait_ms = 0
    said.poll(wait_ms)


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
        say(f"guardian: answers cannot be handed over: {error!r}")
        left = [one for one in held if one.connection.fileno() >= 0]
    end(left, words)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if shared:
        with contextlib.suppress(OSError):  # others are there
            os.rmdir(shared)
