"""Clients of every bad habit, on raw sockets, for `bench/soak.py` and the tests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import Counter
from random import Random
from typing import Any

BUSY = (429, 503)
"""Statuses that a server with too much to do may answer; 503 only with a code that asks for another try, never
`no_replica`."""


class Visitor:
    """Connection that its owner uses as it pleases."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def come(cls, url: str, receive_buffer: int | None = None) -> Visitor:
        """Connect to http://127.0.0.1:PORT. `receive_buffer`: bytes the kernel takes in before it stops the sender."""
        connection = socket.socket()
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        port = int(url.rsplit(":", 1)[1])
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=connection, limit=2**16))

    def say(self, data: bytes) -> None:
        """Send."""
        self._writer.write(data)

    async def sent(self) -> None:
        """Wait until most of what was said has left."""
        await self._writer.drain()

    def leave(self, rudely: bool) -> None:
        """Close; `rudely`: with a reset in place of an end."""
        if rudely:
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


def post(body: bytes, path: str = "/v1/completions", kind: str = "application/json") -> bytes:
    """A request on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def check_stream(body: bytes, choices: int, prompt: int) -> None:
    """A streamed answer ended, every choice once, with the right counts; AssertionError."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), body[-300:]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events]
    usage = parsed[-1]["usage"]
    said = [choice for event in parsed for choice in event["choices"]]
    assert Counter(choice["index"] for choice in said if choice["finish_reason"]) == Counter(range(choices))
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in said)
    assert usage["prompt_tokens"] == prompt


