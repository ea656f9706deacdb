"""Log-probabilities of prompts over HTTP: OpenAI's echo, vLLM's field, and how evaluation harnesses ask."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import httpx
import openai
import pytest
import torch
from demo_server import demo_engine, openai_client, served
from fake_engine import INFO, FakeEngine, out, say, serving
from tiny_tokenizer import tiny
from transformers import AutoModelForCausalLM

from deploy.api.app import create_app
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.plan import TopLogprobs

PROMPT = "the quick brown fox"
IDS = tiny().encode(PROMPT)
TEXTS = [tiny().token_bytes(token).decode() for token in IDS]


SAID = tiny().encode(" jumps over", add_special_tokens=False)


def script(request: Request) -> Iterator[RequestOutput]:
    tokens = SAID[: request.sampling.max_tokens]
    for place, token in enumerate(tokens, 1):
        told = [TopLogprobs(-0.5, (40, 41), (-0.25, -1.5))] if request.sampling.logprobs >= 0 else []
        yield out(token, finish="length" if place == len(tokens) else None, logprobs=told)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(script)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with serving(create_app(engine, tiny())) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


def offsets_in(text: str, tokens: list[str], hidden: int) -> list[int]:
    """Return the offset of each token; the first `hidden` of them are not in the text."""
    offsets = [0] * hidden + list(itertools.accumulate(map(len, tokens[hidden:]), initial=0))[:-1]
    for token, begin in list(zip(tokens, offsets, strict=True))[hidden:]:
        assert text[begin : begin + len(token)] == token
    return offsets


@pytest.mark.parametrize("prompt", [PROMPT, IDS], ids=["text", "ids"])
@pytest.mark.parametrize("most", [0, 2, 16])
def test_echo_with_logprobs(client: openai.OpenAI, engine: FakeEngine, prompt: Any, most: int) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=most)
    choice, told = answer.choices[0], answer.choices[0].logprobs
    assert told is not None
    assert (told.tokens or [])[: len(IDS)] == TEXTS
    assert (told.token_logprobs or [])[: len(IDS)] == [None, *[-float(place) for place in range(1, len(IDS))]]
    # The most probable token, and the prompt's own.
    best = tiny().token_bytes(40).decode()
    assert (told.top_logprobs or [])[: len(IDS)] == [
        None, *[{best: -0.25, text: -float(place)} for place, text in enumerate(TEXTS[1:], 1)]
    ]  # fmt: skip
    assert choice.text.startswith(PROMPT)
    hidden = sum(token in tiny().special_ids for token in IDS)
    assert (told.text_offset or [])[: len(IDS)] == offsets_in(choice.text, TEXTS, hidden)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(told.tokens or []) - len(IDS) <= most
    assert engine.requests[-1].sampling.max_tokens == max(most, 1)
    if not most:
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")


def test_a_stream_begins_with_the_prompt(client: openai.OpenAI) -> None:
    for most in (0, 16):
        asked = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": most}
        whole = client.completions.create(**asked).choices[0]
        events = [event.choices[0] for event in client.completions.create(**asked, stream=True)]
        assert events[0].text == PROMPT
        assert "".join(event.text for event in events) == whole.text
        assert events[-1].finish_reason == whole.finish_reason
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(event.logprobs, name) for event in events if event.logprobs]
            assert [entry for part in parts for entry in part] == getattr(whole.logprobs, name)


def test_choices_prompts_and_prompts_of_one_token(client: openai.OpenAI) -> None:
    prompts = [[5, 6, 7], [8], [9, 5]]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, echo=True, logprobs=0, max_tokens=0)
    found = [(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs) for choice in answer.choices]  # type: ignore
    expected = [[None, -1.0, -2.0], [None], [None, -1.0]]
    assert found == [(values, [None] * len(values)) for values in expected for _ in range(2)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 0)


def test_the_field_of_vllm(client: openai.OpenAI, engine: FakeEngine) -> None:
    asked = {"model": "tiny", "prompt": [5, 6, 40], "max_tokens": 1, "extra_body": {"prompt_logprobs": 2}}
    [choice] = client.completions.create(**asked).model_dump()["choices"]
    decoded = {token: tiny().token_bytes(token).decode("utf-8", "replace") for token in (6, 40, 41)}

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {str(token): {"logprob": logprob, "rank": rank, "decoded_token": decoded[token]}}

    best = entry(40, -0.25, 1) | entry(41, -1.25, 2)
    assert choice["prompt_logprobs"] == [None, entry(6, -1.0, 2) | best, best]
    assert choice["logprobs"] is None
    # Fewer of them than echo asks for.
    both = client.completions.create(**asked, echo=True, logprobs=3).model_dump()["choices"][0]
    assert both["prompt_logprobs"] == choice["prompt_logprobs"]
    assert [len(top or ()) for top in both["logprobs"]["top_logprobs"][:3]] == [0, 4, 3]
    assert engine.requests[-1].sampling.prompt_logprobs == 3


def test_a_long_answer_is_written_aside(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    from deploy.text import lane

    honest = lane.Lanes.turn
    monkeypatch.setattr(lane.Lanes, "turn", lambda self, size, *key: (turns.append(size), honest(self, size, *key))[1])
    client.completions.create(model="tiny", prompt=[5] * 200, echo=True, logprobs=20, max_tokens=1)
    assert max(turns) > lane.SMALL
    turns.clear()
    client.completions.create(model="tiny", prompt=[5] * 200, logprobs=1)
    assert max(turns) < lane.SMALL


def test_without_a_tokenizer() -> None:
    engine = FakeEngine(say([7]), INFO)
    with serving(create_app(engine, None)) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        body = {"model": "tiny", "prompt": [5, 6], "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:6"]


# A task with choices, as lm-evaluation-harness scores it through local-completions (`lm_eval/models/api_models.py` and
# `openai_completions.py` of lm-eval 0.4): which requests it makes, and how it reads the answers.

TASK = [
    ("import", [" os", " banana", " 7"], 0),
    ("def add(a, b):\n    return a +", [" b", " import", " class"], 0),
    ("def copy(self)", [":", " os", "import"], 0),
    ("class Empty:\n", ["    pass", "return", ")"], 0),
]


def payload_of(ids: list[list[int]], max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": ids, "model": "demo", "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True,
        "temperature": 0,
    }  # fmt: skip


def parse_logprobs(answer: dict[str, Any], context_lengths: list[int], end: int | None) -> list[tuple[float, bool]]:
    """(sum of the continuation's log-probabilities, whether it is what greedy sampling gives) of each prompt. `end`
    leaves the generated token out."""
    found = []
    for choice, context in zip(sorted(answer["choices"], key=itemgetter("index")), context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][context:end]
        tops = choice["logprobs"]["top_logprobs"][context:end]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        found.append((sum(values), greedy))
    return found


@pytest.mark.long
async def test_a_task_is_scored_as_by_transformers() -> None:
    """The demo model generates one token or none, for prompts as ids and as text."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer is not None
    oracle = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    pairs = [(context, context + choice) for context, choices, _ in TASK for choice in choices]
    ids = [tokenizer.encode(text) for _, text in pairs]
    lengths = [len(tokenizer.encode(context)) for context, _ in pairs]
    expected = []
    for prompt, length in zip(ids, lengths, strict=True):
        with torch.inference_mode():
            logprob_TV = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0].float(), -1)
        places = range(length, len(prompt))
        value = sum(logprob_TV[place - 1, prompt[place]].item() for place in places)
        expected.append((value, all(int(logprob_TV[place - 1].argmax()) == prompt[place] for place in places)))
    async with demo_engine(3) as engine, served(engine) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for max_tokens, prompts in ((1, ids), (0, ids), (0, [text for _, text in pairs])):
            answer = await http.post("/v1/completions", json=payload_of(prompts, max_tokens))
            assert answer.status_code == 200, answer.text
            found = parse_logprobs(answer.json(), lengths, -1 if max_tokens else None)
            assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
            assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
            values = iter(value for value, _ in found)
            best = [max(range(len(choices)), key=[*itertools.islice(values, len(choices))].__getitem__)
                    for _, choices, _ in TASK]  # fmt: skip
            assert best == [right for _, _, right in TASK]
        # Beside streams, in any number of requests at once.
        async with openai_client(engine) as client:
            alone = await asyncio.gather(
                *(http.post("/v1/completions", json=payload_of([prompt], 1)) for prompt in ids),
                client.completions.create(model="demo", prompt="import os\n", max_tokens=40, temperature=0),
            )
        found = [parse_logprobs(answer.json(), [length], -1)[0] for answer, length in zip(alone, lengths, strict=False)]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
