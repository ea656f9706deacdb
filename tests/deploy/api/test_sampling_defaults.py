"""Requests that do not say how they are sampled: as generation_config.json has it, through the makers' own clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake_engine import FakeEngine, say, serving
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.api.job.defaults import read_defaults
from deploy.config.api import ApiConfig
from deploy.config.application import ServeConfig
from deploy.serve.replica import sampling_defaults
from workers.protocol.front import EngineFault

R1 = {"temperature": 0.6, "top_p": 0.95}
ALL = {**R1, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(say(tiny().encode("fox", add_special_tokens=False)))


@pytest.fixture(scope="module", params=["as its maker ships it", "as OpenAI has it"])
def port(engine: FakeEngine, request: pytest.FixtureRequest) -> Iterator[tuple[int, dict[str, float]]]:
    defaults = ALL if "maker" in request.param else {}
    app = create_app(engine, tiny(), ApiConfig(served_model_names=("tiny",)), sampling_defaults=defaults)
    with serving(app) as port:
        yield port, defaults


def sampled(engine: FakeEngine) -> dict[str, float]:
    return {name: getattr(engine.requests[-1].sampling, name) for name in ALL}


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize("given", [{}, {"temperature": 0.2}, {"top_p": 1.0, "top_k": 0}, {"temperature": None}, ALL])
def test_what_a_request_leaves_out_is_the_models(engine: FakeEngine, port: Any, given: dict[str, Any]) -> None:
    number, defaults = port
    said = {name: value for name, value in given.items() if value is not None}
    expected = {**PLAIN, **defaults, **said}
    own = {name: value for name, value in given.items() if name in ("temperature", "top_p")}
    more = {name: value for name, value in given.items() if name not in own}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{number}/v1", api_key="none") as client:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=more, **own)
        assert sampled(engine) == expected
        client.completions.create(model="tiny", prompt="x", extra_body=more, **own)
        assert sampled(engine) == expected
        if not {"min_p", "repetition_penalty", "top_k"} & given.keys():
            answer = client.responses.create(model="tiny", input="x", **own)
            assert sampled(engine) == expected
            assert (answer.temperature, answer.top_p) == (expected["temperature"], expected["top_p"])
    if not {"min_p", "repetition_penalty"} & given.keys() and given.get("temperature", 1) is not None:
        with anthropic.Anthropic(base_url=f"http://127.0.0.1:{number}", api_key="none") as other:
            other.messages.create(model="tiny", max_tokens=8, messages=MESSAGES, extra_body=given)
        assert sampled(engine) == expected


def test_the_list_of_models_says_which_hold(port: Any) -> None:
    number, defaults = port
    found = httpx.get(f"http://127.0.0.1:{number}/v1/models").json()
    assert [card["sampling_defaults"] for card in found["data"]] == [defaults]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}, R1),
        ({"temperature": None, "top_k": None, "top_p": 1.0}, {"top_p": 1.0}),
        ({"temperature": 0}, {"temperature": 0}),
        (ALL, ALL),
    ],
)
def test_a_folder_says_it_in_its_generation_config(
    tmp_path: Path, given: dict[str, Any] | None, found: dict[str, Any]
) -> None:
    if given is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(given))
    (tmp_path / "config.json").write_text("{}")
    assert read_defaults(tmp_path) == found
    config = ServeConfig.model_validate({"engine": {"model": str(tmp_path)}})
    assert sampling_defaults(config) == found
    without = {"engine": {"model": str(tmp_path)}, "api": {"generation_config": "none"}}
    assert sampling_defaults(ServeConfig.model_validate(without)) == {}


@pytest.mark.parametrize("given", ['{"temperature": 5}', '{"top_p": "high"}', '{"top_k": 0.5}', "[]", "{"])
def test_values_that_no_request_could_have_end_the_start(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(given)
    config = ServeConfig.model_validate({"engine": {"model": str(tmp_path)}})
    with pytest.raises(EngineFault, match=r"generation_config\.json") as found:
        sampling_defaults(config)
    assert found.value.lasting