class Habits:
    """Habits of the clients; `seen` counts the answers by status."""

    def __init__(self, url: str, model: str = "demo", seed: int = 1) -> None:
        self._url, self._model, self.draw, self.seen = url, model, Random(seed), Counter[str]()

    def _ask(self, most: int, **more: object) -> tuple[bytes, int, int]:
        """A streamed request, drawn but for `more`; its choices and the tokens of its prompt."""
        draw = self.draw
        # Of three beginnings, so that pages are shared, evicted and computed again.
        start, length, n = draw.randrange(3), draw.choice([1, 63, 64, 65, 300]), draw.choice([1, 1, 3])
        body: dict[str, Any] = {
            "model": self._model,
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
        assert status in (200, 429), (status, body)
        if status == 200:
            check_stream(body, choices, prompt)

    async def _refused(self, request: bytes, *expected: int) -> None:
        """Say something that must be refused, with an envelope that says why."""
        visitor = await Visitor.come(self._url)
        visitor.say(request)
        status, body = await visitor.answer()
        self.seen[str(status)] += 1
        assert status in expected or status in BUSY, (status, body[:300])
        error = json.loads(body)["error"]
        assert error["message"]
        assert error["code"] != "no_replica"
        visitor.leave(True)

    async def needs_more_pages_than_there_are(self) -> None:
        """Eight long choices; again and again until they were served."""
        while not self.seen["much"]:
            visitor = await Visitor.come(self._url)
            request, choices, prompt = self._ask(2, n=8, prompt=[7], max_tokens=200, ignore_eos=True, stop=[])
            visitor.say(request)
            status, body = await visitor.answer()
            if status == 200:
                check_stream(body, choices, prompt)
                self.seen["much"] += 1
            visitor.leave(False)

    async def reads_to_the_end(self) -> None:
        """Read to the end, as a client should; up to three requests one behind the other on one connection."""
        visitor = await Visitor.come(self._url)
        asks = [self._ask(160) for _ in range(self.draw.choice([1, 3]))]
        visitor.say(b"".join(request for request, *_ in asks))
        for _, choices, prompt in asks:
            await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def leaves(self) -> None:
        """Asks, and goes at some moment."""
        visitor = await Visitor.come(self._url)
        visitor.say(self._ask(400)[0])
        await asyncio.sleep(self.draw.choice([0.0, 0.01, 0.3, 1.0]))
        visitor.leave(self.draw.random() < 0.5)

    async def leaves_in_the_middle_of_its_body(self) -> None:
        """Sends a part of a request."""
        visitor = await Visitor.come(self._url)
        request = self._ask(100)[0]
        visitor.say(request[: self.draw.randrange(1, len(request))])
        await asyncio.sleep(self.draw.random())
        visitor.leave(self.draw.random() < 0.5)

    async def stops_reading_for_a_while(self) -> None:
        """Stop reading for a while, with a small receive buffer, so that the answer piles up on the other side."""
        visitor = await Visitor.come(self._url, receive_buffer=2048)
        request, choices, prompt = self._ask(160)
        visitor.say(request)
        await asyncio.sleep(self.draw.random())
        await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def talks_nonsense(self) -> None:
        """Bodies that are no request."""
        await self._refused(
            post(self.draw.choice([b"{", b"\xff", b'{"model": "demo", "prompt": [-1]}', b"[" * 10_000])), 400
        )

    async def mixes_samplers(self) -> None:
        """Every feature of sampling in one batch with everybody else's."""
        draw = self.draw
        sampler: dict[str, object] = draw.choice(
            [
                {"temperature": 0.8, "seed": draw.randrange(99)},
                {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
                {"presence_penalty": 1.0, "repetition_penalty": 1.2},
                {"min_p": 0.1, "logit_bias": {str(draw.randrange(4000)): 5.0}},
                {"logprobs": 5, "min_tokens": 3},
            ]
        )
        visitor = await Visitor.come(self._url)
        request, choices, prompt = self._ask(60, max_tokens=draw.randrange(3, 60), **sampler)
        visitor.say(request)
        await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def asks_for_much(self, prompt: int, choices: int) -> None:
        """Ask for `choices` choices of four tokens, of one prompt of `prompt` tokens."""
        start = self.draw.randrange(4000)
        tokens = [10 + (start + position * 37) % 4000 for position in range(prompt)]
        visitor = await Visitor.come(self._url)
        request, choices, prompt = self._ask(2, prompt=tokens, n=choices, max_tokens=4, ignore_eos=True, stop=[])
        visitor.say(request)
        if self.draw.random() < 0.3:  # and some do not wait for it
            await asyncio.sleep(self.draw.random() * 3)
        else:
            await self._read(visitor, choices, prompt)
        visitor.leave(False)

    async def sends_bodies_of_many_parts(self) -> None:
        """A few megabytes of keys, stop strings or biases."""
        chat: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": "hello"}]}
        many = self.draw.choice(
            [
                {**chat, "chat_template_kwargs": {f"key{i}": i for i in range(300_000)}},
                {**chat, "stop": ["x"] * 1_000_000},
                {**chat, "logit_bias": {str(i): 1 for i in range(300_000)}},
            ]
        )
        body = await asyncio.to_thread(lambda: json.dumps(many).encode())
        await self._refused(post(body, "/v1/chat/completions"), 400, 413)

    async def tokenizes_a_book(self) -> None:
        """Four megabytes of text to `/tokenize`."""
        text = "for line in open(path): print(line) " * 110_000
        visitor = await Visitor.come(self._url)
        visitor.say(post(json.dumps({"model": self._model, "prompt": text}).encode(), "/tokenize"))
        status, body = await visitor.answer()
        self.seen[str(status)] += 1
        assert status in (200, 400, *BUSY), (status, body[:300])
        visitor.leave(False)

    async def comes_from_a_form(self) -> None:
        """JSON that says it is text, as a web page may send without being asked."""
        await self._refused(post(b'{"model": "demo", "prompt": "x"}', kind="text/plain"), 415)

    async def asks_for_what_there_is_not(self) -> None:
        """A field that would change the answer and is not supported."""
        await self._refused(post(b'{"model": "demo", "prompt": "x", "no_repeat_ngram_size": 3}'), 400)

    async def dribbles_its_head(self) -> None:
        """A byte at a time, then silence."""
        visitor = await Visitor.come(self._url)
        for byte in b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n":
            visitor.say(bytes([byte]))
            await asyncio.sleep(0.02)
        visitor.leave(self.draw.random() < 0.5)
