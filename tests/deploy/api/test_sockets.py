"""Raw sockets: the shape of the stream on the wire, malformed HTTP, clients that leave, read slowly or send junk."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from fake_engine import FakeEngine, PushEngine, out, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig

FOX = tiny().encode(" fox", add_special_tokens=False)[-1]
LIMIT = 256 * 1024
JSON = "Content-Type: application/json"


def post(path: str, body: dict[str, object] | bytes, *headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", JSON, *headers, "", ""]
    return "\r\n".join(lines).encode() + raw


def completion(stream: bool = True, **more: object) -> bytes:
    return post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": stream, **more})


@pytest.fixture(scope="module")
def engine() -> PushEngine:
    return PushEngine(say([FOX] * 5))


@pytest.fixture(scope="module")
def port(engine: PushEngine) -> Iterator[int]:
    config = ApiConfig(max_body_bytes=LIMIT)
    with serving(create_app(engine, tiny(), config), send_buffer=16 * 1024) as port:
        yield port


@pytest.fixture
def connect(port: int, engine: PushEngine) -> Iterator[Callable[[], socket.socket]]:
    engine.script = say([FOX] * 5)
    engine.requests.clear()
    engine.cancelled.clear()
    opened = []

    def connect() -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def read_until(client: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        part = client.recv(65536)
        assert part, got
        got += part
    return got


def read_all(client: socket.socket) -> bytes:
    got = b""
    with_reset = True
    while with_reset:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            return got
        if not part:
            return got
        got += part
    return got


def chunks_of(raw: bytes) -> list[bytes]:
    """The chunks of a chunked HTTP body."""
    body = raw.split(b"\r\n\r\n", 1)[1]
    chunks = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return chunks


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_one_chunk_an_event(connect: Callable[[], socket.socket], engine: PushEngine) -> None:
    engine.script = say([FOX] * 5, pause=0.005)
    client = connect()
    client.sendall(completion())
    raw = read_until(client, b"0\r\n\r\n")
    head = raw.split(b"\r\n\r\n")[0].lower()
    assert b"200 ok" in head
    assert b"content-type: text/event-stream; charset=utf-8" in head
    assert b"cache-control: no-cache" in head
    assert b"x-request-id: " in head
    chunks = chunks_of(raw)
    assert chunks[-1] == b""
    assert chunks[-2] == b"data: [DONE]\n\n"
    events = chunks[:-2]
    assert len(events) == 6
    for event in events:
        assert event.startswith(b"data: {")
        assert event.endswith(b"}\n\n")
        assert event.count(b"\n\n") == 1
    first = json.loads(events[0][6:])
    assert first["choices"] == [{"index": 0, "text": " fox", "logprobs": None, "finish_reason": None}]
    assert set(first) == {"id", "object", "created", "model", "system_fingerprint", "choices"}


def test_a_fault_ends_the_stream_without_done(connect: Callable[[], socket.socket], engine: PushEngine) -> None:
    from workers.protocol.front import EngineFault

    engine.script = lambda request: [out(FOX), 0.02, EngineFault("rank 1 is silent")]
    client = connect()
    client.sendall(completion())
    chunks = chunks_of(read_until(client, b"0\r\n\r\n"))
    error = json.loads(chunks[-2].removeprefix(b"data: "))["error"]
    assert error["message"] == "the engine is down: rank 1 is silent"
    assert error["code"] == "engine_down"
    assert not any(b"[DONE]" in chunk for chunk in chunks)
    # The connection is as good as before.
    engine.script = say([FOX])
    client.sendall(completion())
    assert b"[DONE]" in read_until(client, b"0\r\n\r\n")


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["before the first token", "between tokens"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_client_that_leaves_cancels_though_no_token_comes(
    connect: Callable[[], socket.socket], engine: PushEngine, how: str, stream: bool, moment: str, n: int
) -> None:
    if moment == "before the first token":
        engine.script = lambda request: [3600.0]
    else:
        engine.script = lambda request: [out(FOX), out(FOX), 3600.0]
    client = connect()
    client.sendall(completion(stream, n=n))
    assert wait_for(lambda: len(engine.requests) == n, 60)
    if moment == "between tokens" and stream:
        read_until(client, b"fox")
    time.sleep(0.02)
    assert engine.cancelled == []
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert wait_for(lambda: len(engine.cancelled) == n, 60)
    assert {name for name, _ in engine.cancelled} == {request.request_id for request in engine.requests}


@pytest.mark.alone
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_within_100_ms(
    connect: Callable[[], socket.socket], engine: PushEngine, stream: bool
) -> None:
    engine.script = lambda request: [3600.0]
    took = []
    for number in range(1, 8):
        client = connect()
        client.sendall(completion(stream))
        assert wait_for(lambda number=number: len(engine.requests) == number, 60)
        left = time.monotonic()
        client.close()
        assert wait_for(lambda number=number: len(engine.cancelled) == number, 60)
        took.append(engine.cancelled[-1][1] - left)
    assert sorted(took)[3] < 0.1  # half of them: the machine may stand still for a moment


def test_a_client_that_leaves_while_its_body_is_read(connect: Callable[[], socket.socket], port: int) -> None:
    client = connect()
    client.sendall(completion()[:-10])
    time.sleep(0.02)
    client.close()
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


@pytest.mark.alone
def test_a_slow_reader_gets_coalesced_events_and_holds_nobody_up(
    connect: Callable[[], socket.socket], engine: PushEngine, port: int
) -> None:
    total = 200_000
    done = []

    def flood(request):
        for begin in range(0, total, 100):
            for _ in range(100):
                yield out(FOX)
            yield 0.0002 if begin % 2000 else 0.002
        done.append(time.monotonic())
        yield out(1, finish="stop")

    engine.script = flood
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.settimeout(60)
    client.sendall(completion())
    assert wait_for(lambda: engine.requests, 60)
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200  # though nothing is read yet
    assert wait_for(lambda: done, 60)  # the engine was not held up either
    chunks = chunks_of(read_until(client, b"0\r\n\r\n"))
    client.close()
    texts = [json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks[:-2]]
    assert "".join(texts) == " fox" * total
    assert len(texts) < total / 2
    assert max(map(len, texts)) > 1000 * len(" fox")  # what waited came in one event


@pytest.mark.parametrize(
    "junk",
    [
        b"nonsense\r\n\r\n",
        b"GET /nowhere\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"\x00" * 100,
    ],
    ids=lambda junk: repr(junk[-30:]),
)
def test_malformed_http(connect: Callable[[], socket.socket], port: int, junk: bytes) -> None:
    client = connect()
    client.sendall(junk)
    client.shutdown(socket.SHUT_WR)
    answer = read_all(client)
    assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


def test_junk_behind_a_request_ends_that_connection_only(
    connect: Callable[[], socket.socket], engine: PushEngine, port: int
) -> None:
    engine.script = lambda request: [out(FOX), 30.0]
    client = connect()
    client.sendall(completion() + b"\x00\x01\x02 junk\r\n\r\n")
    assert wait_for(lambda: engine.requests == [] or engine.cancelled, 60)
    read_all(client)
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


def test_pipelined_requests_are_answered_in_order(connect: Callable[[], socket.socket], engine: PushEngine) -> None:
    client = connect()
    client.sendall(completion(False) + completion(False, model="other") + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    got = b""
    while got.count(b"HTTP/1.1 ") < 3 or b'"object":"list"' not in got:
        part = client.recv(65536)
        assert part
        got += part
    statuses = [int(part[:3]) for part in got.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 200]


def test_a_huge_body_is_refused_before_it_is_sent(connect: Callable[[], socket.socket]) -> None:
    client = connect()
    head = post("/v1/completions", b"", "Expect: 100-continue").replace(
        b"Content-Length: 0", b"Content-Length: 99999999999"
    )
    client.sendall(head)
    answer = read_all(client)  # of the body nothing ever comes
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_an_endless_body_is_cut_off(connect: Callable[[], socket.socket], port: int, chunked: bool) -> None:
    client = connect()
    head = post("/v1/completions", b"")
    size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 99999999999"
    client.sendall(head.replace(b"Content-Length: 0", size))
    part = b"x" * 65536
    sent = 0
    try:
        while sent < 1 << 30:
            client.sendall(b"10000\r\n" + part + b"\r\n" if chunked else part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert sent < 64 << 20  # what the limit and the sockets hold, not what was announced
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


def test_request_ids(connect: Callable[[], socket.socket], engine: PushEngine) -> None:
    client = connect()
    for given, kept in (("abc-123/x", True), ("a" * 129, False), ("ä", False), ('x" onload=', False), ("", False)):
        body = {"model": "tiny", "prompt": "x", "stream": False}
        client.sendall(post("/v1/completions", body, f"x-request-id: {given}"))
        answer = read_until(client, b'"total_tokens"').decode()
        head, _, rest = answer.partition("\r\n\r\n")
        returned = next(line for line in head.split("\r\n") if line.lower().startswith("x-request-id")).split(": ")[1]
        assert (returned == given) is kept
        assert f'"id":"cmpl-{returned}"' in rest
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)


@contextmanager
def faulty(
    kind: type[FakeEngine] = FakeEngine, probe_timeout_s: float = 0.2, probe_ttl_s: float = 0.3, **settings: object
) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    engine = kind(say([FOX]))
    for name, value in settings.items():
        setattr(engine, name, value)
    config = ApiConfig(probe_timeout_s=probe_timeout_s, probe_ttl_s=probe_ttl_s)
    with (
        serving(create_app(engine, tiny(), config)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        yield engine, http


def test_health_is_a_real_token() -> None:
    from workers.protocol.front import EngineFault, RequestFailed

    with faulty(probe_timeout_s=60.0, probe_ttl_s=0.02) as (engine, http):
        for checks in (1, 2):
            assert http.get("/health").status_code == 200
            assert engine.health_checks == checks
            time.sleep(0.03)
    with faulty(probe_timeout_s=60.0, probe_ttl_s=3600.0) as (engine, http):
        assert http.get("/health").status_code == 200
        assert http.get("/health").status_code == 200
        assert engine.health_checks == 1  # a good health check holds for a while
        engine.fault = "rank 1 exited with signal 9"  # at once, whatever the last health check said
        for path in ("/health", "/v1/models"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert "rank 1 exited with signal 9" in answer.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_down"
        assert http.get("/metrics").status_code == 200
    for error in (EngineFault("rank 0: out of memory"), RequestFailed("rank 0: out of memory")):
        with faulty(health_check_error=error, probe_timeout_s=60.0) as (engine, http):
            for _ in range(2):
                answer = http.get("/health")
                assert answer.status_code == 503
                assert "rank 0: out of memory" in answer.json()["error"]["message"]
            engine.health_check_error = None
            assert http.get("/health").status_code == 200
    with faulty(health_check_delay=3600.0) as (_, http):
        answer = http.get("/health")
        assert answer.status_code == 503
        assert "0.2 s" in answer.json()["error"]["message"]


def test_a_busy_replica_is_alive_while_steps_end_also_when_they_give_no_tokens() -> None:
    from workers.protocol.front import Refused
    from workers.protocol.messages import Distribution, EngineStats

    class Busy(FakeEngine):
        """Has no room for a health check; `steps` more are reported every time somebody looks, and never a token."""

        steps = 0

        @property
        def stats(self) -> EngineStats:
            self.seen = getattr(self, "seen", 0) + self.steps
            return EngineStats(slots=64, step_seconds={"prefill": Distribution((0, self.seen, 0))})

        @stats.setter
        def stats(self, value: EngineStats) -> None: ...

    for busy in ({"health_check_error": Refused("queue full", overloaded=True)}, {"health_check_delay": 30.0}):
        for steps, status in ((3, 200), (0, 503)):
            with faulty(Busy, steps=steps, **busy) as (_, http):
                assert http.get("/health").status_code == status


async def test_health_does_not_wait_for_its_own_token_where_steps_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.protocol.messages import Distribution, EngineStats

    engine = FakeEngine(say([FOX]))
    engine.health_check_delay = 3600.0
    config = ApiConfig(probe_timeout_s=3600.0, probe_ttl_s=0.0)
    transport = httpx.ASGITransport(create_app(engine, tiny(), config))
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as http:
        asking = asyncio.create_task(http.get("/health"))
        while not engine.health_checks:
            await asyncio.sleep(0.01)
        engine.stats = EngineStats(step_seconds={"mixed": Distribution((1,))})
        assert (await asyncio.wait_for(asking, 60)).status_code == 200


async def test_many_health_checks_share_one_request() -> None:
    engine = FakeEngine(say([FOX]))
    engine.health_check_delay = 0.1
    with serving(create_app(engine, tiny(), ApiConfig())) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answers = await asyncio.gather(*(http.get("/health") for _ in range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert engine.health_checks == 1


def test_tokenize_and_back(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        text = "the fox 東京"
        answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["tokens"] == tiny().encode(text)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == 256
        assert answer["token_strs"][0] == "<|bos|>"
        bare = http.post("/tokenize", json={"model": "tiny", "prompt": text, "add_special_tokens": False}).json()
        assert bare["tokens"] == answer["tokens"][1:]
        assert bare["token_strs"] is None
        assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert tiny().decode(chat["tokens"], False) == "<|user|>hi<|assistant|>"
        assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == [0]
        long = "fox " * 20_000  # longer than the context: this endpoint is how one finds out
        assert http.post("/tokenize", json={"prompt": long}).json()["count"] > 20_000
