"""Engines that die at every phase of answers of every API: clients have what they would have had.

Model, scheduler and rank are real and run in this process, so an engine dies at exactly the step that a case names.
Cases in which each two values meet are in `make test`, and in `make test-long` those of them with tools. All others are
in `make soak`.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from mortal_engines import LOST, PHASES, STEPS, MortalEngines
from tiny_tokenizer import backend, tiny

from deploy.api.app import create_app
from deploy.api.http.draws import Draws
from deploy.config.api import ApiConfig
from tests.tiny_models import write_tiny
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.processes import failover
from workers.protocol.request import pack_tokens

TEMPLATE = "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
CONFIG = ApiConfig(chat_template=TEMPLATE, tool_parser="hermes", max_n=8)
PROMPT = "def read_lines(path): with open(path) as file: return file.readlines() " * 6
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["ab", "abc", "x"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": PROMPT}]
CALLS = {"name": "f", "description": "f", "parameters": SCHEMA}
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 12},
        {
            "plain": {"repetition_penalty": 1.3},
            "logprobs": {"logprobs": 2},
            "schema": {"guided_json": SCHEMA, "max_tokens": 60},
            "stops": {"stop": ["STOP", "e"]},
        },
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 12},
        {
            "plain": {"frequency_penalty": 0.5},
            "logprobs": {"logprobs": True, "top_logprobs": 2},
            "tools": {
                "tools": [{"type": "function", "function": CALLS}],
                "tool_choice": "required",
                "max_tokens": 60,
            },
            "schema": {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
                "max_tokens": 60,
            },
            "stops": {"stop": ["STOP", "e"]},
        },
    ),
    "messages": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 12},
        {
            "plain": {"top_k": 40},
            "tools": {
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
                "max_tokens": 60,
            },
            "stops": {"stop_sequences": ["STOP", "e"]},
        },
    ),
    "responses": (
        "/v1/responses",
        {"input": PROMPT, "max_output_tokens": 12, "store": False},
        {
            "plain": {"top_p": 0.9},
            "tools": {
                "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
                "tool_choice": "required",
                "max_output_tokens": 60,
            },
            "schema": {
                "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
                "max_output_tokens": 60,
            },
        },
    ),
}


class Case(NamedTuple):
    """What is asked, and where the engine dies."""

    api: str
    shows: str
    n: int
    stream: bool
    phase: str
    lost: str

    @property
    def possible(self) -> bool:
        """Whether there is such a case: APIs differ in what can be asked, and phases in what can be lost in them."""
        return (
            self.shows in BODIES[self.api][2]
            and (self.n == 1 or self.api in ("completions", "chat"))
            and (self.phase != "compile" or self.shows in ("tools", "schema"))
            and (self.phase != "between choices" or self.n > 1)
            and (self.phase != "last token" or self.shows != "stops")  # the front finds the stop string, and cancels
            and (self.phase in STEPS or self.lost == LOST[1])
        )

    def __str__(self) -> str:
        return "-".join(
            (self.api, self.shows, str(self.n), "stream" if self.stream else "whole", self.phase, self.lost)
        )


SHOWN = ("plain", "logprobs", "tools", "schema", "stops")
ALL = [case for case in map(Case._make, product(BODIES, SHOWN, (1, 4), (True, False), PHASES, LOST)) if case.possible]


def pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """Each two values of a case."""
    return set(combinations(case._asdict().items(), 2))


def chosen(cases: list[Case]) -> Iterator[Case]:
    """Cases in which each two values meet that meet in any."""
    left = set().union(*map(pairs, cases))
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        yield best


EACH_TWO = set(chosen(ALL))


def marks(case: Case) -> Any:
    """Those with tools take longest, because the call has many tokens."""
    if case not in EACH_TWO:
        return pytest.mark.soak
    return pytest.mark.long if case.shows == "tools" else ()


class Said(NamedTuple):
    """An answer, however it was cut into pieces."""

    status: int
    parts: dict[str, Any]


def said(stream: bool, answer: httpx.Response) -> Said:
    """Parts of an answer: what the deltas of a stream give together, by choice or item, and all that comes once."""
    if not stream:
        return Said(answer.status_code, {"whole": answer.json()})
    parts: defaultdict[str, Any] = defaultdict(list)
    for line in answer.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert not event.get("error"), event
        assert event.get("type") != "error", event
        for choice in event.get("choices", ()):
            name = f"choice {choice['index']}"
            delta = choice.get("delta", choice)
            text = delta.get("content") or delta.get("text") or ""
            parts[f"{name} text"].append(text)
            for call in delta.get("tool_calls") or ():
                parts[f"{name} call {call['index']}"].append(call["function"].get("arguments") or "")
                parts[f"{name} calls"] += [part for part in (call.get("id"), call["function"].get("name")) if part]
            for key, value in (choice.get("logprobs") or {}).items():
                parts[f"{name} logprobs {key}"] += value or []
            parts[f"{name} finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        match event.get("type"):
            case "content_block_delta":
                parts[f"block {event['index']}"] += [*event["delta"].values()][1:]
            case str(kind) if kind.endswith(".delta"):
                parts[f"{event.get('item_id')} {kind}"].append(event["delta"])
            case str(kind) if kind in ("message_start", "message_delta", "message_stop", "response.completed"):
                parts[kind].append({key: value for key, value in event.items() if key != "sequence_number"})
            case str(kind) if kind == "response.incomplete":
                parts[kind].append(event["response"])
        if event.get("usage") and "choices" in event:
            parts["usage"].append(event["usage"])
    assert answer.text.endswith("\n\n")
    return Said(
        answer.status_code,
        {k: "".join(v) if v and all(isinstance(p, str) for p in v) else v for k, v in parts.items()},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the tokenizer of these tests."""
    folder = write_tiny(
        tmp_path_factory.mktemp("v3"), "v3", seed=3, vocab_size=backend().get_vocab_size(), num_hidden_layers=2
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    (folder / "tokenizer.json").write_text(backend().to_str())
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    """Makes an engine that feeds so many tokens of a row in a step."""

    def made(width: int) -> InlineEngine:
        config = EngineConfig(
            model=str(folder), device="cpu", width=width, max_rows=8, token_budget=48, cache_pages=80, invariant=True,
            selftest=False, grammar_compile_timeout_s=60.0, prefix_cache=False,
        )  # fmt: skip
        return InlineEngine(config)

    return made


@pytest.fixture(scope="module")
def living(engine: Any) -> InlineEngine:
    """The engine that does not die. It is the same one for all cases."""
    made: InlineEngine = engine(3)
    return made


async def answered(engines: MortalEngines, case: Case) -> tuple[Said, Said | None]:
    """The answer to a case, and that to a request beside it in the phases that need one."""
    app = create_app(engines.failover, tiny(), CONFIG)  # type: ignore[arg-type]

    async def drawn(scope: Any, receive: Any, send: Any) -> None:
        """Draw what follows from the name that the client gives its request."""
        secret = blake2b(dict(scope["headers"])[b"x-request-id"], digest_size=16).digest()
        await app({**scope, "latentserve.draws": Draws(secret, 1_700_000_000.25)}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(drawn), base_url="http://front", timeout=120) as http:

        async def ask(name: str, path: str, body: dict[str, Any]) -> httpx.Response:
            return await http.post(path, json={"model": "tiny", **body}, headers={"x-request-id": name})

        beside = {"prompt": "the quick brown fox", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        companion = None
        if case.phase in ("mixed", "decode", "verify"):
            companion = asyncio.create_task(ask("beside", "/v1/completions", beside))
            while not engines.clients[0].engine.scheduler.stats().running:
                await asyncio.sleep(0)
        path, body, shown = BODIES[case.api]
        more: dict[str, Any] = {"n": case.n} if case.n > 1 else {}
        if case.stream and case.api in ("completions", "chat"):
            more["stream_options"] = {"include_usage": True}
        engines.clients[0].armed = True
        answer = await ask("asked", path, {**body, **shown[case.shows], **more, "stream": case.stream})
        other = None if companion is None else said(False, await companion)
    return said(case.stream, answer), other


@pytest.fixture(scope="module")
def undisturbed(living: InlineEngine) -> Any:
    """Gives the answer, and that beside it, where no engine dies."""
    known: dict[tuple[Any, ...], Said] = {}
    beside: list[Said] = []

    async def answer(case: Case) -> tuple[Said, Said | None]:
        alone, accompanied = case._replace(phase="queued"), case._replace(phase="mixed")
        for one in (alone,) if beside else (alone, accompanied):
            if one[:4] in known and one is alone:
                continue
            engines = MortalEngines(living, living)
            found, other = await answered(engines, one)
            assert len(engines.clients) == 1
            assert found.status == 200
            assert known.setdefault(one[:4], found) == found
            beside.extend([] if other is None else [other])
            await engines.close()
        return known[alone[:4]], beside[0] if case.phase in ("mixed", "decode", "verify") else None

    return answer


@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in ALL])
async def test_a_client_has_what_it_would_have_had(
    engine: Any, living: InlineEngine, undisturbed: Any, case: Case
) -> None:
    expected = await undisturbed(case)
    engines = MortalEngines(engine(1 if case.phase == "decode" else 3), living, (case.phase, case.lost))
    found = await answered(engines, case)
    assert [bool(client.fault) for client in engines.clients] == [True, False]
    assert found == expected
    assert engines.failover.streams == 0
    stats = living.scheduler.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    await engines.close()


@pytest.mark.parametrize("fault", ["the newest token is forgotten", "the next engine begins again"])
async def test_planted_faults_are_found(
    engine: Any, living: InlineEngine, undisturbed: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("chat", "logprobs", 1, False, "decode", LOST[0])
    expected = await undisturbed(case)
    kept = -1 if "newest" in fault else 0
    monkeypatch.setattr(failover, "pack_tokens", lambda tokens: pack_tokens(tokens[:kept]))
    engines = MortalEngines(engine(1), living, (case.phase, case.lost))
    found, other = await answered(engines, case)
    assert found != expected[0]
    assert found.status == 500, "the front takes no token but the one that is due"
    assert other != expected[1]
    await engines.close()
