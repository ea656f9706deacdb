"""A replica with a small cache under clients of every bad habit at once: nobody else notices, and nothing is left."""

import asyncio
import json
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from served_application import Server
from timed_client import client, until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

# Eight rows of which each may need half of the pages: some are preempted, and soon there are too many requests.
CONFIG = {
    "engine": {
        "model": "demo",
        "tensor_parallel": 1,
        "max_rows": 8,
        "token_budget": 96,
        "cache_pages": 16,
        "queue_limit": 8,
    },
    "port": 0,
    "ingress": "direct",
    "drain": {"deregister_s": 0.5, "timeout_s": 60},
    "dashboard": False,
}
SECONDS = 3.0
CLIENTS = 16
ALWAYS_THE_SAME = (
    {"prompt": "def read_lines(path):", "max_tokens": 24, "temperature": 0},
    {"prompt": "import os\n", "max_tokens": 24, "temperature": 0.7, "seed": 5, "n": 2},
)


@pytest.fixture(scope="module")
def server(launch) -> Server:
    return launch(CONFIG).wait()


class Visitor:
    """One connection, used as its owner pleases."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def come(cls, server: Server, receive_buffer: int | None = None) -> "Visitor":
        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        port = int(server.url.rsplit(":", 1)[1])
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=connection, limit=2**16))

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    def leave(self, rudely: bool) -> None:
        if rudely:  # a reset instead of an end
            connection = self._writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort() if rudely else self._writer.close()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body; IncompleteReadError where it is cut short."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        status, body = int(head.split()[1]), b""
        if length := re.search(rb"content-length: (\d+)", head):
            return status, await self.reader.readexactly(int(length[1]))
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return status, body


def post(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def check_stream(body: bytes, choices: int, prompt: int) -> None:
    """It ended, every choice once, with the right counts."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), body[-300:]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    usage = parsed[-1]["usage"]
    said = [choice for event in parsed for choice in event["choices"]]
    assert Counter(choice["index"] for choice in said if choice["finish_reason"]) == Counter(range(choices))
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in said)
    assert usage["prompt_tokens"] == prompt


class Habits:
    """What the clients do; `seen` counts what came of it."""

    def __init__(self, server: Server) -> None:
        self._server, self._draw, self.seen = server, Random(1), Counter[str]()

    def _ask(self, most: int, **more: object) -> tuple[bytes, int, int]:
        """A streamed request, drawn but for `more`; its choices and the tokens of its prompt."""
        draw = self._draw
        # Of three beginnings, so that pages are shared, evicted and computed again.
        start, length, n = draw.randrange(3), draw.choice([1, 63, 64, 65, 300]), draw.choice([1, 1, 3])
        body = {
            "model": "demo",
            "prompt": [10 + (start * 977 + position * 31) % 4000 for position in range(length)],
            "max_tokens": draw.randrange(1, most),
            "n": n,
            "temperature": draw.choice([0, 1e-6, 0.7, 2]),
            "stop": draw.choice([[], ["\n\n", "self"]]),
            "ignore_eos": draw.random() < 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **more,
        }
        return post(json.dumps(body).encode()), body["n"], len(body["prompt"])

    async def _read(self, visitor: Visitor, choices: int, prompt: int) -> None:
        status, body = await visitor.answer()
        self.seen[str(status)] += 1
        assert status in (200, 429), body
        if status == 200:
            check_stream(body, choices, prompt)

    async def needs_more_pages_than_there_are(self) -> None:
        while not self.seen["much"]:
            visitor = await Visitor.come(self._server)
            request, choices, prompt = self._ask(2, n=8, prompt=[7], max_tokens=200, ignore_eos=True, stop=[])
            visitor.say(request)
            status, body = await visitor.answer()
            if status == 200:
                check_stream(body, choices, prompt)
                self.seen["much"] += 1
            visitor.leave(False)

    async def reads_to_the_end(self) -> None:
        visitor = await Visitor.come(self._server)
        asks = [self._ask(160) for _ in range(self._draw.choice([1, 3]))]
        visitor.say(b"".join(request for request, *_ in asks))  # one behind the other on one connection
        for _, choices, prompt in asks:
            await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def leaves(self) -> None:
        visitor = await Visitor.come(self._server)
        visitor.say(self._ask(400)[0])
        await asyncio.sleep(self._draw.choice([0.0, 0.01, 0.3, 1.0]))
        visitor.leave(self._draw.random() < 0.5)

    async def leaves_in_the_middle_of_its_body(self) -> None:
        visitor = await Visitor.come(self._server)
        request = self._ask(100)[0]
        visitor.say(request[: self._draw.randrange(1, len(request))])
        await asyncio.sleep(self._draw.random())
        visitor.leave(self._draw.random() < 0.5)

    async def stops_reading_for_a_while(self) -> None:
        visitor = await Visitor.come(self._server, receive_buffer=2048)
        request, choices, prompt = self._ask(160)
        visitor.say(request)
        await asyncio.sleep(self._draw.random())
        await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def talks_nonsense(self) -> None:
        visitor = await Visitor.come(self._server)
        visitor.say(post(self._draw.choice([b"{", b"\xff", b'{"model": "demo", "prompt": [-1]}', b"[" * 10_000])))
        status, body = await visitor.answer()
        assert status in (400, 429)
        assert json.loads(body)["error"]["message"]
        visitor.leave(True)


