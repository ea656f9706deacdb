"""The router without Ray: what it takes from requests and reports, what it gives to Serve and to HAProxy."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from deploy.config.cache_salts import SHARED, CacheSalts
from deploy.config.keys import ApiKey
from deploy.routing import router
from deploy.routing.arrivals import ROUTING_HEADER, RoutingRecord, load_to_report
from deploy.routing.policy import FORGET_S, REMEMBER_S, Load, RequestFeatures
from deploy.routing.request_features import FeatureReader
from deploy.routing.router import IngressRouter, LoadRouter
from deploy.text.handed import EncodedPrompt
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL
from workers.protocol.request import NO_ROOT, Prompt


@pytest.fixture
def policy() -> LoadRouter:
    made = object.__new__(LoadRouter)
    made.initialize_state(row_tokens=32.0)
    return made


def replica(name: str, load: Load | None = None) -> SimpleNamespace:
    return SimpleNamespace(replica_id=name, routing_stats=load_to_report(load) if load else {})


def pending(*arguments: Any, **keywords: Any) -> SimpleNamespace:
    return SimpleNamespace(args=arguments, kwargs=keywords)


async def chosen(policy: LoadRouter, replicas: list[SimpleNamespace], request: Any) -> list[str]:
    """Return the chosen replicas in order; each must be a rank of its own, or Serve would choose within it by its own
    count."""
    ranks = await policy.choose_replicas(replicas, request)
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id for rank in ranks]


async def test_what_was_sent_counts_before_any_report_and_its_routing_record_says_so(policy: LoadRouter) -> None:
    replicas, receipts = [replica("a"), replica("b")], [{}, {}]
    features = RequestFeatures(1000, rows=2)
    first, second = [(await chosen(policy, replicas, pending(features=features, receipt=r)))[0] for r in receipts]
    assert {first, second} == {"a", "b"}
    routing_records = [RoutingRecord.parse(receipt["routing_record"]) for receipt in receipts]
    assert routing_records == [RoutingRecord(policy.accounting.router, number, 1000, 2) for number in (1, 2)]


async def test_a_question_without_a_request_sends_nothing(policy: LoadRouter) -> None:
    assert sorted(await chosen(policy, [replica("a"), replica("b")], None)) == ["a", "b"]
    assert policy.accounting.sent == 0
    assert await chosen(policy, [], pending(features=RequestFeatures(5), receipt={})) == []


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
async def test_a_clock_that_jumps_changes_no_choice(
    policy: LoadRouter, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """Requests that were sent count for a few seconds, not for a day, and no report is taken for one of another
    time."""
    wall, own = [1.8e9], [1000.0]
    monkeypatch.setattr(router, "time", SimpleNamespace(time=lambda: wall[0], monotonic=lambda: own[0]))
    a, b = replica("a", Load(at=wall[0])), replica("b", Load(rows=1, at=wall[0]))
    features = RequestFeatures(1000, Prompt.of(range(192)))
    assert await chosen(policy, [a, b], pending(features=features, receipt={})) == ["a", "b"]
    assert await chosen(policy, [a, b], None) == ["b", "a"]  # what was sent to a still counts
    wall[0] += jump
    own[0] += FORGET_S + 0.1
    a.routing_stats, b.routing_stats = load_to_report(Load(at=wall[0])), load_to_report(Load(rows=1, at=wall[0]))
    assert await chosen(policy, [a, b], None) == ["a", "b"]
    own[0] += REMEMBER_S + 0.1
    a.routing_stats = load_to_report(Load(rows=4, at=wall[0] + 1))
    assert await chosen(policy, [a, b], pending(features=features)) == ["b", "a"]  # the prefix is forgotten, too


async def test_reports_are_read_once_and_forgotten_with_their_replica(
    policy: LoadRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(router, "load_from_report", lambda report: read.append(report) or Load(rows=report["rows"]))
    busy, idle = replica("busy", Load(rows=9)), replica("idle", Load(rows=1))
    for _ in range(3):
        assert await chosen(policy, [busy, idle], None) == ["idle", "busy"]
    assert len(read) == 2
    idle.routing_stats = load_to_report(Load(rows=20))
    assert await chosen(policy, [busy, idle], None) == ["busy", "idle"]
    assert len(read) == 3
    await chosen(policy, [busy], None)
    await chosen(policy, [busy, idle], None)
    assert len(read) == 4


@pytest.mark.parametrize(
    ("headers", "tokens"),
    [
        ([(b"host", b"x"), (b"Content-Length", b"4000")], 1000),
        ([(b"content-length", b"many")], 0),
        ([(b"content-length", b"\xb2")], 0),
        ([(b"content-length", b"9" * 5000)], 0),
        ([], 0),
        (None, 0),
    ],
)
async def test_behind_serves_proxy_the_length_of_the_body_is_all_there_is(
    policy: LoadRouter, headers: list[tuple[bytes, bytes]] | None, tokens: int
) -> None:
    argument = SimpleNamespace(asgi_scope=None if headers is None else {"headers": headers})
    receipt: dict[str, str] = {}
    await chosen(policy, [replica("a")], pending(argument, receipt=receipt))
    routing_record = RoutingRecord.parse(receipt["routing_record"])
    assert routing_record is not None
    assert (routing_record.tokens, routing_record.rows) == (tokens, 1)


class Engine:
    """A handle of the engine deployment that answers with `replica`, an error, or never."""

    def __init__(self, replica: str | Exception | None) -> None:
        self.replica, self.asks, self.handed = replica, [], []

    async def remote(self, ticket: str, digest: bytes, packed: bytes, to: Any) -> None:
        """As `take_prompt` of the replica."""
        self.handed.append((ticket, digest, packed, to.to_full_id_str()))

    @asynccontextmanager
    async def choose_replica(self, features: RequestFeatures, receipt: dict[str, str], _reserve: bool):
        assert not _reserve
        self.asks.append(features)
        if self.replica is None:
            await asyncio.sleep(3600)
        if isinstance(self.replica, Exception):
            raise self.replica
        receipt["routing_record"] = "r/1/2/3"
        name = SimpleNamespace(to_full_id_str=lambda: self.replica)
        yield SimpleNamespace(_replica=SimpleNamespace(replica_id=name))


async def answer(
    engine: Engine,
    body: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    path: str = "/internal/route",
    tokenizer: Tokenizer | None = None,
    salts: CacheSalts = SHARED,
) -> tuple[int, Any]:
    ingress_router = object.__new__(IngressRouter)
    ingress_router._reader, ingress_router._engine = FeatureReader(tokenizer, salts=salts), engine
    ingress_router._salts, ingress_router._key_header = salts, b"x-session-id"
    ingress_router._prompts, ingress_router._handing = engine, True
    parts = [body[:10], body[10:]]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": list(headers)}
    await ingress_router.__serve_build_asgi_app__()(scope, receive, send)
    start, end = sent
    assert dict(start["headers"])[b"content-length"] == str(len(end["body"])).encode()
    return start["status"], json.loads(end["body"])


async def test_haproxy_is_told_the_replica_and_the_routing_record() -> None:
    engine = Engine("the one")
    status, told = await answer(engine, json.dumps({"prompt": [1] * 130, "n": 2}).encode())
    assert (status, told) == (200, {"replica_id": "the one", "request_headers": {ROUTING_HEADER: "r/1/2/3"}})
    [features] = engine.asks
    assert (features.tokens, features.rows, len(features.keys(NO_ROOT))) == (130, 2, 2)


@pytest.mark.parametrize(
    ("header", "factor"),
    [
        (b"%d/%d", 10),
        (b"nonsense/x%d%d", 1),
        (b"", 1),
        (b"%d/" + b"9" * 30 + b"%d", 1),
        (b"%d/" + b"9" * 5000 + b"%d", 1),
    ],
)
async def test_a_body_that_haproxy_cut_counts_whole(header: bytes, factor: int) -> None:
    engine, body = Engine("a"), b'{"prompt": "' + b"x" * 1000
    said = header % (len(body), factor * len(body)) if header else header
    await answer(engine, body, ((b"x-body-truncated", said),))
    assert engine.asks[0].tokens == factor * len(body) // 4


@pytest.mark.parametrize("engine", [Engine(None), Engine(DeploymentUnavailableError(SimpleNamespace()))])
async def test_without_a_replica_haproxy_is_told_soon(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "PICK_TIMEOUT_S", 0.01)
    assert await answer(engine, b'{"prompt": [1]}') == (503, {})


WORDS = "def read_lines(path): return open(path).readlines() " * 200


async def test_a_long_prompt_is_at_its_replica_before_haproxy_has_its_answer() -> None:
    tokenizer, engine = Tokenizer.load(DEMO_MODEL), Engine("the one")
    assert tokenizer is not None
    body = json.dumps({"prompt": WORDS}).encode()
    assert (await answer(engine, body, tokenizer=tokenizer))[0] == 200
    prompt = EncodedPrompt.of(WORDS, True, tokenizer.encode(WORDS))
    assert engine.handed == [("r/1", prompt.digest, prompt.packed, "the one")]


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": WORDS[:1000]},
        {"prompt": [WORDS, WORDS]},
        {"prompt": [7] * 5000},
    ],
)
async def test_what_is_not_worth_it_is_not_handed_over(asked: dict[str, Any]) -> None:
    engine = Engine("the one")
    assert (await answer(engine, json.dumps(asked).encode(), tokenizer=Tokenizer.load(DEMO_MODEL)))[0] == 200
    assert not engine.handed


async def test_a_cut_prompt_is_not_handed_over() -> None:
    engine, body = Engine("the one"), b'{"prompt": "' + WORDS.encode()
    header = (b"x-body-truncated", b"%d/%d" % (len(body), 2 * len(body)))
    assert (await answer(engine, body, (header,), tokenizer=Tokenizer.load(DEMO_MODEL)))[0] == 200
    assert not engine.handed


@pytest.mark.parametrize("never", [True, False])
async def test_a_replica_that_takes_no_prompts_is_named_all_the_same(
    never: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Deaf(Engine):
        async def remote(self, *given: Any, to: Any) -> None:
            if never:
                await asyncio.sleep(3600)
            raise AttributeError("take_prompt")

    monkeypatch.setattr(router, "HAND_OVER_TIMEOUT_S", 0.01)
    body = json.dumps({"prompt": WORDS}).encode()
    status, told = await answer(Deaf("the one"), body, tokenizer=Tokenizer.load(DEMO_MODEL))
    assert (status, told["replica_id"]) == (200, "the one")
    assert "was not handed" in caplog.text


async def test_what_belongs_to_a_request_goes_where_that_went(policy: LoadRouter) -> None:
    replicas = [replica("a"), replica("b"), replica("c")]
    for name in "abc":
        assert await chosen(policy, replicas, pending("r/1", b"", b"", to=name)) == [name]
    assert sorted(await chosen(policy, replicas, pending("r/1", b"", b"", to="gone"))) == ["a", "b", "c"]
    assert policy.accounting.sent == 0


async def test_any_other_question_is_unknown() -> None:
    assert await answer(Engine("a"), b"{}", path="/internal/other") == (404, {})


async def test_whose_cached_pages_count_is_told_by_digests_of_api_keys() -> None:
    salts = CacheSalts([ApiKey(key=f"sk-{name}", name=name) for name in ("one", "two")], isolated=True)
    body = json.dumps({"prompt": [1] * 130}).encode()
    engine, digests = Engine("x"), [sha256(key).hexdigest().upper() for key in (b"sk-one", b"sk-two", b"unknown")]
    for digest in (*digests, f" {digests[0]}"):
        assert (await answer(engine, body, ((b"x-session-id", digest.encode()),), salts=salts))[0] == 200
    assert (await answer(engine, body, salts=salts))[0] == 200
    names = ["one", "two", "", "one", ""]
    assert [features.salt for features in engine.asks] == [salts.salt(name, None) for name in names]
