"""The openai client against a real server: both endpoints, streamed and not, usage, logprobs, n, seeds, stops."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_engine import INFO, EngineFault, FakeEngine, Refused, RequestFailed, out, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.plan import TopLogprobs
from workers.protocol.request import sequence_seeds

TEXT = "the quick brown fox — Köln 東京 👩‍🚀 jumps over"
IDS = tiny().encode(TEXT, add_special_tokens=False)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say(IDS))


@pytest.fixture(scope="module")
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(create_app(engine, tiny(), ApiConfig(served_model_names=("tiny", "other/name")))) as port:
        yield port


@pytest.fixture
def client(port: int, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    engine.script = say(IDS)
    engine.requests.clear()
    engine.cancelled.clear()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other/name"]
    card = client.models.retrieve("other/name")
    assert (card.id, card.created, card.owned_by) == ("other/name", INFO.created, "latentserve")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_answers_carry_the_first_name(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert client.completions.create(model="other/name", prompt="x").model == "tiny"
    assert client.chat.completions.create(model="other/name", messages=messages).model == "tiny"
    events = list(client.completions.create(model="other/name", prompt="x", stream=True))
    assert {event.model for event in events} == {"tiny"}


def test_completion(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="def f", max_tokens=100)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    prompt = tiny().encode("def f")
    assert engine.requests[0].prompt == tuple(prompt)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(IDS) + 1  # the stop id is one of them
    assert answer.usage.total_tokens == len(prompt) + len(IDS) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 64
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert re.fullmatch("fp_[0-9a-f]{10}", answer.system_fingerprint or "")
    assert engine.cancelled == []


@pytest.mark.parametrize("width", [1, 3, 50])
def test_completion_stream_is_the_same_text(client: openai.OpenAI, engine: FakeEngine, width: int) -> None:
    engine.script = say(IDS, width=width)
    chunks = list(
        client.completions.create(
            model="tiny", prompt="x", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(IDS) + 1
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_event_of_a_stream_may_have_counts(client: openai.OpenAI, engine: FakeEngine, path: str) -> None:
    engine.script = say(IDS, width=3)
    for n, options in ((1, {}), (2, {}), (1, {"include_usage": False}), (1, {"continuous_usage_stats": False})):
        body: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 100,
            "n": n,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True, **options},
            **({"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}),
        }
        raw = client.post(f"/{path}", body=body, cast_to=httpx.Response)
        events = [json.loads(line[6:]) for line in raw.text.splitlines() if line.startswith("data: {")]
        counts = [event.get("usage") for event in events]
        if options:
            assert [count for count in counts if count] == ([] if "include_usage" in options else counts[-1:])
            continue
        generated = [count["completion_tokens"] for count in counts]
        assert generated == sorted(generated)
        assert 0 < generated[0] <= 3 * n
        assert len({*generated}) >= len(IDS) // 3
        assert generated[-1] == n * (len(IDS) + 1)
        assert len({count["prompt_tokens"] for count in counts}) == 1
        assert all(count["total_tokens"] == count["prompt_tokens"] + count["completion_tokens"] for count in counts)


def test_default_max_tokens(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt=[5])
    assert answer.choices[0].finish_reason == "length"
    assert engine.requests[-1].sampling.max_tokens == 16
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert engine.requests[-1].sampling.max_tokens == INFO.max_context - len(engine.requests[-1].prompt)
    client.completions.create(model="tiny", prompt=[5] * 250)
    assert engine.requests[-1].sampling.max_tokens == 6


def test_cut_character_at_the_length(client: openai.OpenAI, engine: FakeEngine) -> None:
    cut = next(n for n in range(1, len(IDS)) if tiny().decode(IDS[:n]).endswith("\ufffd"))
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=cut)
    assert answer.choices[0].text == tiny().decode(IDS[:cut])
    assert answer.choices[0].finish_reason == "length"


def test_prompt_shapes_and_echo(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = say(tiny().encode("fox", add_special_tokens=False))
    answer = client.completions.create(model="tiny", prompt=["a", "the dog"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["afox", "afox", "the dogfox", "the dogfox"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = tiny().encode("the dog", add_special_tokens=False)
    assert client.completions.create(model="tiny", prompt=ids, echo=True).choices[0].text == "the dogfox"
    answer = client.completions.create(model="tiny", prompt=[[5, 6], [7]])
    assert [request.prompt for request in engine.requests[-2:]] == [(5, 6), (7,)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    chunks = list(client.completions.create(model="tiny", prompt="a", echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "afox"
    client.completions.create(model="tiny", prompt="a", extra_body={"add_special_tokens": False})
    assert engine.requests[-1].prompt == tuple(tiny().encode("a", add_special_tokens=False))


def test_chat(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        max_completion_tokens=100,
        max_tokens=3,
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert tiny().decode(engine.requests[0].prompt, False) == "<|system|>be brief<|user|>a\nb<|assistant|>"


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 64


async def test_async_client_many_at_once(port: int, engine: FakeEngine) -> None:
    engine.script = say(IDS)
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:

        async def one(stream: bool) -> str:
            messages = [{"role": "user", "content": "hi"}]
            if not stream:
                answer = await client.chat.completions.create(model="tiny", messages=messages)
                return answer.choices[0].message.content or ""
            chunks = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        texts = await asyncio.gather(*(one(bool(i % 2)) for i in range(24)))
    assert set(texts) == {TEXT}


def test_n_choices_have_their_own_seeds_and_stream_side_by_side(client: openai.OpenAI, engine: FakeEngine) -> None:
    def by_seed(request):  # the choice says its own seed
        return say(tiny().encode(str(request.sampling.seed), add_special_tokens=False))(request)

    engine.script = by_seed
    seen = []
    for stream in (False, True):
        engine.requests.clear()
        answer = client.completions.create(model="tiny", prompt="x", n=4, seed=7, max_tokens=60, stream=stream)
        texts = [""] * 4
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        seeds = [request.sampling.seed for request in engine.requests]
        assert len(set(seeds)) == 4
        assert all(0 <= seed < 2**63 for seed in seeds)
        assert texts == list(map(str, seeds))
        assert len({request.request_id for request in engine.requests}) == 4
        seen.append(seeds)
    assert seen[0] == seen[1]  # a seed decides everything
    client.completions.create(model="tiny", prompt=["x", "x"], n=2, max_tokens=60)
    drawn = [request.sampling.seed for request in engine.requests[-4:]]
    assert len(set(drawn)) == 4
    client.completions.create(model="tiny", prompt=["x", "x"], n=2, seed=7, max_tokens=60)
    assert sorted(request.sampling.seed for request in engine.requests[-4:]) == sorted(2 * seen[0][:2])


def test_stop_strings_do_not_depend_on_the_width(client: openai.OpenAI, engine: FakeEngine) -> None:
    text = "the fox STOP over END of"
    ids = tiny().encode(text, add_special_tokens=False)
    counts = set()
    for width in (1, 2, 5):
        engine.script = say(ids, width=width)
        for stream in (False, True):
            for extra, expected in (({}, "the fox "), ({"include_stop_str_in_output": True}, "the fox STOP")):
                answer = client.completions.create(
                    model="tiny",
                    prompt="x",
                    max_tokens=100,
                    stop=["END", "STOP"],
                    stream=stream,
                    extra_body=extra,
                    **({"stream_options": {"include_usage": True}} if stream else {}),
                )
                parts = list(answer) if stream else [answer]
                chosen = [part.choices[0] for part in parts if part.choices]
                assert "".join(choice.text for choice in chosen) == expected
                assert chosen[-1].finish_reason == "stop"
                assert chosen[-1].stop_reason == "STOP"
                counts.add(parts[-1].usage.completion_tokens)
    assert len(counts) == 1
    stop_at = next(n for n in range(len(ids) + 1) if "STOP" in tiny().decode(ids[:n]))
    assert counts == {stop_at}
    assert len(engine.cancelled) == len(engine.requests)  # the engine was told each time


def test_min_tokens_puts_stop_strings_off(client: openai.OpenAI, engine: FakeEngine) -> None:
    ids = tiny().encode("STOP fox STOP fox", add_special_tokens=False)
    first = next(n for n in range(len(ids)) if "STOP" in tiny().decode(ids[:n]))
    engine.script = say(ids, width=2)
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stop="STOP", extra_body={"min_tokens": first + 1}
    )
    assert answer.choices[0].text == "STOP fox "


def test_stop_ids(client: openai.OpenAI, engine: FakeEngine) -> None:
    fox = tiny().encode(" fox", add_special_tokens=False)[-1]
    engine.script = say([*tiny().encode("the", add_special_tokens=False), fox], eos=None)
    for include, text in ((False, "the"), (True, tiny().decode([*tiny().encode("the", False), fox]))):
        answer = client.completions.create(
            model="tiny",
            prompt="x",
            extra_body={"stop_token_ids": [fox], "ignore_eos": True, "include_stop_str_in_output": include},
        )
        assert engine.requests[-1].sampling.stop_ids == (fox,)
        assert answer.choices[0].text == text
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].stop_reason == fox


def test_a_top_p_of_zero_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="tiny", prompt="x", top_p=0)
    assert engine.requests[-1].sampling.top_p == 0.0


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "3": 1.5},
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9, 1],
            "priority": -3,
            "nobody_knows": {"this": "field"},
        },
    )
    request = engine.requests[-1]
    s = request.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (9, 0.5, 0.9, 40, 0.05)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.25, -0.5, 1.1)
    assert s.logit_bias == ((3, 1.5), (7, -100.0))
    assert (s.stop_ids, s.min_tokens, s.logprobs) == ((1, 9), 2, -1)
    assert [s.seed] == sequence_seeds(-3, tuple(tiny().encode("x")))
    assert request.priority == -3
    client.completions.create(model="tiny", prompt="x", temperature=1e-9, extra_body={"top_k": -1})
    assert (engine.requests[-1].sampling.temperature, engine.requests[-1].sampling.top_k) == (0.0, 0)


def scored(ids: list[int]) -> object:
    def script(request):
        for token in ids:
            top = TopLogprobs(-0.5, (token, 40, 41), (-0.5, -1.5, float("-inf")))
            yield out(token, logprobs=[top])
        yield out(1, finish="stop", logprobs=[TopLogprobs(-0.1, (1, 40, 41), (-0.1, -2.0, -3.0))])

    return script


def test_logprobs(client: openai.OpenAI, engine: FakeEngine) -> None:
    ids = tiny().encode("fox 東", add_special_tokens=False)
    engine.script = scored(ids)
    messages = [{"role": "user", "content": "x"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
    assert engine.requests[-1].sampling.logprobs == 2
    content = whole.choices[0].logprobs.content
    assert len(content) == len(ids) + 1 == whole.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]).decode() == "fox 東"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert content[0].logprob == -0.5
    assert content[0].top_logprobs[1].logprob == -1.5
    chunks = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2, stream=True)
    streamed = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert streamed == content

    whole = client.completions.create(model="tiny", prompt="x", logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5] * len(ids) + [-0.1]
    assert all(-9999.0 in top.values() for top in logprobs.top_logprobs[:-1])  # minus infinity
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    parts = list(client.completions.create(model="tiny", prompt="x", logprobs=3, stream=True))
    pieces = [part.choices[0].logprobs for part in parts]
    assert [token for piece in pieces for token in piece.tokens] == logprobs.tokens
    assert [offset for piece in pieces for offset in piece.text_offset] == logprobs.text_offset
    zero = client.completions.create(model="tiny", prompt="x", logprobs=0)
    assert zero.choices[0].logprobs.token_logprobs == logprobs.token_logprobs
    assert engine.requests[-1].sampling.logprobs == 0


def named(ids: list[int], *, chosen: int, values: tuple[float, ...]) -> object:
    def script(request):
        assert request.sampling.logprob_token_ids == tuple(ids)
        top = TopLogprobs(-0.5, (chosen, 40)[: request.sampling.logprobs], (-0.5, -1.5)[: request.sampling.logprobs])
        yield out(chosen, logprobs=[TopLogprobs(top.chosen, top.ids, top.logprobs, values)])
        yield out(1, finish="stop", logprobs=[TopLogprobs(-0.1, top.ids, top.logprobs, values)])

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_named_ids(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    """Named ids stand behind the most probable ones, each id once; by their ids, so that none looks like another."""
    engine.script = named([40, 41, 7], chosen=60, values=(-1.5, -4.0, float("-inf")))
    asked = {"logprob_token_ids": [40, 41, 7, 41], "return_tokens_as_token_ids": True}
    messages = [{"role": "user", "content": "x"}]
    given = client.chat.completions.create(
        model="tiny", messages=messages, logprobs=True, top_logprobs=1, stream=stream, extra_body=asked
    )
    choices = [part.choices[0] for part in (given if stream else [given])]
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in content] == ["token_id:60", "token_id:1"]
    for entry in content:
        tops = {top.token: top.logprob for top in entry.top_logprobs}
        assert tops == {"token_id:60": -0.5, "token_id:40": -1.5, "token_id:41": -4.0, "token_id:7": -9999.0}
    assert bytes(content[0].bytes) == tiny().token_bytes(60)

    given = client.completions.create(model="tiny", prompt="x", logprobs=0, stream=stream, extra_body=asked)
    lists = [part.choices[0].logprobs for part in (given if stream else [given])]
    assert [token for each in lists for token in each.tokens] == ["token_id:60", "token_id:1"]
    first, last = (top for each in lists for top in each.top_logprobs)
    others = {"token_id:40": -1.5, "token_id:41": -4.0, "token_id:7": -9999.0}
    assert (first, last) == ({**others, "token_id:60": -0.5}, {**others, "token_id:1": -0.1})
    assert [at for each in lists for at in each.text_offset] == [0, len(tiny().token_bytes(60).decode())]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"logprob_token_ids": [7]}, "only allowed together with logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [-1]}, "token id -1 is outside"),
        ({"logprobs": 1, "logprob_token_ids": [10**9]}, "is outside the vocabulary"),
        ({"logprobs": 1, "logprob_token_ids": list(range(129))}, "128"),
        ({"logprobs": 1, "logprob_token_ids": ["7"]}, "logprob_token_ids"),
    ],
)
def test_what_cannot_be_named_is_refused(client: openai.OpenAI, more: dict, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as found:
        client.completions.create(model="tiny", prompt="x", extra_body=more)
    assert found.value.param.startswith("logprob_token_ids")


def test_token_ids_on_request(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x", max_tokens=100, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == [*IDS, 1]
    chunks = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"return_token_ids": True}
    )
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == [*IDS, 1]


def test_token_ids_come_before_their_text_is_certain(client: openai.OpenAI, engine: FakeEngine) -> None:
    ids = tiny().encode("🦊", add_special_tokens=False)
    assert len(ids) > 1, "a character of several tokens"
    engine.script = say(ids)
    asked = {"return_token_ids": True}
    texts = client.completions.create(model="tiny", prompt="x", stream=True, extra_body=asked)
    assert [(c.choices[0].token_ids, c.choices[0].text) for c in texts] == [
        *(([token], "") for token in ids[:-1]),
        ([ids[-1]], "🦊"),
        ([1], ""),
    ]
    said = [{"role": "user", "content": "x"}]
    chats = client.chat.completions.create(model="tiny", messages=said, stream=True, extra_body=asked)
    choices = [c.choices[0] for c in chats]
    assert [c.token_ids for c in choices if getattr(c, "token_ids", None)] == [*([token] for token in ids), [1]]
    assert "".join(c.delta.content or "" for c in choices) == "🦊"
    # Log-probabilities belong to a text, and the ids to them.
    scored = client.completions.create(model="tiny", prompt="x", stream=True, logprobs=0, extra_body=asked)
    assert [c.choices[0].token_ids for c in scored] == [ids, [1]]


def test_special_tokens_in_the_text(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = say([2, *tiny().encode("fox", add_special_tokens=False)])
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "fox"
    shown = client.completions.create(model="tiny", prompt="x", extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text == "<|user|>fox"


def test_faults_and_refusals(client: openai.OpenAI, engine: FakeEngine) -> None:
    for stream in (False, True):
        engine.script = lambda request: [EngineFault("rank 1 was killed")]
        with pytest.raises(openai.InternalServerError, match="rank 1 was killed") as caught:
            client.completions.create(model="tiny", prompt="x", stream=stream)
        assert caught.value.status_code == 503
        engine.script = lambda request: [Refused("too many", overloaded=True)]
        with pytest.raises(openai.RateLimitError) as limited:
            client.completions.create(model="tiny", prompt="x", stream=stream)
        assert limited.value.response.headers["retry-after"] == "1"
        engine.script = lambda request: [Refused("no other grammar can be compiled", unavailable=True)]
        with pytest.raises(openai.InternalServerError, match="no other grammar") as caught:
            client.completions.create(model="tiny", prompt="x", stream=stream)
        assert (caught.value.status_code, caught.value.code) == (503, "grammars_unavailable")
        assert caught.value.response.headers["retry-after"] == "1"
        engine.script = lambda request: [Refused("needs more pages than there are")]
        with pytest.raises(openai.BadRequestError, match="more pages"):
            client.completions.create(model="tiny", prompt="x", stream=stream)
        engine.script = lambda request: [out(30), out(finish="cancelled")]
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_model_cannot_compute(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    """An error of its own: it says neither that the request is wrong nor that the replica is gone."""
    engine.script = lambda request: [RequestFailed("no finite numbers")]
    with pytest.raises(openai.InternalServerError, match="no finite numbers") as caught:
        client.completions.create(model="tiny", prompt="x", stream=stream)
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (500, "bad_logits", "server_error")
    engine.script = lambda request: [out(IDS[0]), 0.02, RequestFailed("no finite numbers")]
    if not stream:
        with pytest.raises(openai.InternalServerError, match="no finite numbers"):
            client.completions.create(model="tiny", prompt="x")
        return
    chunks = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], stream=True)
    finished = []
    with pytest.raises(openai.APIError, match="no finite numbers") as broken:
        finished.extend(chunk.choices[0].finish_reason for chunk in chunks)
    assert set(finished) <= {None}
    assert broken.value.code == "bad_logits"


@pytest.mark.parametrize("n", [1, 3])
def test_a_fault_mid_stream_ends_with_an_error_event(client: openai.OpenAI, engine: FakeEngine, n: int) -> None:
    engine.script = lambda request: [out(IDS[0]), 0.02, EngineFault("rank 0 was killed")]
    chunks = client.completions.create(model="tiny", prompt="x", n=n, stream=True)
    assert [next(chunks).choices[0].text for _ in range(n)] == [tiny().decode(IDS[:1])] * n
    with pytest.raises(openai.APIError, match="rank 0 was killed"):
        next(chunks)
