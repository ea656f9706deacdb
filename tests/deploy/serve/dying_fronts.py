"""Fronts of two replicas in processes of their own, which end themselves by SIGKILL at a chosen point of an answer.

A process that has imported everything forks a front for each line on its standard input. Its engine follows a script
that depends on the prompt, the seed and the position alone, as noise of a real one does; what a request draws follows
from the id that its client gives it, so two runs of one request can be compared byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from workers.channel.ports import socket_folder

ROOT = Path(__file__).resolve().parents[3]
CREATED = 1_700_000_000.25
TEMPLATE = "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
"""Chats begin with reasoning."""
TEXT = "Well, {0}: Grüße aus 東京 👩‍🚀.</think>Number {1} of it is 7; END of {0}. "
CALL = '<tool_call>\n{{"name": "f", "arguments": {{"x": {0}, "y": "ü"}}}}\n</tool_call>\n'


class ScriptedEngine:
    """An engine whose tokens follow from prompt, seed and position."""

    fault = None
    selftest = None

    def __init__(self, tokenizer: Any, pause_s: float) -> None:
        from workers.protocol.front import ModelInfo
        from workers.protocol.messages import EngineStats

        self._tokenizer, self._pause_s = tokenizer, pause_s
        self.info = ModelInfo("tiny", max_context=4096, vocab_size=512, eos_ids=(1,), max_width=4, created=int(CREATED))
        self.stats = EngineStats(slots=64, queue_limit=512)

    def _ids(self, request: Any) -> list[int]:
        seed = request.sampling.seed
        text = TEXT.format(seed % 97, seed % 89) + CALL.format(seed % 83) + TEXT.format(seed % 79, len(request.prompt))
        ids = self._tokenizer.encode(text * 3, add_special_tokens=False)
        return [*ids[: request.sampling.max_tokens - 1], 1]

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        from fake_engine import scores_of

        from workers.protocol.messages import RequestOutput
        from workers.protocol.plan import TopLogprobs
        from workers.protocol.request import unpack_tokens

        ids, at = self._ids(request), len(unpack_tokens(request.done))
        first = at == 0
        while at < len(ids):
            await asyncio.sleep(self._pause_s)
            end = min(at + 1 + (at % 3 == 1), len(ids))  # one or two, and from every place on the same ones
            tokens = tuple(ids[at:end])
            wanted = request.sampling.logprobs
            logprobs = tuple(TopLogprobs(-0.5, (t,) * wanted, (-0.5,) * wanted) for t in tokens) if wanted >= 0 else ()
            finish = None if end < len(ids) else "stop" if 1 in request.sampling.stop_ids else "length"
            yield RequestOutput(
                request.request_id, tokens, finish, logprobs, 64 if first and len(request.prompt) % 2 else 0,
                prompt=scores_of(request) if first else None, offered=len(tokens) - 1, at=at,
            )  # fmt: skip
            at, first = end, False

    async def health_check(self) -> None:
        """Sound at any time."""


@dataclass
class Front:
    """What a front is told: the sockets of its heirs, and where it ends."""

    heirs: Sequence[str] = ()
    event: str = ""
    """`begun` (the journal is there), `fed` (an output is taken down), `journalled` (a piece is taken down and not
    sent), `sent`, `partly` (half of it was sent), `taken` (an answer is taken over, and nobody knows), or `done` (the
    application is done with an answer)."""
    count: int = 0
    """At which of these events, counted from 1, it ends itself."""
    answers: int = 0
    """How many answers must have begun before: those of clients that a busy machine keeps waiting, too."""
    fault: str = ""
    """A fault that is planted in it."""
    pause_s: float = 0.0
    fingerprint: str = "same"
    stalled: bool = False
    """Whether the kernel takes few bytes."""
    shared: str = ""
    """Folder in which watchdogs find it, and its own one finds others; none by default."""
    patience_s: float = 0.0
    """How long its watchdog waits for one that comes."""


def serve(front: Front, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Be a front until the end of the process."""
    import uvicorn
    from tiny_tokenizer import tiny

    from deploy.api.app import create_app
    from deploy.api.http.draws import Draws
    from deploy.api.http.errors import FAILURES, engine_down
    from deploy.config.api import ApiConfig
    from deploy.routing.arrivals import Arrivals
    from deploy.serve.front_silence import BEAT_S
    from deploy.serve.heir import Heir
    from deploy.serve.journal import Journal
    from deploy.serve.journals import Journals
    from deploy.serve.stream_watchdog import StreamWatchdog
    from deploy.serve.under_serve import UnderServe

    events = begun = 0

    def happened(event: str) -> None:
        nonlocal events, begun
        begun += event == "begun"
        if event == front.event:
            events += 1
            if events >= front.count and begun >= front.answers:
                os.kill(os.getpid(), signal.SIGKILL)

    plant(front, happened, Journal)
    config = ApiConfig(chat_template=TEMPLATE, tool_parser="hermes", reasoning_parser="deepseek_r1", max_n=8)
    tokenizer = tiny()
    app = create_app(ScriptedEngine(tokenizer, front.pause_s), tokenizer, config)

    async def known(scope: Any, receive: Any, send: Any) -> None:
        """Draw what follows from the request's id."""
        if scope["type"] == "http":
            secret = blake2b(dict(scope["headers"]).get(b"x-request-id", b""), digest_size=16).digest()
            scope.setdefault("latentserve.draws", Draws(secret, CREATED))
        await app(scope, receive, send)

    async def main() -> None:
        words = [engine_down("the replica's front died").event(path) for path in FAILURES]
        shared = Path(front.shared) if front.shared else None
        watchdog = StreamWatchdog(words, shared=shared, patience_s=front.patience_s)
        arrivals = Arrivals()
        heir = Heir(app, watchdog, lambda: front.fingerprint, (b"x-latentserve-replica", b"heir"), arrivals, shared)
        journals = Journals(watchdog, lambda: front.fingerprint)
        layer = UnderServe(known, "victim", arrivals, watchdog, journals=journals)

        async def under_serve(scope: Any, receive: Any, send: Any) -> None:
            class Wrapped:
                _receive = staticmethod(receive)

                async def __call__(self) -> Any:
                    return await receive()

            Wrapped._receive = receive
            await layer(scope, Wrapped(), send)

        async def beat() -> None:
            while True:
                watchdog.beat(front.heirs)
                await asyncio.sleep(BEAT_S)

        beating = asyncio.create_task(beat())
        settings = uvicorn.Config(
            under_serve, loop="none", http="httptools", access_log=False, lifespan="off", log_level="warning",
            date_header=False,
        )  # fmt: skip
        server = uvicorn.Server(settings)
        port = listener.getsockname()[1]
        say(json.dumps({"pid": os.getpid(), "port": port, "watchdog": watchdog.pid, "heir": heir.path}))
        await server.serve(sockets=[listener])
        beating.cancel()

    asyncio.run(main())


