"""API keys with names: their limits, their place among the others, and what is told of them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from demo_server import demo_engine, served
from fake_engine import FakeEngine, Refused, out, say, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.limits.admission import CONTINUED, Pace, whole_seconds
from deploy.api.limits.buckets import Bucket, duration
from deploy.api.limits.keys import Key, KeyRing, OverLimit
from deploy.config.api import ApiConfig
from deploy.config.application import LogConfig
from deploy.config.keys import ApiKey
from deploy.observability.logs import LOGGERS, configure
from workers.protocol.messages import EngineStats

IDS = tiny().encode("the fox", add_special_tokens=False)
PROMPT = tiny().encode("the quick brown fox", add_special_tokens=False)
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 50}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
ENDPOINTS = {
    "/v1/completions": BODY,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 5},
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def served_to(
    *keys: ApiKey | str, engine: FakeEngine | None = None, clock: Callable[[], float] | None = None, **settings: Any
) -> Iterator[Callable[..., httpx.Response]]:
    """Asks an endpoint with a key, by default for a completion."""
    config = ApiConfig(api_keys=keys, **settings)
    app = create_app(engine or FakeEngine(say(IDS)), tiny(), config, keys=KeyRing(keys, clock or Clock()))
    with serving(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:

        def ask(key: str, path: str = "/v1/completions", **changes: Any) -> httpx.Response:
            return http.post(path, json={**ENDPOINTS[path], **changes}, headers={"authorization": f"Bearer {key}"})

        ask.http = http  # type: ignore[attr-defined]
        yield ask


def named(name: str, **settings: Any) -> ApiKey:
    return ApiKey(key=f"secret-{name}", name=name, **settings)


@settings(deadline=None, derandomize=True)
@given(
    per_minute=st.integers(1, 100_000),
    amounts=st.lists(st.tuples(st.floats(0, 500), st.integers(1, 200_000)), min_size=1, max_size=30),
)
def test_there_is_room_exactly_when_a_bucket_says(per_minute: int, amounts: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken, begin = 0.0, clock.now
    for pause, amount in amounts:
        clock.now += pause
        wait = bucket.wait(amount)
        if wait:
            clock.now += wait * 0.999
            assert bucket.wait(amount) > 0 or wait * per_minute < 0.1
            clock.now += wait * 0.001
            assert bucket.wait(amount) == 0
        bucket.take(amount)
        taken += min(amount, per_minute)  # more than a minute's worth is let in by a full bucket, and paid off later
        assert taken <= per_minute * (1 + (clock.now - begin) / 60) + 1
    clock.now += bucket.full_in
    assert bucket.room == pytest.approx(per_minute)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0195, "20ms"), (1, "1s"), (1.44, "1.5s"), (59.96, "1m0s"), (60, "1m0s"), (361.2, "6m1.2s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_pace_foretells_when_sequences_end() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.wait(5) == 0
    for _ in range(200):
        pace.ended(1)
        clock.now += 2
    assert pace.wait(5) == pytest.approx(10)
    assert pace.wait(500) == 60
    clock.now += 64 * 2
    assert pace.wait(5) == pytest.approx(20), "it has slowed down"


def test_whole_seconds_are_never_too_few() -> None:
    assert [whole_seconds(s) for s in (0.01, 1.0, 1.0000001, 1.5, 60.2)] == [1, 1, 1, 2, 61]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_over_a_limit_every_endpoint_says_so_in_its_own_shape_and_when_to_come_back(path: str) -> None:
    clock = Clock()
    with served_to(named("app", requests_per_minute=2), named("other"), clock=clock) as ask:
        for left in (1, 0):
            answer = ask("secret-app", path)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert "x-ratelimit-limit-tokens" not in answer.headers
        clock.now += 0.5
        refused = ask("secret-app", path)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "30"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        error = refused.json()["error"]
        assert error["type"] == "rate_limit_error"
        assert error["code"] == "rate_limit_exceeded"
        assert refused.json().get("type") == ("error" if path == "/v1/messages" else None)
        assert "the API key app may take 2 requests a minute: try again in 30 s" in error["message"]
        assert ask("secret-other", path).status_code == 200, "it has limits of its own, none"
        clock.now += 28.9
        assert ask("secret-app", path).status_code == 429, "it is not a second too long"
        clock.now += 0.6
        assert ask("secret-app", path).status_code == 200, "nor does a refused request count"
        assert ask("secret-app", path).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_generated_tokens_count(stream: bool) -> None:
    clock, used = Clock(), len(PROMPT) + len(IDS) + 1
    with served_to(named("app", tokens_per_minute=60), clock=clock) as ask:
        answer = ask("secret-app", stream=stream)
        assert answer.status_code == 200
        # Those that were generated behind the status line of a stream are known to the next answer.
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 60 - len(PROMPT)
        clock.now += 3
        next_one = ask("secret-app", n=2)
        assert int(next_one.headers["x-ratelimit-remaining-tokens"]) == 60 - used + 3 - len(PROMPT)
        assert next_one.status_code == 200
        left = 60 - used + 3 - len(PROMPT) - 2 * (len(IDS) + 1)
        refused = ask("secret-app", prompt=[5] * 55)
        wait = math.ceil(55 - left)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, str(wait))
        clock.now += wait - 1
        assert ask("secret-app", prompt=[5] * 55).headers["retry-after"] == "1"
        clock.now += 1
        assert ask("secret-app", prompt=[5] * 55, max_tokens=1).status_code == 200
        # More than a minute's worth has room once all of it is there, and is paid off afterwards.
        refused = ask("secret-app", prompt=[5] * 100, max_tokens=1)
        clock.now += int(refused.headers["retry-after"])
        assert ask("secret-app", prompt=[5] * 100, max_tokens=1).status_code == 200
        assert int(ask("secret-app", prompt=[5]).headers["retry-after"]) == 100 + 1 - 60 + 1


def test_tokens_of_running_streams_count_as_they_come() -> None:
    engine = FakeEngine(lambda request: [out(*[30] * 40), 60.0])
    with (
        served_to(named("app", tokens_per_minute=50), engine=engine) as ask,
        ask.http.stream(  # type: ignore[attr-defined]
            "POST",
            "/v1/completions",
            json={**BODY, "stream": True, "max_tokens": 100},
            headers={"x-api-key": "secret-app"},
        ) as running,
    ):
        assert running.status_code == 200, running.read()
        refused = ask("secret-app", prompt=[5] * 10)
        assert refused.status_code == 429
        # It has been running for no time at all, so the 60 that it may still generate may come at once.
        lack = len(PROMPT) + 40 + 60 + 10 - 50
        assert refused.headers["retry-after"] == str(math.ceil(lack * 60 / 50))


async def test_a_request_that_goes_on_is_let_in_and_pays_for_what_is_new_alone() -> None:
    """It was let in, and paid for its prompt and what was generated, where it began."""
    engine = FakeEngine(say(IDS))
    engine.stats = EngineStats(slots=1, queue_limit=0)
    limits = named("app", requests_per_minute=60, tokens_per_minute=60, max_sequences=1)
    keys = KeyRing((limits,), lambda: 1000.0)
    app = create_app(engine, tiny(), ApiConfig(api_keys=(limits,)), keys=keys)
    key = keys.find(["secret-app"])
    assert key is not None

    def room() -> tuple[int, int]:
        headers = dict(key.headers())
        return tuple(int(headers[b"x-ratelimit-remaining-" + of]) for of in (b"requests", b"tokens"))

    async def ask(done: int | None, **fields: Any) -> int:
        CONTINUED.set(done)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            headers = {"x-api-key": "secret-app"}
            return (await client.post("/v1/completions", json={**BODY, **fields}, headers=headers)).status_code

    assert await ask(None) == 200
    before = room()
    assert before == (59, 60 - len(PROMPT) - len(IDS) - 1)
    assert await ask(2) == 200
    assert room() == (59, before[1] - (len(IDS) + 1 - 2))
    assert await ask(None, n=2) == 400
    assert await ask(0, prompt=["a"] * 300) == 400, "what a replica never takes is refused all the same"
    assert await ask(None, prompt=[5] * 60, max_tokens=1) == 429
    assert await ask(1, prompt=[5] * 60, max_tokens=1) == 200


def test_sequences_at_a_time() -> None:
    engine = FakeEngine(lambda request: [out(30), 60.0] if request.sampling.max_tokens == 99 else say(IDS)(request))
    with (
        served_to(named("app", max_sequences=3), named("other"), engine=engine, retry_after_s=7) as ask,
        ask.http.stream(  # type: ignore[attr-defined]
            "POST",
            "/v1/completions",
            json={**BODY, "stream": True, "max_tokens": 99, "n": 2},
            headers={"x-api-key": "secret-app"},
        ) as running,
    ):
        assert running.status_code == 200, running.read()
        assert ask("secret-app").status_code == 200
        refused = ask("secret-app", n=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert "may have 3 sequences at a time" in refused.json()["error"]["message"]
        assert ask("secret-other", n=2).status_code == 200
        assert ask("secret-app", n=4).status_code == 400, "they never fit"


def test_requests_are_queued_under_the_name_and_the_rules_of_their_key() -> None:
    """A request may come after others of its key, and never before more urgent keys."""
    engine = FakeEngine(say(IDS))
    with served_to(named("app", priority=3, weight=2.5), "plain", engine=engine) as ask:
        for key, priority in (("secret-app", 0), ("secret-app", -9), ("secret-app", 4), ("plain", -1), ("plain", 1)):
            assert ask(key, priority=priority).status_code == 200
    assert [(request.priority, request.key, request.weight) for request in engine.requests] == [
        (3, "app", 2.5),
        (3, "app", 2.5),
        (7, "app", 2.5),
        (0, "default", 1.0),
        (1, "default", 1.0),
    ]


def test_keys_without_names_are_what_they_were() -> None:
    engine = FakeEngine(say(IDS))
    with served_to("one", "two", engine=engine) as ask:
        for key in ("one", "two"):
            answer = ask(key, priority=-5)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert ask("three").status_code == 401
        assert "latentserve_key_requests_total{" not in ask.http.get("/metrics").text  # type: ignore[attr-defined]
    assert {(request.priority, request.key, request.weight) for request in engine.requests} == {(-5, "", 1.0)}


def test_metrics_and_logs_have_names_and_never_keys() -> None:
    stream = io.StringIO()
    loggers = [logging.getLogger(name) for name in (*LOGGERS, "latentserve.access")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    configure(LogConfig(access=True, level="DEBUG"), stream)
    engine = FakeEngine(say(IDS))
    try:
        with served_to(named("app", requests_per_minute=2), engine=engine) as ask:
            ask("secret-app")
            engine.script = lambda request: [Refused("full", overloaded=True)]
            ask("secret-app")
            ask("secret-app")
            ask("secret-wrong")
            text = ask.http.get("/metrics").text  # type: ignore[attr-defined]
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
    for line in (
        'latentserve_key_requests_total{key="app",reason="stop"} 1.0',
        'latentserve_key_requests_total{key="app",reason="refused"} 1.0',
        f'latentserve_key_prompt_tokens_total{{key="app"}} {2.0 * len(PROMPT)}',
        f'latentserve_key_generated_tokens_total{{key="app"}} {len(IDS) + 1.0}',
        'latentserve_key_limited_total{key="app",limit="requests"} 1.0',
        'latentserve_key_sequences{key="app"} 0.0',
        'latentserve_key_queue_seconds_count{key="app"} 1.0',
    ):
        assert line in text
    lines = [json.loads(line) for line in stream.getvalue().splitlines() if '"request"' in line]
    assert [line.get("key") for line in lines if line["route"] != "/metrics"] == ["app", "app", "app", None]
    assert "secret" not in text + stream.getvalue()


def test_a_full_front_lets_in_who_has_less_than_its_share() -> None:
    """The scheduler then takes a place from whoever has more."""
    engine = FakeEngine(lambda request: [out(30), 60.0] if request.sampling.max_tokens == 99 else say(IDS)(request))
    engine.stats = EngineStats(slots=2, queue_limit=4)
    with (
        served_to(named("loud"), named("quiet"), named("heavy", weight=0.1), engine=engine) as ask,
        ask.http.stream(  # type: ignore[attr-defined]
            "POST",
            "/v1/completions",
            json={**BODY, "stream": True, "max_tokens": 99, "n": 6},
            headers={"x-api-key": "secret-loud"},
        ) as running,
    ):
        assert running.status_code == 200, running.read()
        assert ask("secret-loud").json()["error"]["code"] == "server_overloaded"
        assert ask("secret-quiet", n=5).status_code == 200
        assert ask("secret-quiet", n=6).status_code == 429
        assert ask("secret-heavy").status_code == 429


@settings(deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), fronts=st.integers(1, 4), rpm=st.integers(10, 100), sequences=st.integers(1, 5))
def test_limits_hold_for_all_fronts_but_for_what_is_taken_between_two_reports(
    seed: int, fronts: int, rpm: int, sequences: int
) -> None:
    rng, clock = random.Random(seed), Clock()
    settings = named("app", requests_per_minute=rpm, max_sequences=sequences)
    rings = {str(number): KeyRing((settings,), clock) for number in range(fronts)}
    let_in, running = 0, []
    for second in range(150):
        for _ in range(rng.choice([0, 1, 10])):
            ring = rings[rng.choice([*rings])]
            key = ring.find(["secret-app"])
            assert isinstance(key, Key)
            try:
                key.enter()
                running.append((key, key.start(5, [Choiceless()])))  # type: ignore[list-item]
                let_in += 1
            except OverLimit:
                pass
        if second % 5 == 0:
            for key, meter in running:
                key.end(meter)
            running.clear()
        told = {name: ring.spent() for name, ring in rings.items()}
        for name, ring in rings.items():
            ring.hear(name, {other: spent for other, spent in told.items() if other != name}, dict.fromkeys(told, 0.0))
        clock.now += 1
        if second == 75:  # one is replaced: it learns what is left
            rings["new"] = rings.pop("0")
            rings["new"].__init__((settings,), clock)  # type: ignore[misc]
            running.clear()
            rings["new"].hear(
                "new", {other: spent for other, spent in told.items() if other not in ("0",)}, dict.fromkeys(told, 1.0)
            )
    # In the second before it first hears of it, each other front lets in what a bucket holds; and so does a lone one
    # that is replaced, from whom nobody has heard.
    assert let_in <= rpm * (1 + 150 / 60) + (fronts - 1) * 10 * 3 + (rpm if fronts == 1 else 10) + fronts * 10


class Choiceless:
    generated, limit, finish = 0, 50, None


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(
        "- plain\n- {key: sesame, name: app, tokens_per_minute: 1000}\n- {key: secret, name: batch, priority: 5}\n"
    )
    config = ApiConfig(api_keys=("first",), api_keys_file=file)
    assert [key if isinstance(key, str) else key.name for key in config.api_keys] == ["first", "plain", "app", "batch"]
    again = ApiConfig.model_validate(config.model_dump())
    assert again == config, "settings that travel to another process are read once more"
    assert "sesame" not in repr(config)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("[{key: sesame, name: a}, {key: secret, name: a}]", "two API keys have the name a"),
        ("[{key: sesame, name: a}, sesame]", "an API key is listed twice"),
        ("[{key: sesame, name: default}, plain]", "the name default is that of API keys without a name"),
        ("[{key: sesame, name: 'a b'}]", "String should match pattern"),
        ("[{key: sesame, name: a, weight: 0}]", "greater than or equal to 0.001"),
        ("[{key: sesame, name: a, tokens: 5}]", "Extra inputs are not permitted"),
        ("[{key: sesame}]", "Field required"),
        ("{key: sesame, name: a}", "must hold a list of keys"),
        ("[{key: sesame", "is not YAML"),
        ("['']", "api_keys must not hold an empty string"),
    ],
)
def test_mistakes_in_keys_are_told_without_keys(tmp_path: Path, keys: str, said: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(keys)
    with pytest.raises(ValidationError) as caught:
        ApiConfig(api_keys_file=file)
    assert said in str(caught.value)
    assert "sesame" not in str(caught.value)


@pytest.mark.long
async def test_over_http_a_key_that_floods_starves_no_other() -> None:
    """The demo model with two slots: sixty requests of one key, more than may wait, are asked for before another key
    asks for one after the other. By arrival each of those would come behind all of the sixty."""
    keys = (named("loud"), named("quiet"))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(demo_engine(1, max_rows=2, queue_limit=40))
        url = await stack.enter_async_context(served(engine, api_keys=keys))
        loud, quiet = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=f"secret-{name}", max_retries=0, timeout=60)
            )
            for name in ("loud", "quiet")
        ]
        done: list[str] = []

        async def ask(client: openai.AsyncOpenAI, name: str, number: int) -> None:
            try:
                await client.completions.create(
                    model="demo",
                    prompt=f"def f{number}(",
                    max_tokens=24,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            except openai.RateLimitError as error:
                done.append("refused" if "retry-after" in error.response.headers else "refused for good")
            else:
                done.append(name)

        flood = [asyncio.create_task(ask(loud, "loud", number)) for number in range(60)]
        while len(done) < 60 - 42 + 2:  # some were refused, and two answered
            await asyncio.sleep(0.01)
        before = done.count("loud")
        for number in range(4):
            await ask(quiet, "quiet", number)
        served_meanwhile = done.count("loud") - before
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert done.count("quiet") == 4
    assert "refused for good" not in done
    # While one is answered in one slot, the other serves the loud key, and each may wait for a slot once: on a quiet
    # machine that makes eight.
    assert served_meanwhile < 30
