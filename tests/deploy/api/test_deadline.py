"""Requests whose clients gave them a time, and connections that are to become WebSockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, PushEngine, out, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.http.middleware import HEADER, limit_of, refuse_websocket
from deploy.config.api import ApiConfig

BASE: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 100}
FOX = tiny().encode(" fox", add_special_tokens=False)[-1]


@pytest.fixture(scope="module")
def engine() -> PushEngine:
    return PushEngine(say([FOX] * 3))


@pytest.fixture(scope="module")
def http(engine: PushEngine) -> Iterator[httpx.Client]:
    with (
        serving(create_app(engine, tiny())) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client


def limited(seconds: str) -> dict[str, str]:
    return {HEADER.decode(): seconds}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_gets_an_envelope(http: httpx.Client, engine: PushEngine, stream: bool) -> None:
    engine.script = lambda request: [30.0]
    engine.cancelled.clear()
    answer = http.post("/v1/completions", json={**BASE, "stream": stream}, headers=limited("1"))
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "request_timeout"
    assert "the 1 s that" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    assert len(engine.cancelled) == 1


def test_a_stream_that_takes_too_long_ends_with_an_error(http: httpx.Client, engine: PushEngine) -> None:
    engine.script = lambda request: [out(FOX), 30.0]
    answer = http.post("/v1/completions", json={**BASE, "stream": True}, headers=limited("2"))
    assert answer.status_code == 200
    *_, error, rest = answer.text.split("\n\n")
    assert (json.loads(error.removeprefix("data: "))["error"]["code"], rest) == ("request_timeout", "")


@pytest.mark.parametrize("seconds", ["60", "0", "-1", "nan", "inf", "1e400", "soon", ""])
def test_a_request_in_time_is_answered(http: httpx.Client, engine: PushEngine, seconds: str) -> None:
    engine.script = say([FOX] * 3)
    assert http.post("/v1/completions", json=BASE, headers=limited(seconds)).status_code == 200
    assert http.get("/v1/models", headers=limited(seconds)).status_code == 200


@pytest.mark.parametrize("value", [b"\xb2", b"1_0_0_", b"\xff", b"0x10", b"--1"])
def test_nonsense_is_no_limit(value: bytes) -> None:
    assert limit_of({"headers": [(HEADER, value)]}) is None


async def test_an_error_of_the_application_stays_one() -> None:
    """A TimeoutError that is not the deadline's."""
    engine = FakeEngine(lambda request: [TimeoutError("not yours")])
    transport = httpx.ASGITransport(create_app(engine, tiny()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post("/v1/completions", json=BASE, headers=limited("60"))
    assert answer.status_code == 500


def test_a_body_that_does_not_come_gets_an_envelope() -> None:
    app = create_app(FakeEngine(say([FOX])), tiny(), ApiConfig(body_timeout_s=0.2))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    with serving(app) as port, socket.create_connection(("127.0.0.1", port), 10) as client:
        client.settimeout(60)
        client.sendall(head.encode())
        answer = b""
        while part := client.recv(65536):  # until the server closes
            answer += part
    assert answer.split()[1] == b"408"
    assert b"request_timeout" in answer
    assert b"within 0.2 s" in answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/realtime", "/"])
def test_a_websocket_is_refused_in_the_envelope(http: httpx.Client, path: str) -> None:
    """Whether the server has a library for them, and asks the application, or not."""
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: x",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    with socket.create_connection((http.base_url.host, http.base_url.port), 10) as client:
        client.settimeout(60)
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = b""
        while b'"code"' not in answer:
            part = client.recv(65536)
            assert part, answer
            answer += part
    assert answer.split()[1][:1] == b"4"
    assert b"x-request-id" in answer.lower()
    assert b'{"error":{"message":' in answer


def test_a_websocket_is_refused_with_what_the_server_can_send() -> None:
    async def refused(extensions: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await refuse_websocket({"type": "websocket", "headers": [], "extensions": extensions}, None, send)
        return sent

    [closed] = asyncio.run(refused({}))
    assert closed["type"] == "websocket.close"
    start, body = asyncio.run(refused({"websocket.http.response": {}}))
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 400)
    assert json.loads(body["body"])["error"]["code"] == "websocket_unsupported"