def plant(front: Front, happened: Callable[[str], None], journal: Any) -> None:
    """Let the front tell what happens in it, and make the mistake that it is to make."""
    from deploy.api.http.draws import Draws
    from deploy.serve import heir, journals
    from deploy.serve.held_connection import given_to

    fed, begin, feeder = journal.fed, journals.Journals.begin, journal.feeder

    def telling_begin(self: Any, *what: Any) -> Any:
        made = begin(self, *what)
        happened("begun")
        return made

    ending = journals.Journals.end

    def telling_end(self: Any, *what: Any) -> None:
        ending(self, *what)
        happened("done")

    journals.Journals.end = telling_end

    def telling_fed(self: Any, choice: int, output: Any) -> None:
        if front.fault != "an output is not taken down" or output.at != 6:
            fed(self, choice, output)
        happened("fed")

    def telling_feeder(self: Any, choice: int) -> Any:
        feed, lost = feeder(self, choice), front.fault == "an output is not taken down"
        if not isinstance(feed, functools.partial):  # the way of ordinary streams

            def telling(output: Any) -> None:
                if not lost or output.at != 6:
                    feed(output)
                happened("fed")

            return telling
        return feed

    journal.feeder = telling_feeder

    writer = journal.writer

    def telling_writer(self: Any, write: Any) -> Any:
        """Half of a piece goes out before `partly`."""

        def written(data: bytes) -> None:
            happened("journalled")
            half = len(data) // 2 if front.event == "partly" else len(data)
            write(data[:half])
            if data[half:]:
                happened("partly")
                write(data[half:])
            happened("sent")

        if front.fault != "taken down behind sending":
            return writer(self, written)
        take_down = writer(self, lambda _: None)

        def wrong(data: bytes) -> None:
            written(data)
            take_down(data)

        return wrong

    journal.fed, journal.writer, journals.Journals.begin = telling_fed, telling_writer, telling_begin
    taking = heir.Heir._take_over

    def telling_taken(self: Any, words: int, connection: int, memory: int) -> bool:
        done = taking(self, words, connection, memory)
        happened("taken")
        return done

    heir.Heir._take_over = telling_taken
    if front.fault == "an output is lost":
        outputs = heir._Answer.outputs
        heir._Answer.outputs = lambda self, choice: outputs(self, choice)[1:]
    elif front.fault == "the head is not counted":
        heir.given_to = lambda connection: given_to(connection) - 1
    elif front.fault == "other draws":
        heir.Draws = lambda secret, created: Draws()
    elif front.fault == "an engine that begins again":
        heir._Answer.outputs = lambda self, choice: ()


