"""Goes on with the answers of a front that died: takes over the connection of each from its stream watchdog, makes what
it had made once more, and sends the client what it lacks.

The application answers the request that the journal holds as if it had just come. It draws what the first front drew
(`deploy.api.http.draws`) and is given the same outputs first, so it makes the same bytes, and then those that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Scope
from typing_extensions import override

from deploy.api.generation.generate import WAITING
from deploy.api.generation.journaling import CONVERSATION, OPEN
from deploy.api.http.draws import Draws
from deploy.api.http.errors import engine_down
from deploy.api.http.middleware import HEADER
from deploy.api.limits.admission import CONTINUED
from deploy.observability import logs
from deploy.routing.arrivals import Arrivals
from deploy.serve.asked_front import ANSWER
from deploy.serve.held_connection import MESSAGE, given_to
from deploy.serve.journal import Journal, JournalTaken, Recorded, is_chunked
from deploy.serve.newcomers import HEIR
from deploy.serve.splice import Splice
from deploy.serve.stream_watchdog import StreamWatchdog
from workers.channel.ports import fits_sockets, socket_folder
from workers.protocol.front import EngineFault
from workers.protocol.messages import RequestOutput

logger = logging.getLogger("latentserve.replica")

_COMING: Final = f"{HEIR}.new"

MOST_FRONTS: Final = 4
"""Fronts that may die while they write an answer: it may be what they die of, so no further one gets it."""
LEFT_BEHIND_S: Final = 60.0
"""Age from which on the folder of a front that nobody listens in is taken for one that was left behind."""
LEAST_LIMIT_S: Final = 0.001
"""Seconds that are left of a client's time limit when it is over: then the application says so."""
NOT_THE_SAME: Final = "the front that began this answer died, and the next one makes another answer of the request"


def shared_folder(application: str) -> Path | None:
    """Folder in which all fronts of an application on this node have the folders of their sockets. None where such a
    folder belongs to another user, or lets others in. `application`: its name, and that of its cluster."""
    name = f"latentserve-{os.getuid()}-{blake2b(application.encode(), digest_size=8).hexdigest()}"
    usual = tempfile.gettempdir()
    below = len(f"/{name}/12345678/{_COMING}")
    folder = Path(usual if fits_sockets(usual, below) else "/tmp") / name
    return folder if _is_own(folder) else None


