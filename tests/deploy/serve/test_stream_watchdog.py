"""A front that dies without a word, as its clients see it."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dying_fronts import is_alive

from deploy.serve import watchdog_process
from deploy.serve.front_silence import BEAT_S, Silence
from deploy.serve.held_connection import HOLD, MESSAGE, RELEASE, Held
from deploy.serve.last_words import WRITE_TIMEOUT_S, end
from deploy.serve.stream_watchdog import StreamWatchdog
from deploy.serve.watchdog_process import Others, keep

ROOT = Path(__file__).resolve().parents[3]

# A server that streams through the layer as a replica does: uvicorn's receive inside an object of Serve's.
SERVER = """
import pathlib, socket, sys, uvicorn
from deploy.routing.arrivals import Arrivals
from deploy.serve.stream_watchdog import StreamWatchdog
from deploy.serve.under_serve import UnderServe

async def app(scope, receive, send):
    kind = b"application/json" if scope["path"] == "/json" else b"text/event-stream"
    headers = [(b"content-type", kind), (b"x-request-id", b"inner")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] != "/json":
        for n in range(3):
            await send({"type": "http.response.body", "body": b"data: %d\\n\\n" % n, "more_body": True})
    if scope["path"] != "/done":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.body", "body": b""})

folder = pathlib.Path(sys.argv[2])
words = (b'data: {"error": 1}\\n\\n', b'event: 2\\n\\n', b'event: 3\\n\\n')
guardian = StreamWatchdog(words, folder, (folder.parent / "fault", "the front died"))
layer = UnderServe(app, "me", Arrivals(), guardian)