def zygote() -> None:
    """Fork a front for each line."""
    from tiny_tokenizer import tiny

    import deploy.api.app
    import deploy.serve.heir
    import deploy.serve.under_serve  # noqa: F401

    tiny()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("{}", flush=True)
    for line in sys.stdin:
        front = Front(**json.loads(line))
        listener = socket.create_server(("127.0.0.1", 0))
        if front.stalled:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        if os.fork() == 0:
            os.close(0)
            os.open("/dev/null", os.O_RDONLY)
            try:
                serve(front, listener, lambda text: print(text, flush=True))
            finally:
                os._exit(0)
        listener.close()


class Zygote:
    """The test's handle of that process."""

    def __init__(self) -> None:
        paths = os.pathsep.join(str(ROOT / part) for part in ("", "tests/deploy/api", "tests/deploy/text"))
        self._folder = socket_folder(len("/latentserve-12345678/heir.new"))
        """For the folders of the fronts' sockets: tests kill stream watchdogs, which would remove them."""
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self._folder)},
        )  # fmt: skip
        self._fronts: list[dict[str, Any]] = []
        self._told()

    def _told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        return told

    def front(self, **front: Any) -> dict[str, Any]:
        """Start a front; returns its pid, port, the pid of its watchdog and the path of its heir's socket."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(front) + "\n")
        self._process.stdin.flush()
        told = self._told()
        self._fronts.append(told)
        return told

    def end(self) -> None:
        """End all that are left, and remove what they leave."""
        for front in self._fronts:
            for name in ("watchdog", "pid"):
                while is_alive(front[name]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(front[name], signal.SIGKILL)
                    time.sleep(0.005)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Received:
    """An answer as its client has it."""

    head: bytes
    body: bytes
    """As it came, in chunks or not."""
    seconds: float
    gap_s: float
    """The longest time in which nothing came."""


def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    name: str,
    slowly: bool = False,
    then: Callable[[], object] = lambda: None,
) -> Received:
    """Send a request over a connection of its own and read until the answer is complete or the connection closed.
    `body`: may have one more header. `slowly`: read little at a time. `then`: called once the answer has begun."""
    more = body.get("header", "")
    raw = json.dumps({"model": "tiny", **{key: value for key, value in body.items() if key != "header"}}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-request-id: {name}\r\nContent-Type: application/json\r\n{more}"
    with socket.socket() as connection:
        if slowly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        begun = last = time.monotonic()
        data, gap = b"", 0.0
        while not _complete(data):
            if slowly:
                time.sleep(0.002)
            try:
                part = connection.recv(600 if slowly else 65536)
            except ConnectionResetError:
                break
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            if not part:
                break
            if not data:
                then()
            data += part
    head_bytes, _, rest = data.partition(b"\r\n\r\n")
    return Received(head_bytes, rest, last - begun, gap)


def _complete(data: bytes) -> bool:
    head, _, rest = data.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return len(rest) >= int(line.split(b":")[1])
    return rest.endswith(b"\r\n0\r\n\r\n") or rest == b"0\r\n\r\n"


if __name__ == "__main__":
    zygote()
