"""A front that is asked to go on with answers of one that died.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from typing import Protocol

from deploy.serve.held_connection import MESSAGE, Held
from deploy.serve.last_words import say

ANSWER = struct.Struct("<QB")
"""Of a front that is handed an answer: its number, and whether it, or another front, goes on with it."""
WORD_S = 1.0
"""Seconds in which a front that is handed an answer says whether it takes it, before the next one is asked as well."""
_UNDER_WAY = 32
"""Answers that one front is handed before it has said anything."""
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group: Linux's `struct ucred`."""


class Offered(Protocol):
    """An answer that is offered to fronts."""

    number: int
    """By which fronts speak of it."""
    held: Held
    taken: bool
    """Whether a front goes on with it."""
    over: bool
    """Whether it is ended, and is handed to nobody any more."""

    def said(self, front: AskedFront, goes_on: bool) -> None:
        """A front said whether it, or another one, goes on with it."""

    def died(self, front: AskedFront) -> None:
        """A front that was to be handed it is not there."""

    def died_with(self, front: AskedFront) -> None:
        """A front that was handed it died."""


class AskedFront:
    """A front that is handed answers."""

    def __init__(self, heir: str) -> None:
        """`heir`: path of its socket."""
        self.heir = heir
        self.channel: socket.socket | None = None
        """To its socket; None while it cannot be connected to."""
        self.died = False
        """Whether it is not there, or no more."""
        self._waiting: dict[int, Offered] = {}
        self._handed: dict[int, Offered] = {}
        """By their numbers, the answers that it is to be handed, and those of which it has said nothing yet."""
        self._heard = 0.0

    @property
    def silent(self) -> bool:
        """Whether it could have said something for `WORD_S`, and did not."""
        return bool(self._waiting or self._handed) and time.monotonic() >= self._heard + WORD_S

    def take_in(self, answer: Offered) -> None:
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
            say(f"stream watchdog: no answer is handed to user {user}, who listens at {self.heir}")
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