async def serve(scope, receive, send):
    class Wrapped:
        _receive = staticmethod(receive)
        async def __call__(self):
            return await receive()
    Wrapped._receive = receive
    await layer(scope, Wrapped(), send)

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], guardian.pid, flush=True)
uvicorn.Server(uvicorn.Config(serve, log_level="error", lifespan="off", loop=sys.argv[1])).run(sockets=[listener])
"""


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest, tmp_path: Path):
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    (sockets / "one").touch()
    arguments = [sys.executable, "-c", SERVER, request.param, str(sockets)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    port, watchdog = map(int, process.stdout.readline().split())
    yield port, process, watchdog
    process.kill()
    process.wait()


def begin(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    response.connection = connection  # kept alive with the response
    return response


@pytest.mark.alone
def test_streams_of_a_killed_front_end_with_the_error_event(server, tmp_path: Path) -> None:
    port, process, watchdog = server
    streams = [begin(port, "/hang") for _ in range(5)]
    for stream in streams:
        assert stream.read(27) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    os.kill(process.pid, signal.SIGKILL)
    # http.client raises IncompleteRead for a body that ends without its last chunk.
    texts = [stream.read().decode() for stream in streams]
    assert texts == ['data: {"error": 1}\n\n'] * 5
    deadline = time.monotonic() + 60
    while is_alive(watchdog):
        assert time.monotonic() < deadline, "the watchdog outlived its work"
        time.sleep(0.02)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("fault", "the front died")]
    process.wait()  # its listener may be closed behind what the watchdog hears
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1)


@pytest.mark.alone
def test_a_stream_ends_in_the_shape_of_its_endpoint(server) -> None:
    port, process, _ = server
    endings = {"/v1/completions": 'data: {"error": 1}', "/v1/messages": "event: 2", "/v1/responses": "event: 3"}
    streams = {path: begin(port, path) for path in endings}
    for stream in streams.values():
        assert len(stream.read(27)) == 27
    os.kill(process.pid, signal.SIGKILL)
    assert {path: stream.read().decode().strip() for path, stream in streams.items()} == endings


@pytest.mark.parametrize(
    ("server", "fresh"),
    [
        ("asyncio", True),
        pytest.param("asyncio", False, marks=pytest.mark.long),
        pytest.param("uvloop", True, marks=pytest.mark.long),
        ("uvloop", False),
    ],
    indirect=["server"],
)
def test_a_cause_that_the_front_noted_stays(server, tmp_path: Path, fresh: bool) -> None:
    _, process, watchdog = server
    fault = tmp_path / "fault"
    fault.write_text("rank 1 died")
    if not fresh:
        os.utime(fault, (1.0, 1.0))  # of the front before this one
    process.kill()
    deadline = time.monotonic() + 60
    while is_alive(watchdog):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert fault.read_text() == ("rank 1 died" if fresh else "the front died")


@pytest.mark.parametrize("server", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop"], indirect=True)
def test_what_is_no_stream_is_left_to_break(server) -> None:
    port, process, _ = server
    answer = begin(port, "/json")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(http.client.IncompleteRead):
        answer.read()


def held_sockets(watchdog: int) -> int:
    """Count the sockets that it holds; a watchdog that has just begun still opens and closes other files of its own."""
    found = 0
    for name in os.listdir(f"/proc/{watchdog}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/{watchdog}/fd/{name}").startswith("socket")
    return found


def wait_until_it_holds(watchdog: int, sockets: int) -> None:
    deadline = time.monotonic() + 60
    while held_sockets(watchdog) != sockets:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("server", ["asyncio", pytest.param("uvloop", marks=pytest.mark.long)], indirect=True)
def test_finished_streams_are_let_go_of(server) -> None:
    port, _, watchdog = server
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(20):
        connection.request("GET", "/done")
        response = connection.getresponse()
        assert response.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert response.headers.get_all("x-request-id") is None
        assert response.headers.get_all("x-latentserve-replica") == ["me"]
    wait_until_it_holds(watchdog, 1)  # the channel


@pytest.mark.parametrize("server", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop"], indirect=True)
def test_a_client_that_leaves_is_let_go_of(server) -> None:
    port, _, watchdog = server
    stream = begin(port, "/hang")
    stream.read(8)
    wait_until_it_holds(watchdog, 2)  # the channel and the client
    stream.close()
    stream.connection.close()
    wait_until_it_holds(watchdog, 1)


@pytest.mark.alone
def test_a_front_that_hangs_is_ended() -> None:
    code = (
        "import time; from deploy.serve.stream_watchdog import StreamWatchdog\n"
        "watchdog = StreamWatchdog([b''], silence_s=1.0)\n"
        "print(flush=True)\n"
        "while True: watchdog.beat(); time.sleep(0.2)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as front:
        front.stdout.readline()
        time.sleep(1.5)
        assert front.poll() is None
        front.send_signal(signal.SIGSTOP)
        assert front.wait(60) == -signal.SIGKILL


def hanging(does: str) -> str:
    """A front with a long patience that gives signs of life for a while and then hangs, in a thread beside others."""
    return (
        "import threading, time\n"
        "from deploy.serve.stream_watchdog import StreamWatchdog\n"
        "watchdog = StreamWatchdog([b''], silence_s=600.0)\n"
        "def loop():\n"
        "    for _ in range(8): watchdog.beat(); time.sleep(0.3)\n"
        "    print(flush=True)\n"
        f"    {does}\n"
        "threading.Thread(target=loop).start()\n"
        "while True: time.sleep(0.01)"
    )


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("threading.Event().wait()", r"has waited for [\d.]+ s in its loop"),
        pytest.param("while True: pass", r"has computed for [\d.]+ s in its loop", marks=pytest.mark.long),
        ("while True: watchdog.beat(); time.sleep(0.2)", r"was stopped [\d.]+ s ago"),
    ],
)
def test_a_front_that_hangs_is_ended_sooner_where_the_kernel_says_so(does: str, why: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hanging(does)], cwd=ROOT, **pipes) as front:
        front.stdout.readline()
        if "stopped" in why:
            front.send_signal(signal.SIGSTOP)
        assert front.wait(120) == -signal.SIGKILL
        assert re.search(why.encode(), front.stderr.read())


class Looked(Silence):
    """What the kernel says of a front, look by look; the last of it for ever."""

    def __init__(self, looks: list[tuple[str, float, int] | None], silence_s: float = 10.0) -> None:
        super().__init__(1, silence_s)
        self._looks = iter(looks)
        self._last = looks[-1]
        self.beat(2)

    def _look(self) -> tuple[str, float, int] | None:
        self._last = next(self._looks, self._last)
        return self._last

    def end(self) -> str:
        """Let it be silent until it is given up; return after how many seconds, and why."""
        looks = 1
        while not (wrong := self.grows()):
            looks += 1
        return f"{looks * BEAT_S:g} {wrong.split()[0]} {wrong.split()[1]}"


LIVES = [("S", 0.0, 1), ("S", 0.0, 2)]
"""Two looks at a front between which it was switched to."""


@pytest.mark.parametrize(
    ("looks", "after"),
    [
        ([*LIVES, ("S", 0.0, 2)], "2.25 has waited"),
        ([*LIVES, ("T", 0.0, 2)], "1.25 was stopped"),
        ([*LIVES, *(("R", 0.25 * n, 2) for n in range(99))], "3.5 has computed"),
        # These may be on a busy machine; on a disk that is slow; at a kernel that does not count; in a debugger.
        ([*LIVES, ("R", 0.0, 2)], "10 was silent"),
        ([*LIVES, *(("R", 0.05 * n, 2 + n) for n in range(99))], "10 was silent"),
        ([*LIVES, *(("S", 0.05 * n, 2 + n) for n in range(99))], "10 was silent"),
        ([*LIVES, ("D", 0.0, 2)], "10 was silent"),
        ([("S", 0.0, 0)], "10 was silent"),
        ([None], "10 was silent"),
        ([*LIVES, ("t", 0.0, 2)], "10 was silent"),
        # The first look fails, as where no file can be opened for a moment, at a front that has computed for long.
        ([("R", 0.0, 1), None, ("R", 5000.0, 2), ("S", 5000.0, 3), ("R", 5000.0, 4)], "10 was silent"),
        ([("R", 0.0, 1), None, *(("R", 5000.0 + 0.25 * n, 2) for n in range(99))], "3.5 has computed"),
    ],
)
def test_a_front_is_given_up_by_what_the_kernel_says_of_it(
    looks: list[tuple[str, float, int] | None], after: str
) -> None:
    assert Looked(looks).end() == after


def test_each_sign_of_a_front_begins_anew() -> None:
    for state in "STR":
        silence = Looked([*LIVES, *((state, 0.25 * n if state == "R" else 0.0, 2) for n in range(200))])
        for _ in range(50):
            assert [silence.grows() for _ in range(3)] == [""] * 3
            silence.sign()


@pytest.mark.parametrize("state", ["S", "T", "R", None])
def test_a_front_that_ends_in_order_is_not_given_up(state: str | None) -> None:
    looks = [None if state is None else (state, 0.25 * n if state == "R" else 0.0, 2) for n in range(99)]
    silence = Looked([*LIVES, *looks])
    silence.beat(0)
    assert not any(silence.grows() for _ in range(99))


@pytest.mark.long
def test_a_front_that_ends_in_order_may_wait_for_others_longer_than_a_loop_may() -> None:
    code = (
        "import time\n"
        "from deploy.serve.stream_watchdog import StreamWatchdog\n"
        "watchdog = StreamWatchdog([b''])\n"
        "for _ in range(4): watchdog.beat(); time.sleep(0.25)\n"
        "watchdog.leave()\n"
        "time.sleep(3.5)\n"
        "watchdog.close()"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.parametrize("full", [False, True])
def test_a_front_that_ends_in_order_still_has_the_heirs_that_it_named(full: bool) -> None:
    """Its own end may be the SIGKILL of the answers that it took over. `full`: the watchdog has much to read before."""
    watchdog = StreamWatchdog([b""])
    watchdog.close()
    watchdog._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    watchdog._socket.setblocking(False)
    watchdog.beat(["/one/heir", "/other/heir"], elsewhere=True)
    others, kept = Others(), []
    keeping = threading.Thread(target=lambda: kept.append(keep(theirs, others=others)))
    if full:
        while watchdog._send(RELEASE, 1):
            pass
        threading.Timer(0.05, keeping.start).start()
    watchdog.leave()
    watchdog._socket.close()
    if not full:
        keeping.start()
    while not kept:
        time.sleep(0.005)
    assert kept == [[]]
    assert (others.heirs, others.elsewhere) == (["/one/heir", "/other/heir"], True)


def test_what_a_front_computed_in_a_silence_before_is_not_counted() -> None:
    silence = Looked([*LIVES, ("R", 1.0, 3), None, ("R", 5000.0, 4), ("R", 5000.25, 4)])
    assert [silence.grows() for _ in range(2)] == [""] * 2
    silence.sign()
    assert [silence.grows() for _ in range(3)] == [""] * 3


def test_the_process_imports_the_standard_library_and_nothing_heavy_of_the_project() -> None:
    """It starts with every front, and stays with it: no package of others, and of the project only what it is made
    of."""
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = [sys.argv[1], 'no settings']\n"
        "try: runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except ValueError: pass\n"
        "print(*(name for name in sys.modules if name.partition('.')[0] not in sys.stdlib_module_names))"
    )
    program = [sys.executable, "-SEc", code, watchdog_process.__file__]
    loaded = subprocess.run(program, stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    own = "asked_front", "front_silence", "hand_over", "held_connection", "last_words", "newcomers"
    parts = {"__main__", "deploy", "deploy.serve", *(f"deploy.serve.{name}" for name in own)}
    assert set(loaded) == parts


def test_a_python_without_descriptors_of_processes_guards_streams(tmp_path: Path) -> None:
    """As builds for old systems are."""
    (tmp_path / "fronts").mkdir()
    code = "import os, runpy, sys\ndel os.pidfd_open\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')"
    told = {"silence_s": 10.0, "patience_s": 60.0, "last_words": [b"words".hex()], "folder": "", "note": None}
    settings = json.dumps({**told, "sent_again_bytes": 0, "shared": str(tmp_path / "fronts"), "starter": os.getpid()})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = [sys.executable, "-SEc", code, watchdog_process.__file__, str(theirs.fileno()), settings]
    with theirs:
        process = subprocess.Popen(program, pass_fds=[theirs.fileno()])
    stream, client = socket.socketpair()
    with client, client.makefile("rb") as heard:
        socket.send_fds(ours, [MESSAGE.pack(HOLD, 1)], [stream.fileno()])
        stream.close()
        ours.close()
        assert heard.read() == b"5\r\nwords\r\n0\r\n\r\n"
    assert process.wait(60) == 0


@pytest.mark.soak
@pytest.mark.alone
def test_a_front_that_gets_no_processor_for_long_is_not_ended() -> None:
    """It is silent for longer than one that hangs may be, because others compute with a thousand times its weight."""
    code = (
        "import os, sys, time\n"
        "from deploy.serve.stream_watchdog import StreamWatchdog\n"
        "watchdog, longest = StreamWatchdog([b''], silence_s=600.0), 0.0\n"
        "watchdog.beat()\n"
        "os.sched_setaffinity(0, {int(sys.argv[1])})\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "print(flush=True)\n"
        "while longest < 2.5:\n"
        "    begin = time.monotonic()\n"
        "    while time.monotonic() < begin + 0.2: pass\n"
        "    watchdog.beat()\n"
        "    longest = max(longest, time.monotonic() - begin)\n"
    )
    cpu = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        front = stack.enter_context(subprocess.Popen([sys.executable, "-c", code, str(cpu)], cwd=ROOT))
        stack.callback(front.kill)
        others = [stack.enter_context(subprocess.Popen([sys.executable, "-c", busy])) for _ in range(4)]
        for other in others:
            stack.callback(other.kill)
        assert front.wait(600) == 0


@pytest.mark.long
@pytest.mark.alone
def test_a_front_whose_patience_is_short_is_not_ended_between_two_signs_of_life() -> None:
    code = (
        "import time; from deploy.serve.stream_watchdog import StreamWatchdog\n"
        "from deploy.serve.front_silence import BEAT_S\n"
        "watchdog = StreamWatchdog([b''], silence_s=0.1)\n"
        "print(flush=True)\n"
        "while True: watchdog.beat(); time.sleep(1.5 * BEAT_S)"  # a loop has other things to do, too
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as front:
        front.stdout.readline()
        time.sleep(3.0)
        assert front.poll() is None
        front.kill()


async def test_what_a_watchdog_has_no_time_for_yet_is_told_later() -> None:
    """All of a busy front's streams begin in one moment, and most of them end before it is given the processor."""
    watchdog = StreamWatchdog([b"data: 1\n\n"])

    async def until(wanted: int) -> None:
        deadline = time.monotonic() + 60
        while (found := held_sockets(watchdog.pid)) != wanted:
            assert time.monotonic() < deadline, f"{found} sockets, not {wanted}"
            await asyncio.sleep(0.01)

    before = held_sockets(watchdog.pid)
    stream, client = socket.socketpair()
    with stream, client:
        os.kill(watchdog.pid, signal.SIGSTOP)
        held = [watchdog.hold(stream.fileno()) for _ in range(600)]
        assert None not in held
        for number in held[100:]:
            watchdog.release(number)
        os.kill(watchdog.pid, signal.SIGCONT)
        await until(before + 100)
        for number in held[:100]:
            watchdog.release(number)
        await until(before)
    watchdog.close()


