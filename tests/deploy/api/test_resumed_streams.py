"""Streams that break after any event, and are resumed at another server: events come once, and are those of a stream
that did not break."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import INFO, FakeEngine, out, serving
from msgspec.structs import replace
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.messages import Request
from workers.protocol.plan import TopLogprobs

TEMPLATE = "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
TEXT = (
    'Well: Grüße aus 東京.</think>Number 7 of it. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\nEND'
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
FLAT = {"type": "function", **TOOL["function"]}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 120}
USAGE = {"stream_options": {"include_usage": True}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Hi", "max_tokens": 30, "n": 3, "return_token_ids": True, **USAGE}),
    "logprobs": ("/v1/completions", {"prompt": "Hi", "max_tokens": 30, "logprobs": 1, "temperature": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], **USAGE}),
    "messages": ("/v1/messages", {**CHAT, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 120, "tools": [FLAT]}),
}
RESUME = {"x-latentserve-resume": "1"}


def in_pieces_of(seed: int) -> Any:
    """Say the text in pieces of random sizes, as when other drafts are accepted in another batch."""
    chance = random.Random(seed)
    ids = tiny().encode(TEXT, add_special_tokens=False)

    def script(request: Request) -> Iterator[Any]:
        own = [request.sampling.seed % 50 + 300, *ids][: request.sampling.max_tokens]
        at = 0
        while at < len(own):
            end = min(at + chance.randint(1, 4), len(own))
            logprobs = [TopLogprobs(-0.5, (token,), (-0.5,)) for token in own[at:end]]
            piece = out(*own[at:end], finish="length" if end == len(own) else None, cached=0 if at else 64)
            yield replace(piece, at=at, logprobs=tuple(logprobs) if request.sampling.logprobs >= 0 else ())
            at = end

    return script


def server(seed: int, **info: Any) -> Any:
    config = ApiConfig(chat_template=TEMPLATE, tool_parser="hermes", reasoning_parser="deepseek_r1")
    engine = FakeEngine(in_pieces_of(seed))
    engine.info = INFO if not info else type(INFO)(**{**vars(INFO), **info})
    return serving(create_app(engine, tiny(), config))


def events(port: int, asked: str, last: str | None = None) -> list[str]:
    path, body = ASKED[asked]
    headers = RESUME if last is None else {**RESUME, "last-event-id": last}
    sent = {**body, "model": "tiny", "stream": True}
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=sent, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return re.split(r"(?<=\n\n)", answer.text)[:-1]


def id_of(event: str) -> str:
    found = re.match(r"id: (\S+)\n", event)
    assert found, event
    return found[1]


def told(found: list[str], asked: str) -> dict[str, Any]:
    """What a client makes of events: for each choice the text, ids and end, for others the events themselves."""
    whole: dict[str, Any] = {}
    for event in found:
        data = event.partition("data: ")[2].strip()
        choice = re.search(r'"choices":\[\{"index":(\d+)', data)
        name = choice[1] if choice else "other"
        texts = re.findall(
            r'"(?:text|content|reasoning_content|arguments|delta|thinking|partial_json)":"((?:[^"\\]|\\.)*)"', data
        )
        ids = re.findall(r'"token_ids":\[([\d,]+)\]', data)
        kinds = re.findall(
            r'"(?:type|finish_reason|stop_reason|id|completion_tokens|output_tokens)":("[^"]+"|\d+)', data
        )
        parts = whole.setdefault(name, {"text": "", "ids": [], "kinds": []})
        if "output_text.done" not in data and "arguments.done" not in data and "content_part.done" not in data:
            parts["text"] += "".join(texts) if '"output":[{' not in data and "item.done" not in data else ""
        parts["ids"] += ids[0].split(",") if ids else []
        for kind in kinds:  # deltas may come in other pieces
            if not parts["kinds"] or parts["kinds"][-1] != kind:
                parts["kinds"].append(kind)
    return whole


@pytest.mark.parametrize("asked", ASKED)
def test_a_stream_that_broke_goes_on_behind_the_last_event_that_came(asked: str) -> None:
    with server(1) as first, server(2) as second:
        whole = events(first, asked)
        assert len({id_of(event) for event in whole}) == len(whole)
        for cut in sorted({1, 2, 3, len(whole) - 2, len(whole) - 1, *range(4, len(whole), 5)}):
            rest = events(second, asked, id_of(whole[cut - 1]))
            assert told(whole[:cut] + rest, asked) == told(whole, asked), cut
            if "n" not in ASKED[asked][1] and rest:  # and once more, at the first
                half = len(rest) // 2 or 1
                again = events(first, asked, id_of(rest[half - 1]))
                assert told(whole[:cut] + rest[:half] + again, asked) == told(whole, asked), cut
        assert events(second, asked, id_of(whole[-1])) == []


def test_streams_have_no_ids_unless_they_are_asked_for() -> None:
    with server(1) as port:
        for headers in ({}, {"last-event-id": "7"}, {"x-latentserve-resume": "0"}):
            sent = {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 4}
            url = f"http://127.0.0.1:{port}/v1/completions"
            answer = httpx.post(url, json=sent, headers=headers, timeout=30, trust_env=False)
            assert answer.status_code == 200
            assert "id: " not in answer.text


def test_what_cannot_be_resumed_is_refused() -> None:
    with server(1) as port, server(1, root=b"other weights!!!") as other:
        url, sent = "/v1/completions", {"model": "tiny", "prompt": "Hi", "stream": True, "max_tokens": 4}

        def ask(where: int, last: str | None, **more: Any) -> httpx.Response:
            headers = RESUME if last is None else {**RESUME, "last-event-id": last}
            asked = {**sent, **more}
            return httpx.post(
                f"http://127.0.0.1:{where}{url}", json=asked, headers=headers, timeout=30, trust_env=False
            )

        last = id_of(ask(port, None).text)
        assert ask(port, last).status_code == 200
        refused = [ask(port, "7"), ask(port, last, prompt="Ho"), ask(port, last, n=2), ask(port, last, temperature=0.5)]
        for answer in (*refused, ask(other, last)):
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "invalid_event_id"
