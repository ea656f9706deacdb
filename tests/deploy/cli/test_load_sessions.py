"""Sessions that a load is read from, and how they are sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.loadtest.load import run_load
from deploy.loadtest.load_spec import LoadSpec
from deploy.loadtest.sessions import TraceError, read_trace
from tests.deploy.loadtest.sse_server import serving

SHAREGPT = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "one"},
        {"from": "gpt", "value": "recorded"},
        {"from": "human", "value": "two"},
    ],
}
MESSAGES = {"messages": [{"role": "user", "content": "three"}], "max_tokens": 7}
PROMPT = {"prompt": "four"}
NOBODY = {"conversations": [{"from": "gpt", "value": "alone"}]}


def written(path: Path, entries: list[object], *, array: bool) -> Path:
    text = json.dumps(entries) if array else "\n\n".join(map(json.dumps, entries)) + "\n"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("array", [False, True])
def test_every_form_is_read(tmp_path: Path, array: bool) -> None:
    sessions = read_trace(written(tmp_path / "t", [SHAREGPT, NOBODY, MESSAGES, PROMPT], array=array))
    said = [[[m["content"] for m in turn.messages] for turn in session] for session in sessions]
    assert said == [[["be brief", "one"], ["two"]], [["three"]], [["four"]]]
    assert [turn.output for session in sessions for turn in session] == [None, None, 7, None]
    assert read_trace(tmp_path / "t", 2) == sessions[:2]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"prompt": "a"}\n{"prompt": 1}', r"line 2 is no session \(what 'user' says is no text\)"),
        ('{"prompt": "a"}\n{"what": 1}', r"line 2 is no session \(no 'conversations'\)"),
        ('{"prompt": "a"}\n\n{', "line 3 is no JSON"),
        ('[{"prompt": "a"}', "is no JSON"),
        ('[{"prompt": "a", "max_tokens": 0}]', r"entry 1 is no session \(max_tokens is 0\)"),
        ('[{"conversations": [["human", "hi"]]}]', "entry 1 is no session"),
        ("[1]", "entry 1 is no session"),
        ("[" * 100_000, "is no JSON"),
        ('{"prompt": ' + "[" * 100_000, "line 1 is no JSON"),
        ("", "holds no session"),
        (json.dumps(NOBODY), "holds no session"),
    ],
)
def test_what_is_no_session_is_named(tmp_path: Path, text: str, cause: str, command) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "t").write_text(text)
    with pytest.raises(TraceError, match=cause):
        read_trace(tmp_path / "t")
    ran = command("bench", "http", "--trace", str(tmp_path / "t"), "--model", "m")
    assert ran.code == 2
    assert "--trace" in ran.err


WORDS = st.sampled_from(["prompt", "messages", "conversations", "from", "value", "role", "content", "max_tokens"])
SCALARS = st.none() | st.booleans() | st.integers() | st.text()


@given(st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner)))
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, entry: object) -> None:
    path = written(tmp_path_factory.getbasetemp() / "any", [entry], array=False)
    try:
        sessions = read_trace(path)
    except TraceError:
        return
    assert all(turn.messages for session in sessions for turn in session)


async def test_turns_follow_each_other_with_the_answers_that_were_given(tmp_path: Path) -> None:
    async def answer(exchange):  # type: ignore[no-untyped-def]
        await exchange.head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
        count = len(exchange.body["messages"])
        await exchange.event(choices=[{"delta": {"role": "assistant"}}])
        for text in ("said ", str(count)):
            await exchange.event(choices=[{"delta": {"content": text}}])
        await exchange.event(choices=[], usage={"prompt_tokens": count, "completion_tokens": 2})
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    sessions = tuple(read_trace(written(tmp_path / "t", [SHAREGPT, MESSAGES], array=False)))
    async with serving(answer) as server:
        spec = LoadSpec(url=server.url, model="m", input=5, output=4, warmup=0, sessions=sessions)
        run = await run_load(spec, lambda record: None)
    assert [record.error for record in run.records] == [""] * 3
    assert [exchange.path for exchange in server.exchanges] == ["/v1/chat/completions"] * 3
    bodies = [exchange.body for exchange in server.exchanges]
    assert [message["content"] for message in bodies[1]["messages"]] == ["be brief", "one", "said 2", "two"]
    assert [body["max_tokens"] for body in bodies] == [4, 4, 7]
    assert spec.total == 3


async def test_a_session_ends_with_its_first_error(tmp_path: Path) -> None:
    async def answer(exchange):  # type: ignore[no-untyped-def]
        await exchange.json("429 Too Many Requests", {"error": {"message": "later"}})

    sessions = tuple(read_trace(written(tmp_path / "t", [SHAREGPT, MESSAGES], array=False)))
    async with serving(answer) as server:
        run = await run_load(
            LoadSpec(url=server.url, model="m", input=5, output=4, warmup=0, sessions=sessions), lambda r: None
        )
    assert [record.error for record in run.records] == ["HTTP 429"] * 2
