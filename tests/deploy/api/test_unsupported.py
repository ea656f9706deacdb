"""Fields that change the answer and are not supported are refused by name; those that ask for nothing are not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from deploy.api.http.errors import ApiError
from deploy.api.job.bodies import CompletionBody
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.job import parse_generation
from deploy.api.job.unsupported import ELSEWHERE, UNSUPPORTED, refused_at, reject_unsupported
from deploy.api.openai.routes import parse_tokenize

ASKING: list[tuple[str, Any]] = [
    ("web_search_options", {}),
    ("web_search_options", {"search_context_size": "low"}),
    ("function_call", "auto"),
    ("function_call", {"name": "f"}),
    ("tool_choice", "required"),
    ("tools", [{"type": "function"}]),
    ("reasoning_effort", "high"),
    ("reasoning_effort", "none"),
    ("verbosity", "loud"),
    ("verbosity", 1),
    ("thinking", {"type": "enabled"}),
    ("thinking", False),
    ("reasoning", {"effort": "low"}),
    ("enable_thinking", False),
    ("length_penalty", 0.5),
    ("length_penalty", 0),
    ("length_penalty", True),
    ("typical_p", 0.9),
    ("typical_p", 0),
    ("no_repeat_ngram_size", 3),
    ("no_repeat_ngram_size", "3"),
    ("dry_multiplier", 0.8),
    ("best_of", 2),
    ("do_sample", False),
    ("mirostat", 2),
    ("xtc_probability", 0.5),
    ("top_n_sigma", 1.5),
    ("repeat_penalty", 1.1),
    ("sampling_seed", 3),
    ("min_new_tokens", 2),
    ("max_new_tokens", 5),
    ("num_return_sequences", 2),
    ("token_ids_logprob", [1]),
    ("num_predict", 5),
    ("options", {"temperature": 0}),
    ("format", "json"),
    ("response_schema", {"type": "boolean"}),
    ("stopping_strings", ["x"]),
    ("repeat_last_n", 64),
    ("guidance_scale", 2.0),
    ("include_reasoning", False),
    ("think", True),
    ("add_bos_token", False),
    ("search_parameters", {"mode": "on"}),
    ("lora_adapters", [{"name": "x"}]),
    ("extra_body", {"top_k": 3}),
    ("nvext", {"guided_json": {}}),
    ("generation_config", {"temperature": 0}),
    ("chat_template_args", {"enable_thinking": False}),
    ("thinking_config", {"thinkingBudget": 0}),
    ("thinking_budget_tokens", 0),
    ("reasoning_budget", 0),
    ("guided_decoding", {"json": {}}),
    ("guided_whitespace_pattern", " "),
    ("json_mode", True),
    ("typ_p", 0.9),
    ("nsigma", 1.5),
    ("repetition_penalty_range", 64),
    ("min_completion_tokens", 3),
    ("stop_words", ["x"]),
    ("eos_token_id", 0),
    ("temp", 0),
    ("max_time", 1.5),
]
HARMLESS: list[tuple[str, Any]] = [
    ("num_predict", -1),
    ("extra_body", {}),
    ("typ_p", 1.0),
    ("top_nsigma", -1),
    ("reasoning_budget", -1),
    ("max_time", 0),
    ("include_reasoning", True),
    ("separate_reasoning", True),
    ("guidance_scale", 1.0),
    ("search_parameters", {"mode": "off"}),
    ("verbosity", "low"),
    ("verbosity", "medium"),
    ("verbosity", "high"),
    ("tools", []),
    ("tool_choice", "auto"),
    ("tool_choice", "none"),
    ("function_call", "none"),
    ("length_penalty", 1),
    ("length_penalty", 1.0),
    ("typical_p", 1.0),
    ("no_repeat_ngram_size", 0),
    ("dry_multiplier", 0.0),
    ("modalities", ["text"]),
    ("best_of", 1),
    ("use_beam_search", False),
    ("do_sample", True),
    ("early_stopping", False),
    ("suffix", ""),
    ("nobody_knows", {"this": "field"}),
]
NOTHING_OF_THE_ANSWER = {
    "metadata",
    "parallel_tool_calls",  # of tools, which are refused
    "prediction",  # makes the same answer come sooner
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}


@pytest.mark.parametrize(("name", "value"), ASKING)
def test_what_asks_for_something_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=name) as found:
        reject_unsupported({"model": "m", name: value}, "completions")
    assert (found.value.status, found.value.param, found.value.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_what_asks_for_nothing_passes(name: str, value: Any) -> None:
    reject_unsupported({"model": "m", name: value}, "completions")


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_every_field_of_the_table_is_refused_unless_it_is_null(name: str) -> None:
    reject_unsupported({name: None}, "chat")
    with pytest.raises(ApiError, match=name) as found:
        reject_unsupported({name: ["something else"]}, "chat")
    assert found.value.message.endswith(" is not supported by this server")
    assert name not in ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()


@pytest.mark.parametrize("name", [*refused_at("completions", CompletionBody.model_fields)])
def test_completions_refuse_what_only_others_have(name: str) -> None:
    with pytest.raises(ApiError, match=name):
        parse_generation(orjson.dumps({"model": "m", "prompt": "x", name: ["something else"]}), CompletionBody)


@pytest.mark.parametrize("name", [*refused_at("chat", ChatBody.model_fields)])
def test_chats_refuse_what_only_others_have(name: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ApiError, match=name):
        parse_generation(orjson.dumps({"model": "m", "messages": messages, name: ["something else"]}), ChatBody)


@pytest.mark.parametrize("params", [ChatParams, CompletionParams])
def test_no_field_of_openai_s_client_is_forgotten(params: type) -> None:
    body = ChatBody if params is ChatParams else CompletionBody
    known = body.model_fields.keys() | UNSUPPORTED.keys() | ELSEWHERE.keys() | NOTHING_OF_THE_ANSWER
    assert sorted(params.__annotations__.keys() - known) == []


def test_tokenizing_does_not_ignore_what_changes_the_prompt() -> None:
    with pytest.raises(ApiError, match="tools"):
        parse_tokenize(b'{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}')
