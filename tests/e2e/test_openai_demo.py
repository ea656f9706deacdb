"""The openai client on the demo model: HTTP front, scheduler and two ranks, without Ray, which changes none of this."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
import uvicorn

from deploy.api.app import create_app
from deploy.text.tokenizer import Tokenizer
from tests.deploy.api.fake_engine import KEEP_ALIVE_S
from workers.config import DEMO_MODEL, EngineConfig
from workers.processes.launch import local_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def read_lines(path):"
CHAT = [{"role": "user", "content": "Write a function is_empty. Return True if the queue is empty."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(DEMO_MODEL)
    assert loaded is not None
    return loaded


async def serve(width: int, tokenizer: Tokenizer) -> AsyncIterator[openai.AsyncOpenAI]:
    config = EngineConfig(
        model="demo",
        tensor_parallel=2,
        width=width,
        device="cpu",
        max_rows=16,
        token_budget=256,
        cache_pages=300,
        heartbeat_timeout_s=60.0,  # processes of a busy machine are silent at times
    )
    async with local_engine(config) as engine:
        app = create_app(engine, tokenizer)
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", access_log=False, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S)
        )
        with socket.create_server(("127.0.0.1", 0)) as listener:
            running = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield client
            server.should_exit = server.force_exit = True
            await running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tokenizer: Tokenizer) -> AsyncIterator[openai.AsyncOpenAI]:
    async for client in serve(3, tokenizer):
        yield client


async def complete(client: openai.AsyncOpenAI, **arguments: Any) -> Any:
    extra = {"return_token_ids": True, **arguments.pop("extra_body", {})}
    given = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "extra_body": extra}
    return await client.completions.create(**{**given, **arguments})


async def streamed(client: openai.AsyncOpenAI, **arguments: Any) -> tuple[str, list[int], Any, list[Any]]:
    """Text, token ids, usage and the events of a stream."""
    stream = await complete(client, stream=True, stream_options={"include_usage": True}, **arguments)
    events = [event async for event in stream]
    choices = [event.choices[0] for event in events if event.choices]
    ids = [token for choice in choices for token in (getattr(choice, "token_ids", None) or [])]
    return "".join(choice.text for choice in choices), ids, events[-1].usage, choices


async def test_streamed_and_whole_agree_with_their_usage(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    whole = await complete(client)
    text, ids, usage, choices = await streamed(client)
    assert text == whole.choices[0].text == tokenizer.decode(ids)
    assert ids == whole.choices[0].token_ids
    assert len(choices) > 5
    assert usage == whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokenizer.encode(PROMPT)), 40)


async def test_cached_tokens_are_whole_pages_of_the_prompt(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    prompt = "".join(f"value_{i} = {i}\n" for i in range(40))
    length = len(tokenizer.encode(prompt))
    first = await complete(client, prompt=prompt, max_tokens=12)
    second = await complete(client, prompt=prompt, max_tokens=12)
    _, ids, usage, _ = await streamed(client, prompt=prompt, max_tokens=12)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (length - 1) // 64 * 64 > 64
    assert usage == second.usage
    assert first.choices[0].token_ids == second.choices[0].token_ids == ids


async def test_a_stop_string_cuts_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    free = (await complete(client)).choices[0].text
    stop = free[15:18]
    before = free[: free.index(stop)]
    whole = await complete(client, stop=[stop, "never there"])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (before, "stop")
    assert whole.usage.completion_tokens < 40
    text, _, usage, choices = await streamed(client, stop=[stop])
    assert (text, choices[-1].finish_reason) == (before, "stop")
    assert usage.completion_tokens == whole.usage.completion_tokens
    kept = await complete(client, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == before + stop


@pytest.mark.long
async def test_min_tokens_holds_stop_ids_and_stop_strings_back(client: openai.AsyncOpenAI) -> None:
    given = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 60}
    short = await client.chat.completions.create(**given)
    assert short.choices[0].finish_reason == "stop"
    least = short.usage.completion_tokens + 8
    longer = await client.chat.completions.create(**given, extra_body={"min_tokens": least})
    assert longer.usage.completion_tokens >= least
    assert longer.choices[0].message.content.startswith(short.choices[0].message.content)
    free = await complete(client)
    held = await complete(client, stop=[free.choices[0].text[2:4]], extra_body={"min_tokens": 40})
    assert held.choices[0].token_ids == free.choices[0].token_ids


async def test_log_probabilities_of_greedy_tokens_are_the_highest(client: openai.AsyncOpenAI) -> None:
    given = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 60, "logprobs": True, "top_logprobs": 3}
    whole = await client.chat.completions.create(**given)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    shown = b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode()
    assert shown == whole.choices[0].message.content
    stream = await client.chat.completions.create(**given, stream=True)
    events = [choice async for event in stream for choice in event.choices]
    assert "".join(choice.delta.content or "" for choice in events) == whole.choices[0].message.content
    again = [entry for choice in events if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in again] == [entry.token for entry in entries]
    assert [e.logprob for e in again] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    plain = await complete(client, logprobs=2, max_tokens=8)
    assert len(plain.choices[0].logprobs.token_logprobs) == 8
    assert all(len(top) >= 2 for top in plain.choices[0].logprobs.top_logprobs)


async def test_choices_of_one_request_differ_and_repeat_with_the_seed(client: openai.AsyncOpenAI) -> None:
    sampled = {"n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 16}
    one, two = await complete(client, **sampled), await complete(client, **sampled)
    ids = [choice.token_ids for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
    assert ids == [choice.token_ids for choice in two.choices]
    assert len({tuple(tokens) for tokens in ids}) == 4
    assert one.usage.completion_tokens == sum(map(len, ids))
    assert one.usage.prompt_tokens == (await complete(client, max_tokens=1)).usage.prompt_tokens


SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 5,
    "frequency_penalty": 0.4,
    "logit_bias": {"264": -2.0},
    "extra_body": {"top_k": 200, "min_p": 0.001, "repetition_penalty": 1.1},
    "max_tokens": 32,
}


async def test_a_seeded_request_gives_the_same_tokens_alone_in_a_batch_and_streamed(client: openai.AsyncOpenAI) -> None:
    alone = (await complete(client, **SAMPLED)).choices[0].token_ids
    others = [complete(client, prompt=f"class A{i}:\n", temperature=1.1, max_tokens=20 + i) for i in range(20)]
    _, ids, _, _ = (await asyncio.gather(streamed(client, **SAMPLED), *others))[0]
    assert ids == alone


@pytest.mark.long
async def test_speculation_changes_no_answer(client: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    with_drafts = await complete(client), await complete(client, **SAMPLED)
    async for plain in serve(1, tokenizer):
        without = await complete(plain), await complete(plain, **SAMPLED)
    for one, other in zip(with_drafts, without, strict=True):
        assert one.choices[0].token_ids == other.choices[0].token_ids


CANNOT: list[dict[str, Any]] = [
    {"extra_body": {"stop_token_ids": list(range(100, 165)), "min_tokens": 1}},
    {"logit_bias": {str(token): 1.0 for token in range(1025)}},
    {"logit_bias": {"4096": 1.0}},
    {"prompt": [4096]},
    {"prompt": [5] * 2048},
    {"max_tokens": 2048},
    {"extra_body": {"stop_token_ids": [4096]}},
    {"extra_body": {"repetition_penalty": 1e-45}},
]


@pytest.mark.parametrize(
    ("wrong", "stream"),
    [
        pytest.param(
            wrong,
            stream,
            marks=() if number % 2 == 0 and stream == (number % 4 == 0) else pytest.mark.long,
            id=f"{str(wrong)[:40]}-{stream}",
        )
        for number, wrong in enumerate(CANNOT)
        for stream in (False, True)
    ],
)
async def test_what_the_engine_cannot_do_is_400_and_harms_nobody(
    client: openai.AsyncOpenAI, wrong: dict[str, Any], stream: bool
) -> None:
    neighbour = asyncio.create_task(complete(client, max_tokens=30))
    with pytest.raises(openai.BadRequestError):
        await complete(client, stream=stream, **wrong)
    assert (await neighbour).usage.completion_tokens == 30