async def figures(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    text = (await http.get(f"{url}/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^latentserve_(\w+) (\S+)$", text, re.M)}


async def test_nobody_notices_and_nothing_is_left(server: Server) -> None:
    habits = Habits(server)
    ways: list[Callable[[], Awaitable[None]]] = [habits.reads_to_the_end] * 4 + [habits.leaves] * 4
    ways += [habits.leaves_in_the_middle_of_its_body, habits.stops_reading_for_a_while, habits.talks_nonsense]
    front = psutil.Process(server.pids("ray::ServeReplica:latentserve:engine")[0])
    held = [front, *front.children()]  # its guardian

    async def ask(http: httpx.AsyncClient, body: dict) -> list[str]:
        request = {"model": "demo", "priority": -1, **body}
        while (answer := await http.post(f"{server.url}/v1/completions", json=request)).status_code == 429:
            await asyncio.sleep(0.1)
        return [choice["text"] for choice in answer.json()["choices"]]

    async with client() as http:
        said = [await ask(http, body) for body in ALWAYS_THE_SAME]
        await asyncio.sleep(0.2)
        open_before = [process.num_fds() for process in held]
        begun = time.monotonic()

        async def come_and_go(number: int) -> None:
            turn = number
            while time.monotonic() - begun < SECONDS:
                await ways[turn % len(ways)]()
                turn += 1

        async def ask_on() -> None:
            while time.monotonic() - begun < SECONDS:
                assert [await ask(http, body) for body in ALWAYS_THE_SAME] == said

        async with asyncio.TaskGroup() as group:
            group.create_task(habits.needs_more_pages_than_there_are())
            for number in range(CLIENTS):
                group.create_task(come_and_go(number))
            group.create_task(ask_on())

        async def idle() -> dict[str, float]:
            now = await figures(http, server.url)
            busy = [now[name] for name in ("requests_in_flight", "engine_running", "engine_waiting")]
            return now if not any(busy) and now["engine_pages_free"] == now["engine_pages_total"] else {}

        now = await until(idle, 5.0)
        assert now["engine_preemptions_total"] > 0
        assert now["engine_cached_tokens_total"] > 0
        assert habits.seen["200"] > 10
        assert habits.seen["429"] > 0
        assert [await ask(http, body) for body in ALWAYS_THE_SAME] == said

        async def closed() -> bool:
            return [process.num_fds() for process in held] == open_before

        await until(closed, 5.0)
    logs = Path(server.find(r"logs in (\S+)"))
    for file in logs.glob("worker-*.err"):
        assert not re.search(r"Traceback|never retrieved|never awaited", file.read_text()), file
