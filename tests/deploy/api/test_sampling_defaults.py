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
from deploy.api.job.defaults import not_taken, read_defaults
from deploy.config.api import ApiConfig
from deploy.config.application import ServeConfig
from deploy.serve.replica import sampling_defaults, what_is_not_taken
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
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 9}, {"temperature": 0}),
        ({"max_new_tokens": 20, "min_new_tokens": 3}, {"max_tokens": 20, "min_tokens": 3}),
        ({"stop_strings": "END"}, {"stop": ["END"]}),
        ({"stop_strings": ["A", "B"]}, {"stop": ["A", "B"]}),
        ({"suppress_tokens": [5, 6], "bad_words_ids": [[6], [7], [8, 9]]}, {"logit_bias": dict.fromkeys("567", -100)}),
        ({"stop_strings": ["", "A"]}, {"stop": ["A"]}),
        ({"stop_strings": [""]}, {}),
        ({"top_k": 50.0, "max_new_tokens": 1e4}, {"top_k": 50, "max_tokens": 10000}),
        ({"suppress_tokens": [], "bad_words_ids": None, "stop_strings": []}, {}),
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


def test_what_is_not_taken_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = ServeConfig.model_validate({"engine": {"model": str(tmp_path)}})
    assert what_is_not_taken(config) is None
    plain = {**ALL, "do_sample": True, "eos_token_id": [1], "pad_token_id": 0, "transformers_version": "4.52.0",
             "_from_model_config": True, "typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0,
             "cache_implementation": "static", "max_new_tokens": 9, "suppress_tokens": [1],
             "penalty_alpha": None}  # fmt: skip
    (tmp_path / "generation_config.json").write_text(json.dumps(plain))
    assert not_taken(tmp_path) == []
    odd = {"typical_p": 0.9, "num_beams": 4, "no_repeat_ngram_size": 3, "max_length": 131072, "bad_words_ids": [[1, 2]]}
    (tmp_path / "generation_config.json").write_text(json.dumps({**plain, **odd}))
    said = what_is_not_taken(config)
    assert said is not None
    assert all(name in said for name in odd)
    assert "temperature" not in said
    without = {"engine": {"model": str(tmp_path)}, "api": {"generation_config": "none"}}
    assert what_is_not_taken(ServeConfig.model_validate(without)) is None


MORE = {"max_tokens": 3, "min_tokens": 2, "stop": ["fox"], "logit_bias": {"7": -100.0, "100000": -100.0}}


def test_lengths_ends_and_tokens_that_never_come(engine: FakeEngine) -> None:
    """What a request says has the last word, but for tokens that the maker never wants; none is made impossible."""
    app = create_app(engine, tiny(), ApiConfig(served_model_names=("tiny",)), sampling_defaults=MORE)
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/v1"

        def ask(path: str, **more: Any) -> Any:
            body = {"prompt": "x"} if path == "completions" else {"input": "x"} if path == "responses" else {}
            body = body or {"messages": MESSAGES}
            answer = httpx.post(f"{url}/{path}", json={"model": "tiny", **body, **more})
            assert answer.status_code == 200, answer.text
            return engine.requests[-1].sampling

        for path in ("completions", "chat/completions", "responses"):
            found = ask(path)
            assert (found.max_tokens, found.min_tokens, found.logit_bias) == (3, 2, ((7, -100.0),))
        assert ask("messages", max_tokens=1).min_tokens == 1
        for name in ("max_tokens", "max_completion_tokens"):
            found = ask("chat/completions", **{name: 1})
            assert (found.max_tokens, found.min_tokens) == (1, 1)
        found = ask("completions", max_tokens=9, min_tokens=0, logit_bias={"7": 5, "8": 1})
        assert (found.max_tokens, found.min_tokens, found.logit_bias) == (9, 0, ((7, -100.0), (8, 1.0)))
        long = " ".join(["x"] * 120)
        assert ask("completions", prompt=long).max_tokens == 3
        for given, text in (({}, ""), ({"stop": "dog"}, "fox")):
            body = {"model": "tiny", "prompt": "x", "min_tokens": 0, **given}
            choice = httpx.post(f"{url}/completions", json=body).json()["choices"][0]
            assert (choice["text"].strip(), choice["finish_reason"]) == (text, "stop")


def test_the_least_that_a_folder_wants_is_no_more_than_there_can_be(engine: FakeEngine) -> None:
    """Nobody asked for it: a completion without max_tokens ends after 16."""
    app = create_app(engine, tiny(), ApiConfig(served_model_names=("tiny",)), sampling_defaults={"min_tokens": 32})
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        for body, least in (({}, 16), ({"max_tokens": 40}, 32), ({"min_tokens": 5}, 5)):
            answer = httpx.post(url, json={"model": "tiny", "prompt": "x", **body})
            assert answer.status_code == 200, answer.text
            assert engine.requests[-1].sampling.min_tokens == least
        assert httpx.post(url, json={"model": "tiny", "prompt": "x", "min_tokens": 17}).status_code == 400


def test_limits_are_for_what_a_request_asks(engine: FakeEngine) -> None:
    """What the folder has beside it counts neither against them nor is it dropped."""
    defaults = {"stop": [f"never {number}" for number in range(20)] + ["x" * 600, "fox"]}
    defaults["logit_bias"] = {str(token): -100.0 for token in range(100)}
    app = create_app(engine, tiny(), ApiConfig(served_model_names=("tiny",)), sampling_defaults=defaults)
    own = {str(token): 1.0 for token in range(80, 128)}
    with serving(app) as port:
        url = f"http://127.0.0.1:{port}/v1"
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):

            def ask(path: str = path, body: dict[str, Any] = body, **more: Any) -> httpx.Response:
                return httpx.post(f"{url}/{path}", json={"model": "tiny", **body, **more})

            assert ask().json()["choices"][0]["finish_reason"] == "stop"
            assert ask(logit_bias=own).status_code == 200
            found = dict(engine.requests[-1].sampling.logit_bias)
            assert [found[token] for token in (0, 99, 100, 127)] == [-100.0, -100.0, 1.0, 1.0]
            assert ask(stop=["a"] * 16).status_code == 200
            refused = ask(stop=["a"] * 17)
            assert refused.status_code == 400
            assert "at most 16 strings are allowed, not 17" in refused.text


def test_an_error_names_the_field_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(ValueError, match=r"generation_config\.json: max_new_tokens: "):
        read_defaults(tmp_path)


@pytest.mark.parametrize(
    "given",
    ['{"temperature": 5}', '{"top_p": "high"}', '{"top_k": 0.5}', "[]", "{", '{"max_new_tokens": "9"}',
     '{"suppress_tokens": [-1]}', '{"bad_words_ids": [["x"]]}'],
)  # fmt: skip
def test_values_that_no_request_could_have_end_the_start(tmp_path: Path, given: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(given)
    config = ServeConfig.model_validate({"engine": {"model": str(tmp_path)}})
    with pytest.raises(EngineFault, match=r"generation_config\.json") as found:
        sampling_defaults(config)
    assert found.value.lasting