@pytest.mark.alone
def test_clients_that_do_not_read_hold_the_others_up_for_a_second_at_most() -> None:
    """All of them together."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    streams = [socket.socketpair() for _ in range(40)]
    for stuck, _ in streams[:-1]:
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while stuck.send(b"x" * 65536):
                pass
    for number, (front, _) in enumerate(streams):
        socket.send_fds(ours, [MESSAGE.pack(HOLD + number, number)], [front.fileno()])
        front.close()
    ours.close()
    words = "data: ü\n\n".encode()
    begun = time.monotonic()
    end(keep(theirs), [b"another's"] * 39 + [words])
    assert time.monotonic() - begun < 20 * WRITE_TIMEOUT_S  # less than a second each
    assert streams[-1][1].recv(4096) == b"a\r\n" + words + b"\r\n0\r\n\r\n"
    assert streams[-1][1].recv(1) == b""


def test_a_client_that_does_not_read_ends_nobody_else_s_last_words_at_a_busy_front() -> None:
    """Which has more than a thousand streams, so that descriptors have numbers above those that select(2) takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    streams = [socket.socketpair() for _ in range(2)]
    stuck = streams[0][0]
    stuck.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while stuck.send(b"x" * 65536):
            pass
    try:
        assert all(front.fileno() > 1023 for front, _ in streams)
        end([Held(front.detach(), 0, None) for front, _ in streams], [b"data: 1\n\n"])
        assert streams[1][1].recv(4096) == b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        for _, client in streams:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_sockets_of_an_engine_that_was_started_again_are_removed_too(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "socket").touch()
    watchdog = StreamWatchdog([b"words"], folders[0])
    watchdog.remove_at_end(None)
    watchdog.remove_at_end(folders[1])
    watchdog._socket.close()  # as the kernel does it for a front that was killed
    watchdog._process.wait(60)
    assert not list(tmp_path.iterdir())