def _is_own(folder: Path) -> bool:
    """Whether a folder, which is made where there is none, is this user's alone; logged where it is not."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        logger.warning("answers of fronts that die wait for no other one: %s", error)
        return False
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        logger.warning("answers of fronts that die wait for no other one: %s is not this user's alone", folder)
        return False
    return True


def _folder_in(shared: Path) -> Path | None:
    """A fresh folder there; None where the shared one is not this user's alone any more. The stream watchdog of a front
    that ends removes that one when it is empty, and it is made again."""
    while _is_own(shared):
        with contextlib.suppress(FileNotFoundError):
            made = Path(tempfile.mkdtemp(prefix="", dir=shared))
            if _is_own(shared):  # from here on it is not empty, and stays
                return made
            shutil.rmtree(made, ignore_errors=True)
    return None


def _remove_left_behind(shared: Path) -> None:
    """Remove the folders there of fronts that died together with their stream watchdogs."""
    now = time.time()
    for folder in shared.iterdir():
        try:
            if now - folder.lstat().st_mtime < LEFT_BEHIND_S:
                continue  # its front may be about to listen
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as look:
                look.setblocking(False)
                look.connect(str(folder / HEIR))
        except (ConnectionRefusedError, FileNotFoundError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is busy, or nothing of a front
            continue


class Heir:
    """Takes answers over for a front. Its socket is a file in a folder that only its owner enters."""

    def __init__(
        self,
        app: ASGIApp,
        watchdog: StreamWatchdog,
        fingerprint: Callable[[], str],
        replica: tuple[bytes, bytes],
        arrivals: Arrivals,
        shared: Path | None = None,
    ) -> None:
        """Begin to listen, in the running event loop. `app`: answers requests. `fingerprint`: what is served here.
        `replica`: the header that names this replica. `shared`: the folder in which it is found by stream watchdogs
        that nobody told of it; None, or a folder that is not this user's alone: it is found by none."""
        self._app, self._watchdog, self._fingerprint = app, watchdog, fingerprint
        self._replica, self._arrivals = replica, arrivals
        within = None if shared is None else _folder_in(shared)
        self._shared = None if within is None else shared
        if within is not None:
            _remove_left_behind(within.parent)
        self._folder = within or socket_folder(len(_COMING) + 1)
        self.path = str(self._folder / HEIR)
        """Path of its socket."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(str(self._folder / _COMING))
        self._listener.listen(128)
        (self._folder / _COMING).rename(self.path)  # whoever finds it can connect
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        self._channels: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        watchdog.remove_at_end(self._folder)

    @property
    def answers(self) -> int:
        """Answers of other fronts that go on here."""
        return len(self._tasks)

    def close(self) -> None:
        """Take no more."""
        for channel in (*self._channels, self._listener):
            self._loop.remove_reader(channel)
            channel.close()
        self._channels.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._shared is not None:
            with contextlib.suppress(OSError):  # others are there
                self._shared.rmdir()

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError:
            return
        channel.setblocking(False)
        self._channels.add(channel)
        self._loop.add_reader(channel, self._take, channel)

    def _take(self, channel: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
            if len(data) == MESSAGE.size and len(descriptors) == 2:
                words, number = MESSAGE.unpack(data)
                channel.send(ANSWER.pack(number, self._take_over(words, *descriptors)))
                return
            for descriptor in descriptors:  # the kernel leaves out what a process has no numbers for
                os.close(descriptor)
        except BlockingIOError:
            return
        except OSError:
            logger.debug("a stream watchdog has left", exc_info=True)
        self._loop.remove_reader(channel)
        self._channels.discard(channel)
        channel.close()

    def _take_over(self, words: int, connection: int, memory: int) -> bool:
        """Whether this front, or another one, goes on with an answer. The descriptors become this object's."""
        client = socket.socket(fileno=connection)
        try:
            try:
                journal = Journal(memory)
            except JournalTaken:
                client.close()
                return True
            except (OSError, ValueError) as error:  # no memory, no descriptors
                logger.warning("an answer cannot be taken over: %s", error)
                client.close()
                return False
            try:
                if journal.owners > MOST_FRONTS:
                    raise ValueError(f"{MOST_FRONTS} fronts have died while they wrote it")
                recorded = journal.read()
                if recorded.began.fingerprint != self._fingerprint():
                    raise ValueError("it is of a front that serves something else")
                # Counted here, where the journal's last owner can write no more.
                given = given_to(client) - journal.given_before
                splice = Splice(recorded.head or b"", recorded.written, given, (_chunk(WAITING),))
            except (msgspec.MsgspecError, ValueError, OSError) as error:
                logger.warning("an answer cannot be taken over: %s", error)
                journal.close()
                client.close()
                return False
            held = self._watchdog.hold(connection, words, memory)
        finally:
            os.close(memory)
        answer = _Answer(client, journal, recorded, splice, self._replica)
        task = self._loop.create_task(self._go_on(answer, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _go_on(self, answer: _Answer, held: int | None) -> None:
        arrival = self._arrivals.arrive(None)
        try:
            await answer.go_on(self._app)
        except Exception:
            logger.exception("an answer that was taken over broke off")
        finally:
            self._arrivals.leave(arrival)
            self._watchdog.release(held)
            answer.journal.end()


class _Connection(asyncio.Protocol):
    """The connection of a client; nothing more is expected of it than that it stays."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = asyncio.Event()

    @override
    def pause_writing(self) -> None:
        self.writable.clear()

    @override
    def resume_writing(self) -> None:
        self.writable.set()

    @override
    def connection_lost(self, error: Exception | None) -> None:
        # A front that was passed by may have the connection in a message that it has not read: to close this end of it
        # would leave the client waiting.
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)
        self.writable.set()
        self.lost.set()


class _Answer:
    """An answer that another front began. It implements `deploy.api.generation.journaling.Journal`."""

    def __init__(
        self,
        client: socket.socket,
        journal: Journal,
        recorded: Recorded,
        splice: Splice,
        replica: tuple[bytes, bytes],
    ) -> None:
        self.journal = journal
        self._client, self._recorded, self._splice, self._replica = client, recorded, splice, replica
        self._connection = _Connection(client)
        self._transport: asyncio.Transport
        self._chunked = recorded.head is not None and is_chunked(recorded.head)
        self._begun, self._complete, self._asked = recorded.head is not None, False, False
        self._broken = False
        """Whether what was made once more is not what the client had."""
        self._in_place_of: bytes | None = None
        """The end of a stream in place of an answer that cannot stand behind its beginning."""
        self._choices, self._going_on = 0, False

    @property
    def age_s(self) -> float | None:
        """Seconds since the request arrived; a stream that was resumed may have been created long before."""
        return max(time.time() - self._recorded.began.arrived, 0.0)

    def outputs(self, choice: int) -> Sequence[RequestOutput]:
        return self._recorded.outputs.get(choice, ())

    def feeder(self, choice: int) -> Callable[[RequestOutput], object]:
        to_repeat = len(self.outputs(choice))

        def fed(output: RequestOutput) -> None:
            nonlocal to_repeat
            if to_repeat:
                to_repeat -= 1
            else:
                self.journal.fed(choice, output)

        return fed

    @property
    def write_piece(self) -> None:
        """None: all that is made is compared with what was written."""

    def repeated(self, choice: int, ended: bool) -> None:
        """End the repetition for a choice. EngineFault where something was sent that was not made once more."""
        self._choices -= 1
        self._going_on |= not ended
        if not self._choices and self._going_on and self._splice.missing:
            self._broken = True
            raise EngineFault(NOT_THE_SAME)

    def _open(self, checksum: int, choices: int, ordinary: bool) -> _Answer:
        self._choices = choices
        if checksum != self._recorded.began.checksum:
            self._broken = True
            raise EngineFault(NOT_THE_SAME)
        return self

    def _scope(self) -> Scope:
        began, age_s = self._recorded.began, self.age_s or 0.0
        headers = []
        for name, value in began.headers:
            if name == HEADER:
                with contextlib.suppress(ValueError):  # which the application ignores as well
                    value = b"%f" % max(float(value) - age_s, LEAST_LIMIT_S)
            headers.append((name, value))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": began.path,
            "raw_path": began.path.encode(),
            "query_string": began.query,
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            "state": {},
            "latentserve.draws": Draws(began.secret, began.created),
            OPEN: self._open,
            **({} if began.conversation is None else {CONVERSATION: began.conversation}),
        }

    async def go_on(self, app: ASGIApp) -> None:
        """Answer, to the end or until the client leaves."""
        loop, recorded = asyncio.get_running_loop(), self._recorded
        self._transport, _ = await loop.connect_accepted_socket(lambda: self._connection, self._client)
        done = recorded.tokens
        CONTINUED.set(done)
        fields = {"path": recorded.began.path, "tokens": done, "writes": len(recorded.written)}
        logger.info("goes on with an answer of a front that died", extra={logs.FIELDS: fields})
        try:
            self._transport.write(self._splice.begin())
            await app(self._scope(), self._receive, self._send)
        finally:
            left = self._connection.lost.is_set()
            if not self._complete and not left and self._chunked and self._splice.at_seam:
                self._transport.write(_chunk(self._last_words()) + _LAST)
            self._transport.close()
            await self._connection.lost.wait()

    def _last_words(self) -> bytes:
        return engine_down(NOT_THE_SAME).event(self._recorded.began.path)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._recorded.began.body, "more_body": False}
        await self._connection.lost.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._connection.writable.wait()
        if message["type"] == "http.response.start":
            self._start(message)
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._in_place_of is not None:
            if more:
                return
            body = self._in_place_of
        piece = _framed(body, more) if self._chunked else body
        if self._broken:
            if not self._splice.at_seam:
                return  # the client has had a part of something that nobody can complete
            rest, new = b"", [piece]
        else:
            rest, new = self._splice.take(piece)
        if rest:
            self._transport.write(rest)
        for one in new:
            self.journal.wrote(one)
            self._transport.write(one)
        self._complete = not more and (self._broken or not self._splice.missing)

    def _start(self, message: Message) -> None:
        headers = [(name.lower(), value) for name, value in message.get("headers", ())]
        with_length = any(name == b"content-length" for name, _ in headers)
        if self._begun:
            if self._chunked and with_length:
                self._in_place_of, self._broken = self._last_words(), True
            return
        self._begun, self._chunked, status = True, not with_length, message["status"]
        lines = [b"HTTP/1.1 %d %s" % (status, http.HTTPStatus(status).phrase.encode())]
        lines += [b"%s: %s" % header for header in (*headers, self._replica, (b"connection", b"close"))]
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join((*lines, b"", b""))
        self.journal.wrote(head)
        self._transport.write(head)


_LAST: Final = b"0\r\n\r\n"
"""The end of a body in chunks."""


def _framed(body: bytes, more: bool) -> bytes:
    """A part of a body in chunks; `more`: others follow."""
    return (_chunk(body) if body else b"") + (b"" if more else _LAST)


def _chunk(data: bytes) -> bytes:
    """A chunk of a body, as uvicorn writes it."""
    return b"%x\r\n%s\r\n" % (len(data), data)
