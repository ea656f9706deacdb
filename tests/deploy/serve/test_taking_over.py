"""What a stream watchdog, the kernel's locks and a journal do between the end of one front and the beginning of the
next."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import json
import mmap
import os
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from typing_extensions import override

from deploy.routing.arrivals import Arrivals
from deploy.serve import asked_front, watchdog_process
from deploy.serve import hand_over as handing
from deploy.serve import newcomers as coming
from deploy.serve.asked_front import ANSWER, AskedFront
from deploy.serve.hand_over import OfferedAnswer, hand_over
from deploy.serve.heir import LEFT_BEHIND_S, Heir, shared_folder
from deploy.serve.held_connection import HOLD_JOURNAL, MESSAGE, Held, given_to
from deploy.serve.journal import Began, Journal, JournalTaken, checksum
from deploy.serve.last_words import end
from deploy.serve.newcomers import Newcomers
from deploy.serve.stream_watchdog import StreamWatchdog
from deploy.serve.watchdog_process import keep
from workers.channel.ports import socket_folder
from workers.protocol.messages import RequestOutput

BEGAN = Began("same", "/v1/completions", b"", [], b"{}", b"secret", 1.0, 1.0, 0, ordinary=True)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front of a test may be late, and no other one is asked meanwhile unless the test says so."""
    monkeypatch.setattr(handing, "HEIR_S", 60.0)
    monkeypatch.setattr(asked_front, "WORD_S", 60.0)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A front's end of a TCP connection, and its client's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as front,
    ):
        client.settimeout(60)
        yield front, client


def begun(front: socket.socket) -> tuple[Journal, Held]:
    """Begin a stream as a front does, and what its watchdog holds of it."""
    journal, memory = Journal.begin(BEGAN, 0)
    journal.wrote(HEAD)
    front.sendall(HEAD)
    return journal, Held(os.dup(front.fileno()), 0, memory)


class Front(threading.Thread):
    """A front at which answers can go on, or not."""

    def __init__(self, does: Callable[[Front, socket.socket], None], shared: Path | None = None) -> None:
        """`does`: what it does with each watchdog that connects to it. `shared`: where watchdogs look for it."""
        super().__init__()
        self._folder = socket_folder(len("heir") + 1) if shared is None else Path(tempfile.mkdtemp(dir=shared))
        self.path, self._does = str(self._folder / "heir"), does
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{self.path}.new")
        self._listener.listen()
        Path(f"{self.path}.new").rename(self.path)  # as `Heir` does: a watchdog that finds it can connect
        self.found: list[bool] = []
        """Of every answer that it was handed, whether it could own its journal."""

    @override
    def run(self) -> None:
        with self._listener, suppress(OSError):
            while True:
                try:
                    channel, _ = self._listener.accept()
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
                    time.sleep(0.001)  # a test leaves this process no descriptors for a moment
                    continue
                with channel, suppress(OSError):  # who connected may have left
                    self._does(self, channel)

    def end(self) -> None:
        """End it once it is done with those who have connected."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self.join()
        shutil.rmtree(self._folder)

    def take(self, channel: socket.socket, says: bool = True, then: Callable[[], object] = lambda: None) -> None:
        """Say of everything that it takes it. `then`: called after each word."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
            if not data:
                return
            try:
                Journal(descriptors[1]).close()
                self.found.append(True)
            except JournalTaken:
                self.found.append(False)
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(ANSWER.pack(MESSAGE.unpack(data)[1], says))
            then()

    def refuse(self, channel: socket.socket) -> None:
        """Say of everything that it does not take it."""
        self.take(channel, False)


@contextmanager
def fronts(*does: Callable[[Front, socket.socket], None], shared: Path | None = None) -> Iterator[list[Front]]:
    """Fronts that do what they are to do."""
    made = [Front(one, shared) for one in does]
    for one in made:
        one.start()
    try:
        yield made
    finally:
        for one in made:
            one.end()


