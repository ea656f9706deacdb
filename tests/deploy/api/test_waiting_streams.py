"""Streams that wait for their next token, as where an engine has died, are not silent."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, out, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.generation import generate
from deploy.config.api import ApiConfig
from workers.protocol.messages import Request

USER = [{"role": "user", "content": "Go on."}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 9}),
    "choices": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 9, "n": 2, "temperature": 1}),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 9}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 9}),
    "responses": ("/v1/responses", {"input": "Go on.", "max_output_tokens": 9}),
}
IDS = tiny().encode("def read_lines", add_special_tokens=False)
COMMENT = ": waiting for the next token\n\n"


def waits(seconds: float, enough: threading.Event) -> Any:
    """Seconds before the first token, and until somebody has seen enough behind it."""

    def script(request: Request) -> Iterator[Any]:
        yield seconds
        yield out(*IDS[:2])
        while not enough.is_set():
            yield 0.01
        yield out(*IDS[2:], finish="length")

    return script


def answer(comments: int, path: str, body: dict[str, Any]) -> str:
    """Ask an engine that waits before its first token, and behind it until so many comments have come."""
    enough, text = threading.Event(), ""
    app = create_app(FakeEngine(waits(0.3 if comments else 0.0, enough)), tiny(), ApiConfig())
    asked = {**body, "model": "tiny", "stream": True}
    with (
        serving(app) as port,
        httpx.Client(timeout=60, trust_env=False) as http,
        http.stream("POST", f"http://127.0.0.1:{port}{path}", json=asked) as answered,
    ):
        for part in answered.iter_text():
            text += part
            if text.count(COMMENT) >= comments:
                enough.set()
    assert answered.status_code == 200, text
    return re.sub(r"[0-9a-f]{24,}|(?<=\"created\":)\d+|(?<=_at\":)[\d.]+", "ID", text)


@pytest.mark.parametrize("asked", ASKED)
def test_a_stream_that_waits_says_so_between_its_events(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the first token, until which an error still has a status of its own; without comments the answer is
    that of a stream which never waits."""
    whole = answer(0, *ASKED[asked])
    assert COMMENT not in whole
    monkeypatch.setattr(generate, "SILENCE_S", 0.05)
    found = answer(2, *ASKED[asked])
    assert not found.startswith(":")
    assert sorted(found.replace(COMMENT, "").split("\n\n")) == sorted(whole.split("\n\n"))


def test_openais_client_does_not_see_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "SILENCE_S", 0.02)
    enough = threading.Event()
    threading.Timer(0.3, enough.set).start()
    with serving(create_app(FakeEngine(waits(0.0, enough)), tiny(), ApiConfig())) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        chunks = list(client.completions.create(model="tiny", prompt="def", max_tokens=9, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == tiny().decode(IDS)
