"""Whose cached pages a request may find, at every endpoint that generates."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any

import httpx
import pytest
from demo_server import demo_engine, served
from fake_engine import FakeEngine, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.job.bodies import MOST_CACHE_SALT
from deploy.config.api import ApiConfig
from deploy.config.cache_salts import CacheSalts
from deploy.config.keys import ApiKey
from deploy.routing.request_features import FeatureReader
from workers.protocol.request import NO_ROOT, Prompt, pack_keys, salted_root, unpack_keys

ROOT = b"sixteen bytes..."
KEYS = (ApiKey(key="sk-one", name="one"), ApiKey(key="sk-two", name="two"), "sk-plain")
TEXT = "the quick brown fox jumps over the lazy dog. " * 20
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 5},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "system": "Be brief."},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 5},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_routers_make_the_keys_that_an_engine_makes_of_what_the_front_asks(path: str) -> None:
    engine, config = FakeEngine(say(tiny().encode("the fox"))), ApiConfig(api_keys=KEYS)
    salts = CacheSalts.of_settings(config)
    reader, seen = FeatureReader(tiny(), salts=salts), set()
    with serving(create_app(engine, tiny(), config)) as port, httpx.Client() as http:
        for secret in ("sk-one", "sk-two", "sk-plain"):
            for asked in (None, "a", "b"):
                body = json.dumps({"model": "tiny", **ENDPOINTS[path], "cache_salt": asked}).encode()
                headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
                answer = http.post(f"http://127.0.0.1:{port}{path}", content=body, headers=headers)
                assert answer.status_code == 200, answer.text
                request = engine.requests[-1]
                name = salts.name_of(sha256(secret.encode()).hexdigest())
                features = await reader.read(body, key=name)
                made = Prompt.of(request.prompt).keys(salted_root(ROOT, request.salt))
                assert features.keys(ROOT) == unpack_keys(pack_keys(made))
                assert len(made) > 2
                seen.add((request.salt, *features.keys(ROOT)))
    assert len(seen) == 9


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("", "at least 1 character"),
        ("x" * (MOST_CACHE_SALT + 1), f"at most {MOST_CACHE_SALT} characters"),
        (7, "string"),
    ],
)
def test_a_salt_that_is_none_is_refused_by_name(path: str, wrong: object, why: str) -> None:
    engine = FakeEngine(say(tiny().encode("the fox")))
    with serving(create_app(engine, tiny())) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        answer = http.post(path, json={"model": "tiny", **ENDPOINTS[path], "cache_salt": wrong})
        longest = http.post(path, json={"model": "tiny", **ENDPOINTS[path], "cache_salt": "ü" * MOST_CACHE_SALT})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "cache_salt" in message
    assert why in message
    assert longest.status_code == 200
    assert len(engine.requests) == 1


async def test_of_a_body_whose_salt_was_cut_off_no_page_is_promised_that_it_would_not_find() -> None:
    salts = CacheSalts.of_settings(ApiConfig(api_keys=KEYS))
    reader = FeatureReader(tiny(), salts=salts)
    body = json.dumps({"model": "tiny", "prompt": TEXT, "cache_salt": "a"}).encode()
    whole = await reader.read(body, key="one")
    cut = await reader.read(body[:-20], len(body), "one")
    assert set(cut.keys(NO_ROOT)).isdisjoint(whole.keys(NO_ROOT))
    first = json.dumps({"model": "tiny", "cache_salt": "a", "prompt": TEXT}).encode()
    cut = await reader.read(first[:-20], len(first), "one")
    assert len(cut.keys(NO_ROOT)) > 2
    assert whole.keys(NO_ROOT)[: len(cut.keys(NO_ROOT))] == cut.keys(NO_ROOT)


async def test_no_api_key_sees_what_another_one_has_cached() -> None:
    """By what answers say of cached tokens, over HTTP, with the demo model and its real scheduler."""
    prompt = list(range(5, 205))
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(demo_engine(1))
        url = await stack.enter_async_context(served(engine, api_keys=KEYS))
        shared = await stack.enter_async_context(served(engine, api_keys=KEYS, cache_isolation="shared"))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))

        async def cached(secret: str, where: str = url, **more: str) -> int:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1, **more}
            headers = {"authorization": f"Bearer {secret}"}
            answer = await http.post(f"{where}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached(secret) for secret in ("sk-one", "sk-two", "sk-plain")] == [0, 0, 0]
        assert [await cached(secret) for secret in ("sk-one", "sk-two", "sk-plain")] == [192, 192, 192]
        # A salt of the body's own parts requests of one key, and joins those of no others.
        salted = [await cached(secret, cache_salt="mine") for secret in ("sk-one", "sk-two", "sk-one", "sk-two")]
        assert salted == [0, 0, 192, 192]
        assert await cached("sk-one", cache_salt="another") == 0
        assert await cached("sk-one") == 192
        # Where the settings share, all keys have one cache.
        assert [await cached(secret, shared) for secret in ("sk-one", "sk-two", "sk-plain")] == [0, 192, 192]
        assert [await cached(secret, shared, cache_salt="ours") for secret in ("sk-one", "sk-two")] == [0, 192]