@contextmanager
def dead(count: int) -> Iterator[list[Held]]:
    """What is held of a front that died while it wrote so many streams."""
    with ExitStack() as stack:
        held = []
        for _ in range(count):
            journal, one = begun(stack.enter_context(connected())[0])
            journal.close()
            held.append(one)
        yield held


def test_an_answer_is_handed_over_once_the_lock_of_the_front_that_died_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fronts(Front.take) as [heir], connected() as (front, _):
        journal, held = begun(front)
        look = handing.owned

        def late(memory: int) -> int | None:
            """The kernel is later than the watchdog's first look."""
            if (own := look(memory)) is None and not heir.found:
                journal.close()
            return own

        monkeypatch.setattr(handing, "owned", late)
        assert hand_over([held], [heir.path]) == []
    assert heir.found == [True]


@pytest.mark.parametrize("place", [0, 1])
def test_answers_of_a_front_go_to_one_that_lives_however_many_they_are(place: int) -> None:
    """A replica that was started again is told of together with the one before it, for some seconds."""
    with dead(7) as held, fronts(Front.take) as [heir]:
        paths = [heir.path]
        paths.insert(place, f"{heir.path}-of-a-front-that-died")
        assert hand_over(held, paths) == []
    assert heir.found == [True] * 7


def test_every_answer_is_offered_to_every_front_until_one_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    with dead(9) as held, fronts(Front.refuse, Front.refuse, Front.take) as made:
        assert hand_over(held, [one.path for one in made]) == []
    assert len(made[2].found) == 9
    assert not capsys.readouterr().err
    with dead(9) as held, fronts(Front.refuse, Front.refuse, Front.refuse) as made:
        assert hand_over(held, [one.path for one in made]) == held
        for one in held:
            one.close()
    assert [len(one.found) for one in made] == [9, 9, 9]
    assert "answers that no front said it goes on with: 9;" in capsys.readouterr().err


def test_a_front_that_says_nothing_keeps_no_answer_from_another_one() -> None:
    handed = threading.Event()

    def wait(front: Front, channel: socket.socket) -> None:
        assert handed.wait(60)
        front.take(channel)

    def take(front: Front, channel: socket.socket) -> None:
        handed.set()
        front.take(channel)

    with dead(6) as held, fronts(wait, take) as made:
        assert hand_over(held, [one.path for one in made]) == []
    assert [one.found for one in made] == [[True] * 3] * 2


def test_a_front_that_says_nothing_for_long_is_waited_for_when_no_other_one_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asked_front, "WORD_S", 0.01)
    refused = threading.Event()

    def refuse(front: Front, channel: socket.socket) -> None:
        front.take(channel, False, lambda: len(front.found) == 5 and refused.set())

    def hang(front: Front, channel: socket.socket) -> None:
        assert refused.wait(60)
        front.take(channel)

    with dead(5) as held, fronts(refuse, hang) as [other, heir]:
        assert hand_over(held, [other.path, heir.path]) == []
    assert (other.found, heir.found) == ([True] * 5, [True] * 5)


def test_all_that_fronts_are_waited_for_is_once_however_many_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_front, "WORD_S", 0.01)
    waits: list[float] = []
    clock = [0.0]

    class Clock:
        """Time that passes by looking at fronts alone."""

        monotonic = staticmethod(lambda: clock[0])

    def wait(*what: object) -> None:
        waits.append(handing.LOOK_MS / 1000)
        clock[0] += waits[-1]

    for module in (handing, asked_front, coming):
        monkeypatch.setattr(module, "time", Clock)
    monkeypatch.setattr(handing, "_wait_for_a_word", wait)
    over = threading.Event()

    def hang(front: Front, channel: socket.socket) -> None:
        assert over.wait(60)

    with dead(3) as held, fronts(*[hang] * 5) as made:
        assert hand_over(held, [one.path for one in made]) == held
        over.set()
        for one in held:
            one.close()
    assert sum(waits) == pytest.approx(handing.HEIR_S, abs=0.1)


