"""Accepted drafts are told to those who ask, token by token, however outputs were merged or parsed. And how many were
accepted and how many were not, in `usage`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake_engine import INFO, FakeEngine, PushEngine, out, serving
from msgspec.structs import replace
from tiny_tokenizer import tiny
from tool_templates import GLM

from deploy.api.app import create_app
from deploy.config.api import ApiConfig

IDS = tiny().encode(" fox jumps over the lazy dog", add_special_tokens=False)
STEPS = (1, 3, 2, 1)
"""Tokens of each step."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
ASKED = {"return_accepted_drafts": True}


def script(request: Any) -> Iterator[Any]:
    left = list(IDS)
    for index, count in enumerate(STEPS):
        step, left = left[:count], left[count:]
        yield replace(out(*step), offered=3 if index else 0)
    yield replace(out(1, finish="stop"), offered=3)


ACCEPTED, OFFERED = 3, 3 * len(STEPS)
"""Drafts of the script that stood, and those that were verified: the first step has none."""
COUNTS = {"accepted_prediction_tokens": ACCEPTED, "rejected_prediction_tokens": OFFERED - ACCEPTED}
LONG = dataclasses.replace(INFO, max_context=1024)
WANTED = [place < count - 1 for count in STEPS for place in range(count)]


def answers(path: str, body: dict[str, Any], engine: FakeEngine, config: ApiConfig | None = None) -> Iterable[Any]:
    """The choices of the answer, or of all events."""
    with serving(create_app(engine, tiny(), config)) as port:
        text = httpx.post(f"http://127.0.0.1:{port}{path}", json=body).text
    if not body.get("stream"):
        return json.loads(text)["choices"]
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    return [event["choices"][0] for event in events]


@pytest.mark.parametrize("kind", [FakeEngine, PushEngine])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)])
def test_each_token_says_whether_it_was_a_draft(path: str, body: dict[str, Any], stream: bool, kind: type) -> None:
    assert len(IDS) >= sum(STEPS)
    whole = {**body, **ASKED, "stream": stream, "return_token_ids": True, "max_tokens": 100}
    choices = answers(path, whole, kind(script))
    ids = [token for choice in choices for token in choice.get("token_ids", [])]
    found = [draft for choice in choices for draft in choice.get("accepted_drafts", [])]
    assert ids == [*IDS[: sum(STEPS)], 1]
    assert found == [*WANTED, False]


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_parsed_keeps_them(stream: bool) -> None:
    engine = FakeEngine(script, LONG)
    body = {**CHAT, **ASKED, "stream": stream, "max_tokens": 100}
    choices = answers("/v1/chat/completions", body, engine, ApiConfig(chat_template=GLM))
    assert [draft for choice in choices for draft in choice.get("accepted_drafts", [])] == [*WANTED, False]


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_else_hears_of_it(stream: bool) -> None:
    for choice in answers("/v1/completions", {**TEXT, "stream": stream, "max_tokens": 100}, FakeEngine(script)):
        assert "accepted_drafts" not in choice


@contextmanager
def client(kind: type, config: ApiConfig | None = None) -> Iterator[openai.OpenAI]:
    with (
        serving(create_app(kind(script, LONG), tiny(), config)) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as asked,
    ):
        yield asked


def counted(usage: openai.types.CompletionUsage | None, asked: bool = True) -> tuple[int | None, int | None]:
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    names = {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert names & details.model_fields_set == (names if asked else set())
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("config", [None, ApiConfig(chat_template=GLM)], ids=["text", "parsed"])
@pytest.mark.parametrize("kind", [FakeEngine, PushEngine])
def test_the_usage_of_a_chat_counts_them(kind: type, config: ApiConfig | None) -> None:
    with client(kind, config) as asked:
        for choices in (1, 2):
            wanted = (choices * ACCEPTED, choices * (OFFERED - ACCEPTED))
            body: Any = {**CHAT, "n": choices, "max_tokens": 100}
            assert counted(asked.chat.completions.create(**body, extra_body=ASKED).usage) == wanted
            assert counted(asked.chat.completions.create(**body).usage, asked=False) == (None, None)
            stream: Any = {**body, "stream": True, "stream_options": {"include_usage": True}}
            *_, last = asked.chat.completions.create(**stream, extra_body=ASKED)
            assert counted(last.usage) == wanted
            *_, last = asked.chat.completions.create(**stream)
            assert counted(last.usage, asked=False) == (None, None)


def test_the_usage_of_a_completion_counts_them_over_all_choices() -> None:
    with client(PushEngine) as asked:
        body: Any = {"model": "tiny", "prompt": ["hi", "there"], "n": 2, "max_tokens": 100, "extra_body": ASKED}
        answer = asked.completions.create(**body)
        assert counted(answer.usage) == (4 * ACCEPTED, 4 * (OFFERED - ACCEPTED))
        found = [draft for choice in answer.choices for draft in choice.model_extra["accepted_drafts"]]  # type: ignore[index]
        assert sum(found) == 4 * ACCEPTED
        *_, last = asked.completions.create(**body, stream=True, stream_options={"include_usage": True})
        assert counted(last.usage) == (4 * ACCEPTED, 4 * (OFFERED - ACCEPTED))


def test_what_a_stop_string_cuts_off_was_not_accepted() -> None:
    texts = [tiny().decode([token]) for token in IDS]
    with client(FakeEngine) as asked:
        # The second token is the first draft of the step behind the prompt's.
        cut = asked.completions.create(**TEXT, stop=texts[1].strip(), max_tokens=100, extra_body=ASKED)
        assert cut.choices[0].finish_reason == "stop"
        assert counted(cut.usage) == (1, 2)


def test_the_usage_of_a_response_counts_them() -> None:
    with client(FakeEngine) as asked:
        body: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 100}
        for wanted, extra in ((True, ASKED), (False, {})):
            answer = asked.responses.create(**body, extra_body=extra)
            *_, last = asked.responses.create(**body, stream=True, extra_body=extra)
            assert last.type == "response.completed"
            for usage in (answer.usage, last.response.usage):
                assert usage is not None
                more = usage.output_tokens_details.model_extra
                assert more == ({} if not wanted else COUNTS)


def test_the_usage_of_a_message_counts_them() -> None:
    app = create_app(FakeEngine(script, LONG), tiny())
    with (
        serving(app) as port,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as asked,
    ):
        body: Any = {"model": "tiny", "max_tokens": 100, "messages": CHAT["messages"]}
        for wanted, extra in ((True, ASKED), (False, {})):
            answer = asked.messages.create(**body, extra_body=extra)
            deltas = [
                e for e in asked.messages.create(**body, stream=True, extra_body=extra) if e.type == "message_delta"
            ]
            for usage in (answer.usage, deltas[-1].usage):
                assert usage.output_tokens_details is not None
                assert usage.output_tokens_details.model_extra == ({} if not wanted else COUNTS)