def test_what_a_front_refuses_is_offered_on_while_another_front_takes_its_time() -> None:
    offered_on = threading.Event()

    def slow(front: Front, channel: socket.socket) -> None:
        """Says nothing of what it was handed first before the third one has what the second one refuses."""
        assert offered_on.wait(60)
        front.take(channel)

    def last(front: Front, channel: socket.socket) -> None:
        front.take(channel, True, lambda: len(front.found) == 4 and offered_on.set())

    with dead(6) as held, fronts(slow, Front.refuse, last) as made:
        assert hand_over(held, [one.path for one in made]) == []
    assert [len(one.found) for one in made] == [2, 2, 4]


def test_locks_of_a_front_that_was_handed_nothing_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot own them; one that has said nothing yet may, for as long as it writes the answer."""
    monkeypatch.setattr(asked_front, "WORD_S", 0.01)
    monkeypatch.setattr(handing, "HEIR_S", 60.0)
    monkeypatch.setattr(handing, "RELEASED_S", 60.0)
    owned: list[Journal] = []

    def own(front: Front, channel: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
        owned.append(Journal(descriptors[1]))
        for descriptor in descriptors:
            os.close(descriptor)
        time.sleep(0.1)  # its patience is over, and the two that are gone were asked
        channel.send(ANSWER.pack(MESSAGE.unpack(data)[1], True))

    begin = time.monotonic()
    with dead(1) as held, fronts(own) as [heir]:
        assert hand_over(held, [heir.path, "/nobody/there", "/nobody/here"]) == []
        owned[0].close()
    assert time.monotonic() - begin < 30


@pytest.fixture
def shared() -> Iterator[Path]:
    """The folder of a node's fronts; of one that died the socket is still there."""
    folder = socket_folder(len("/12345678/heir.new"))
    (folder / "of-one-that-died").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind(str(folder / "of-one-that-died" / "heir"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def starter() -> Iterator[int]:
    """A descriptor of a process that lives: it may start a front."""
    opened = os.pidfd_open(os.getpid())
    yield opened
    os.close(opened)


def test_answers_wait_for_a_front_that_comes(shared: Path, starter: int) -> None:
    left: list[list[Held]] = []
    with dead(3) as held:
        newcomers = Newcomers(str(shared), 600.0, starter)
        waiting = threading.Thread(target=lambda: left.append(hand_over(held, ["/nobody/heir"], newcomers)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        with fronts(Front.take, shared=shared) as [front]:
            waiting.join(60)
    assert (left, front.found) == ([[]], [True] * 3)


def test_a_front_that_nobody_told_of_is_asked_behind_the_others(shared: Path, starter: int) -> None:
    with dead(3) as held, fronts(Front.take, shared=shared) as [there], fronts(Front.take) as [told]:
        assert hand_over(held, [told.path], Newcomers(str(shared), 600.0, starter)) == []
    assert (told.found, there.found) == ([True] * 3, [])
    with dead(2) as held, fronts(Front.refuse) as [told], fronts(Front.take, shared=shared) as [there]:
        assert hand_over(held, [told.path], Newcomers(str(shared), 600.0, starter)) == []
    assert (told.found, there.found) == ([True] * 2, [True] * 2)


def test_what_a_front_refused_waits_for_no_other_one(shared: Path, starter: int) -> None:
    """As in an update, where those that come are of the next version as well."""
    with dead(2) as held, fronts(Front.refuse, shared=shared) as [_]:
        assert hand_over(held, [], Newcomers(str(shared), 600.0, starter)) == held


def test_nobody_is_waited_for_where_nobody_can_come(shared: Path, starter: int) -> None:
    """The patience is over; there is no folder; the process that starts fronts has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    opened = os.pidfd_open(ended.pid)
    ended.wait()
    for where, patience_s, by in ((shared, 0.2, starter), ("", 600.0, starter), (shared, 600.0, opened)):
        with dead(2) as held:
            assert hand_over(held, ["/nobody/heir"], Newcomers(str(where), patience_s, by)) == held
    os.close(opened)


def test_an_answer_whose_client_has_left_waits_for_nobody(shared: Path, starter: int) -> None:
    with connected() as (front, client):
        journal, one = begun(front)
        journal.close()
        threading.Timer(0.3, client.shutdown, (socket.SHUT_RDWR,)).start()
        assert hand_over([one], [], Newcomers(str(shared), 600.0, starter)) == [one]
        one.close()


def test_what_has_not_begun_waits_for_nobody_where_a_replica_of_another_node_can_answer_it(
    shared: Path, starter: int
) -> None:
    """Its connection closes, and proxies ask that one, while what has begun goes on waiting."""
    left: list[list[Held]] = []
    finished: list[Held] = []
    with connected() as (front, client), dead(1) as [waits]:
        journal, memory = Journal.begin(BEGAN, 0)
        fresh = Held(os.dup(front.fileno()), 0, memory)
        journal.close()
        alone = Held(os.dup(client.fileno()), 0, None)
        newcomers = Newcomers(str(shared), 600.0, starter, elsewhere=True)
        work = [waits, fresh, alone], [], newcomers, finished.extend
        waiting = threading.Thread(target=lambda: left.append(hand_over(*work)))
        waiting.start()
        while len(finished) < 2 and waiting.is_alive():
            time.sleep(0.005)
        assert waiting.is_alive()
        assert finished == [fresh, alone], "the latter has no journal"
        with fronts(Front.take, shared=shared):
            waiting.join(60)
        assert left == [[]]
        fresh.close()
        alone.close()


@pytest.mark.parametrize(("most_bytes", "waits"), [(4000, True), (400_000, False)])
def test_what_has_not_begun_waits_where_proxies_keep_no_request_of_its_length(
    most_bytes: int, waits: bool, shared: Path, starter: int
) -> None:
    """They could not send it to another node."""
    with connected() as (front, _):
        journal, memory = Journal.begin(msgspec.structs.replace(BEGAN, body=bytes(5000)), 0)
        held = Held(os.dup(front.fileno()), 0, memory)
        journal.close()
        newcomers = Newcomers(str(shared), 600.0, starter, elsewhere=True, most_bytes=most_bytes)
        left: list[list[Held]] = []
        waiting = threading.Thread(target=lambda: left.append(hand_over([held], [], newcomers)))
        waiting.start()
        waiting.join(0.5 if waits else 60)
        assert waiting.is_alive() == waits
        with fronts(Front.take, shared=shared) as [comes]:
            waiting.join(60)
        assert (left, comes.found) == (([[]], [True]) if waits else ([[held]], []))
        if not waits:
            held.close()


def test_a_front_that_comes_has_its_time_to_speak(shared: Path, starter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were there before may have been waited for until then."""
    monkeypatch.setattr(handing, "HEIR_S", 0.1)

    def late(front: Front, channel: socket.socket) -> None:
        time.sleep(0.3)
        front.take(channel)

    left: list[list[Held]] = []
    with dead(1) as held:
        newcomers = Newcomers(str(shared), 600.0, starter)
        waiting = threading.Thread(target=lambda: left.append(hand_over(held, [], newcomers)))
        waiting.start()
        waiting.join(0.3)
        monkeypatch.setattr(handing, "HEIR_S", 60.0)
        with fronts(late, shared=shared) as [front]:
            waiting.join(60)
    assert (left, front.found) == ([[]], [True])


@pytest.mark.parametrize("then", ["it hangs on", "it speaks", "it dies"])
def test_what_a_front_that_hangs_was_handed_waits_for_one_that_comes(
    then: str, shared: Path, starter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, or wakes up, later than others are waited for."""
    monkeypatch.setattr(asked_front, "WORD_S", 0.01)
    monkeypatch.setattr(handing, "HEIR_S", 0.1)
    over = threading.Event()

    def hang(front: Front, channel: socket.socket) -> None:
        assert over.wait(60)
        if then == "it speaks":
            front.take(channel)

    left: list[list[Held]] = []
    with dead(3) as held, fronts(hang) as [silent]:
        newcomers = Newcomers(str(shared), 600.0, starter)
        waiting = threading.Thread(target=lambda: left.append(hand_over(held, [silent.path], newcomers)))
        waiting.start()
        waiting.join(0.5)
        try:
            assert waiting.is_alive()
            monkeypatch.setattr(handing, "HEIR_S", 60.0)
            if then != "it hangs on":
                over.set()
            if then == "it speaks":
                waiting.join(60)
            with fronts(Front.take, shared=shared) as [comes]:
                waiting.join(60)
        finally:
            over.set()
    assert left == [[]]
    assert (silent.found, comes.found) == (([True] * 3, []) if then == "it speaks" else ([], [True] * 3))


def test_what_a_front_refused_ends_though_another_one_hangs(
    shared: Path, starter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an answer that nobody refused waits."""
    monkeypatch.setattr(asked_front, "WORD_S", 0.01)
    monkeypatch.setattr(handing, "HEIR_S", 0.1)
    over, left, finished = threading.Event(), list[list[Held]](), list[Held]()

    def hang(front: Front, channel: socket.socket) -> None:
        assert over.wait(60)

    def refuse_one(front: Front, channel: socket.socket) -> None:
        """And then hang."""
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(ANSWER.pack(MESSAGE.unpack(data)[1], False))
        assert over.wait(60)

    with dead(2) as held, fronts(hang, refuse_one) as made:
        newcomers = Newcomers(str(shared), 600.0, starter)
        work = held, [one.path for one in made], newcomers, finished.extend
        waiting = threading.Thread(target=lambda: left.append(hand_over(*work)))
        waiting.start()
        deadline = time.monotonic() + 60
        while not finished and waiting.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            assert waiting.is_alive()
            [refused] = finished
            refused.close()
            monkeypatch.setattr(handing, "HEIR_S", 60.0)
            with fronts(Front.take, shared=shared) as [comes]:
                waiting.join(60)
        finally:
            over.set()
    assert (left, comes.found) == ([[]], [True])


def test_an_answer_that_was_ended_is_handed_to_no_front_that_could_not_be_connected_to_before() -> None:
    with dead(2) as held, fronts(Front.take) as [heir]:
        ended, other = (OfferedAnswer(number, each, []) for number, each in enumerate(held))
        front = AskedFront(heir.path)
        front.take_in(ended)
        ended.over = True
        ended.held.close()
        front.take_in(other)
        while not other.taken and not front.died:
            front.hand()
            front.hear()
        assert other.taken
        front.close()
        other.held.close()
    assert heir.found == [True]


def test_the_folder_of_a_node_is_that_of_its_user_alone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    folder = shared_folder("app at 1.2.3.4:6379")
    assert folder is not None
    assert folder == shared_folder("app at 1.2.3.4:6379") != shared_folder("app at 1.2.3.5:6379")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert shared_folder("app at 1.2.3.4:6379") is None
    folder.rmdir()
    folder.symlink_to(shared)
    assert shared_folder("app at 1.2.3.4:6379") is None
    assert "is not this user's alone" in caplog.text


def test_the_folder_of_a_node_may_be_in_one_whose_group_folders_inherit(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its setgid bit, which they get as well; nobody but their user enters them."""
    shared.chmod(0o2770)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    folder = shared_folder("app at 1.2.3.4:6379")
    assert folder is not None
    assert folder.parent == shared
    assert folder.stat().st_mode & 0o7777 == 0o2700


@asynccontextmanager
async def listening(shared: Path | None) -> AsyncIterator[Heir]:
    """A front that takes answers over."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks")

    watchdog = StreamWatchdog([b"words"])
    heir = Heir(app, watchdog, lambda: "same", (b"x-replica", b"b"), Arrivals(), shared)
    try:
        yield heir
    finally:
        heir.close()
        watchdog.close()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_front_does_not_listen_in_a_folder_that_was_made_in_the_place_of_its_user_s(
    when: str, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last front's stream watchdog removes it, and somebody else may be the first to make it again."""
    make = tempfile.mkdtemp

    def made(*what: Any, dir: Path | None = None, **more: Any) -> str:
        if dir == shared:
            shared.chmod(0o777)
        return make(*what, dir=dir, **more)

    before = os.listdir(shared)
    if when == "before":
        shared.chmod(0o777)
    else:
        monkeypatch.setattr(tempfile, "mkdtemp", made)
    async with listening(shared) as heir:
        assert os.path.exists(heir.path)
        assert shared not in Path(heir.path).parents
        assert os.listdir(shared) == before
    assert "is not this user's alone" in caplog.text


async def test_a_front_makes_the_folder_of_its_node_again(shared: Path) -> None:
    shutil.rmtree(shared)
    async with listening(shared) as heir:
        assert Path(heir.path).parent.parent == shared
        assert shared.stat().st_mode & 0o777 == 0o700


async def test_the_folder_of_a_node_is_removed_by_the_last_front_that_ends_in_order(shared: Path) -> None:
    shutil.rmtree(shared)
    async with listening(shared):
        async with listening(shared):
            pass
        assert shared.exists()
    assert not shared.exists()


async def test_folders_of_fronts_that_died_with_their_watchdogs_are_removed_by_the_next_front(shared: Path) -> None:
    with fronts(Front.take, shared=shared) as [lives]:
        (shared / "of-one-that-never-listened").mkdir()
        (shared / "new").mkdir()
        (shared / "another-file").touch()
        for each in shared.iterdir():
            if each.name != "new":
                os.utime(each, (each.stat().st_mtime - LEFT_BEHIND_S,) * 2)
        async with listening(shared) as heir:
            left = {each.name for each in shared.iterdir()}
            assert left == {"new", "another-file", Path(lives.path).parent.name, Path(heir.path).parent.name}
        assert lives.is_alive()


def test_answers_are_handed_to_no_other_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may write to the folder can listen there."""
    with dead(2) as held, fronts(Front.take) as [other]:
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        assert hand_over(held, [other.path]) == held
        for one in held:
            one.close()
    assert other.found == []
    assert f"no answer is handed to user {user}, who listens at {other.path}" in capsys.readouterr().err


def test_words_that_a_front_said_before_it_left_are_heard() -> None:
    """Where messages were unread the kernel tells of those first."""
    left = threading.Event()

    def leave(front: Front, channel: socket.socket) -> None:
        if left.is_set():
            front.take(channel)
            return
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE.size, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        select.select([channel], [], [], 60)  # the second one is there
        channel.send(ANSWER.pack(MESSAGE.unpack(data)[1], True))
        left.set()

    with dead(2) as held, fronts(leave, Front.take) as [one, other]:
        offers = [OfferedAnswer(number, each, []) for number, each in enumerate(held)]
        front = AskedFront(one.path)
        for offer in offers:
            offer.asked.add(front)
            front.take_in(offer)
        front.hand()
        assert left.wait(60)
        while not front.died:
            front.hear()
        assert [offer.taken for offer in offers] == [True, False]
        assert hand_over(held[1:], [other.path]) == []
        held[0].close()


def test_a_front_that_cannot_be_connected_to_yet_is_asked_later() -> None:
    """As many wait for it as may."""
    with dead(1) as held, ExitStack() as stack:
        folder = socket_folder(len("heir") + 1)
        stack.callback(shutil.rmtree, folder)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(path := str(folder / "heir"))
        listener.listen(0)
        others = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2)]
        with suppress(BlockingIOError):
            for other in others:
                other.setblocking(False)
                other.connect(path)

        def take() -> None:
            time.sleep(0.1)
            for _ in others:
                channel, _ = listener.accept()
                with channel:
                    data = socket.recv_fds(channel, MESSAGE.size, 2)
                    for descriptor in data[1]:
                        os.close(descriptor)
                    if data[0]:
                        channel.send(ANSWER.pack(MESSAGE.unpack(data[0])[1], True))
                        return

        taking = threading.Thread(target=take)
        taking.start()
        others[0].close()  # one that has left again
        assert hand_over(held, [path]) == []
        taking.join()


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """The process can open none while this lasts: nothing that others left behind is closed meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.disable()
    os.close(least := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()


def test_answers_stay_where_there_are_no_descriptors_to_hand_them_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing, "HEIR_S", 0.1)
    with dead(2) as held, fronts(Front.take) as [heir], connected() as (front, client):
        held.append(Held(os.dup(front.fileno()), 0, None))
        with no_more_descriptors():
            assert hand_over(held, [heir.path]) == held
        front.close()
        end(held, [b"words"])
        assert client.makefile("rb").read() == b"5\r\nwords\r\n0\r\n\r\n"


def test_a_watchdog_that_holds_all_it_can_writes_last_words_though_nobody_reads_its_stderr() -> None:
    read, write = os.pipe()
    os.close(read)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = {
        "silence_s": 1e9,
        "patience_s": 0,
        "sent_again_bytes": 0,
        "last_words": [b"words".hex()],
        "folder": "",
        "shared": "",
        "starter": 0,
    }
    settings = json.dumps({**told, "note": None})
    arguments = [sys.executable, "-S", watchdog_process.__file__, str(theirs.fileno()), settings]
    program = ["bash", "-c", 'ulimit -n 64 && exec "$@"', "bash", *arguments]
    process = subprocess.Popen(program, pass_fds=[theirs.fileno()], stderr=write)
    theirs.close()
    os.close(write)
    with ExitStack() as stack:
        stack.callback(process.wait)
        clients = []
        for number in range(40):
            front, client = stack.enter_context(connected())
            journal, one = begun(front)
            assert one.journal is not None
            socket.send_fds(ours, [MESSAGE.pack(HOLD_JOURNAL, number)], [front.fileno(), one.journal])
            journal.close()
            one.close()
            front.close()
            clients.append(client)
        ours.close()
        heard = [client.makefile("rb").read() for client in clients]
    ended = HEAD + b"5\r\nwords\r\n0\r\n\r\n"
    held = heard.index(HEAD)  # from here on there were no numbers
    assert 20 < held < 32
    assert heard == [ended] * held + [HEAD] * (40 - held)


def test_bytes_that_are_acknowledged_while_they_are_counted_are_counted_once() -> None:
    class Acknowledged(socket.socket):
        """A connection whose client reads all that it was sent between two looks of the one that counts."""

        def getsockopt(self, *what: Any) -> Any:
            found = super().getsockopt(*what)
            left = sent - len(had)
            while left:
                had.extend(part := client.recv(left))
                left -= len(part)
            while struct.unpack("i", fcntl.ioctl(self, termios.TIOCOUTQ, bytes(4)))[0]:
                assert time.monotonic() < deadline
            return found

    deadline = time.monotonic() + 60
    with connected() as (front, client), Acknowledged(fileno=os.dup(front.fileno())) as looked_at:
        front.setblocking(False)
        had, sent = bytearray(), 0
        try:
            while True:
                sent += front.send(bytes(1 << 16))
        except BlockingIOError:
            assert given_to(front) == sent
        assert given_to(looked_at) == sent == len(had)


def test_last_words_are_written_by_the_owner_of_the_journal_only_and_nobody_goes_on_behind_them() -> None:
    with connected() as (front, client), connected() as (other, other_client):
        taken, held = begun(front)
        left, alone = begun(other)
        left.close()
        journal = os.dup(alone.journal or 0)
        front.close()
        other.close()
        end([held, alone], [b"words"])
        assert client.makefile("rb").read() == HEAD
        assert other_client.makefile("rb").read() == HEAD + b"5\r\nwords\r\n0\r\n\r\n"
        taken.close()
        late = Journal(journal)  # a front that hung has the message still
        with pytest.raises(msgspec.ValidationError, match="no request"):
            late.read()
        late.close()
        os.close(journal)


def test_an_answer_that_a_front_completed_gets_no_last_words() -> None:
    """A front that took it without a word in time may be done before the watchdog gives up."""
    with connected() as (front, client):
        journal, held = begun(front)
        journal.end()
        front.close()
        end([held], [b"words"])
        assert client.makefile("rb").read() == HEAD


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_front_that_looks_late_does_not_own_a_completed_answer_or_keep_its_connection_open(loop: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    async def run() -> None:
        watchdog = StreamWatchdog([b"words"])
        quick, late = (Heir(app, watchdog, lambda: "same", (b"x-replica", b"b"), Arrivals()) for _ in range(2))
        with connected() as (front, client):
            client.setblocking(False)
            journal, memory = Journal.begin(BEGAN, 0)
            journal.close()
            unread = os.dup(front.fileno()), os.dup(memory)
            assert quick._take_over(0, front.detach(), memory)
            data = b""
            async with asyncio.timeout(60):
                while part := await asyncio.get_running_loop().sock_recv(client, 1000):
                    data += part
                while quick.answers:
                    await asyncio.sleep(0.005)
            assert data.endswith(b"\r\n\r\ndone")
            assert os.pread(unread[1], 8, 0) == bytes(8)
            assert not late._take_over(0, *unread)
            assert not late.answers
        for heir in (quick, late):
            heir.close()
        watchdog.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(run())


def test_a_connection_whose_journal_did_not_arrive_is_not_guarded() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, connected() as (front, client):
        socket.send_fds(ours, [MESSAGE.pack(HOLD_JOURNAL, 1)], [front.fileno()])
        front.close()
        ours.close()
        assert keep(theirs) == []
        assert client.recv(1) == b""


def test_a_journal_that_could_not_grow_says_nothing_more() -> None:
    """Behind a gap, however small what follows: an heir would take it for all there is."""
    journal, memory = Journal.begin(BEGAN, 0)
    sent: list[bytes] = []
    feed, write = journal.feeder(0), journal.writer(sent.append)
    write(HEAD)
    feed(RequestOutput("", (5,), at=0))
    write(b"one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size, limits[1]))
    try:
        feed(RequestOutput("", tuple(range(1, 1 + journal.size)), at=1))
        write(b"large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    feed(RequestOutput("", (6,), at=1 + journal.size))
    write(b"two")
    journal.close()
    assert sent == [HEAD, b"one", b"large", b"two"]
    found = Journal(memory).read()
    assert (found.head, found.written, found.tokens) == (HEAD, [(3, checksum(b"one"))], 1)
    os.close(memory)


def test_a_journal_that_cannot_be_mapped_is_not_owned() -> None:
    memory = os.memfd_create("empty")
    with pytest.raises(ValueError, match="empty"):
        Journal(memory)
    os.ftruncate(memory, mmap.PAGESIZE)
    Journal(memory).close()
    os.close(memory)


def test_pieces_of_equal_length_that_differ_in_a_few_digits_have_other_checksums() -> None:
    numbers = [b"%03d" % number for number in range(1000)]
    assert len({checksum(b'data: {"text":"' + number + b'"}\n\n') for number in numbers}) == len(numbers)
