"""The table of fields that change the answer and that an endpoint does not have, each refused there by name.

A field that the body of an endpoint has is done there. Unknown fields are ignored, as clients expect. One of these must
not be: its client would take the answer for what it had asked for. The names are those of OpenAI, Anthropic, vLLM,
SGLang, Text Generation Inference, llama.cpp, Ollama and others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

from deploy.api.http.errors import unsupported
from deploy.text.effort import FIELDS

Endpoint = Literal["completions", "chat", "messages", "responses"]
_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})
VERBOSITIES: Final = ("low", "medium", "high")
"""Values of the field for the length of an answer: a hint that clients send whatever the model is, and that no template
knows."""

UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    # What is asked of the model.
    "suffix": ("text insertion (suffix)", _OFF),
    "functions": ("function calling (functions)", _OFF),
    "function_call": ("function calling (function_call)", (*_OFF, "none")),
    "web_search_options": ("web search (web_search_options)", ()),  # an empty object switches it on
    "enable_search": ("web search (enable_search)", _OFF),
    "search_parameters": ("web search (search_parameters)", (*_OFF, {"mode": "off"})),
    "plugins": ("plugins", _OFF),
    "images": ("images", _OFF),
    "input_ids": ("a prompt of token ids (input_ids); give them as the prompt of /v1/completions: this", _OFF),
    "negative_prompt": ("a negative prompt (negative_prompt)", _OFF),
    "safe_prompt": ("safe_prompt", _OFF),
    "prompt_mode": ("prompt_mode; use reasoning_effort: this", ()),
    "template": ("a chat template in the request (template)", _OFF),
    **{
        name: (f"{name}; give what it holds as fields of the body: this", _OFF)
        for name in (
            "extra_body",
            "options",
            "parameters",
            "sampling_params",
            "generation_config",
            "nvext",
            "vllm_xargs",
        )
    },
    "chat_template_args": ("chat_template_args; use chat_template_kwargs: this", _OFF),
    "modalities": ("a modality other than text (modalities)", (*_OFF, ["text"])),
    "audio": ("audio", _OFF),
    "moderation": ("moderation", _OFF),
    "documents": ("documents", _OFF),
    "chat_template": ("a chat template in the request (chat_template)", _OFF),
    "prompt_embeds": ("embeddings as a prompt (prompt_embeds)", _OFF),
    "input_embeds": ("embeddings as a prompt (input_embeds)", _OFF),
    "truncate_prompt_tokens": ("prompt truncation (truncate_prompt_tokens)", ()),
    "truncate": ("prompt truncation (truncate)", (False,)),
    "prompt_truncate_len": ("prompt truncation (prompt_truncate_len)", ()),
    "context_length_exceeded_behavior": ("prompt truncation (context_length_exceeded_behavior)", ("error",)),
    "lora_path": ("an adapter (lora_path)", _OFF),
    "lora_adapters": ("an adapter (lora_adapters)", _OFF),
    "adapter_id": ("an adapter (adapter_id)", _OFF),
    # How openly it speaks.
    "verbosity": ("a verbosity other than low, medium and high, which have no effect: this verbosity", VERBOSITIES),
    "think": ("think; use reasoning_effort: this", ()),
    "thinking_config": ("thinking_config; use reasoning_effort: this", _OFF),
    "max_thinking_tokens": ("max_thinking_tokens; use max_reasoning_tokens: this", ()),
    "thinking_budget_tokens": ("thinking_budget_tokens; use max_reasoning_tokens: this", (-1,)),
    "reasoning_budget": ("reasoning_budget; use max_reasoning_tokens: this", (-1,)),
    "include_reasoning": ("an answer without its reasoning (include_reasoning)", (True,)),
    "separate_reasoning": ("reasoning within the answer's text (separate_reasoning)", (True,)),
    "reasoning_format": ("reasoning_format", ("auto", "parsed", "deepseek")),
    # What the answer must look like.
    "response_schema": ("structured output (response_schema)", _OFF),
    "format": ("structured output (format)", _OFF),
    "stop_regex": ("stop_regex", _OFF),
    "watermark": ("watermark", _OFF),
    "json_schema": ("structured output (json_schema)", _OFF),
    "json_mode": ("structured output (json_mode)", _OFF),
    "guided_decoding": ("structured output (guided_decoding)", _OFF),
    "guided_json_object": ("structured output (guided_json_object)", _OFF),
    "guided_whitespace_pattern": ("structured output (guided_whitespace_pattern)", _OFF),
    "regex": ("structured output (regex)", _OFF),
    "ebnf": ("structured output (ebnf)", _OFF),
    "grammar": ("structured output (grammar)", _OFF),
    # Which sequences are searched.
    "best_of": ("best_of greater than 1", (*_OFF, 1)),
    "use_beam_search": ("beam search (use_beam_search)", _OFF),
    "num_beams": ("beam search (num_beams)", (*_OFF, 1)),
    "length_penalty": ("length_penalty", (1,)),
    "early_stopping": ("early_stopping", _OFF),
    "diversity_penalty": ("diversity_penalty", _OFF),
    "penalty_alpha": ("contrastive search (penalty_alpha)", _OFF),
    # How a token is sampled.
    "do_sample": ("do_sample; temperature 0 is greedy: this field", (True,)),
    **{name: (name, (1,)) for name in ("typical_p", "typ_p", "typical")},
    "guidance_scale": ("guidance_scale", (1,)),
    "repeat_last_n": ("a window of the penalties (repeat_last_n)", (-1,)),
    "repetition_penalty_range": ("a window of the penalties (repetition_penalty_range)", _OFF),
    "repetition_context_size": ("a window of the penalties (repetition_context_size)", (-1,)),
    "samplers": ("an order of filters (samplers)", _OFF),
    "tfs": ("tfs", (1,)),
    "tfs_z": ("tfs_z", (1,)),
    "top_a": ("top_a", _OFF),
    **{name: (name, (*_OFF, -1)) for name in ("top_n_sigma", "top_nsigma", "nsigma")},
    "skew": ("skew", _OFF),
    "epsilon_cutoff": ("epsilon_cutoff", _OFF),
    "eta_cutoff": ("eta_cutoff", _OFF),
    "smoothing_factor": ("smoothing_factor", _OFF),
    "dynatemp_range": ("dynatemp_range", _OFF),
    "xtc_probability": ("xtc_probability", _OFF),
    "mirostat": ("mirostat", _OFF),
    "mirostat_mode": ("mirostat_mode", _OFF),
    "dry_multiplier": ("dry_multiplier", _OFF),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", _OFF),
    "encoder_repetition_penalty": ("encoder_repetition_penalty", (1,)),
    "allowed_token_ids": ("allowed_token_ids", _OFF),
    "bad_words": ("bad_words", _OFF),
    "bad_words_ids": ("bad_words_ids", _OFF),
    "custom_token_bans": ("custom_token_bans", _OFF),
    "banned_tokens": ("banned_tokens", _OFF),
    "logits_processors": ("logits processors (logits_processors)", _OFF),
    "custom_logit_processor": ("logits processors (custom_logit_processor)", _OFF),
    # What other engines call fields that are here, too.
    "repeat_penalty": ("repeat_penalty; use repetition_penalty: this", (1,)),
    "sampling_seed": ("sampling_seed; use seed: this", ()),
    "random_seed": ("random_seed; use seed: this", ()),
    "min_new_tokens": ("min_new_tokens; use min_tokens: this", _OFF),
    "min_completion_tokens": ("min_completion_tokens; use min_tokens: this", _OFF),
    "min_length": ("min_length; use min_tokens: this", _OFF),
    "max_new_tokens": ("max_new_tokens; use the endpoint's own bound of tokens: this", ()),
    "max_length": ("max_length; use the endpoint's own bound of tokens: this", ()),
    "num_predict": ("num_predict; use the endpoint's own bound of tokens: this", (-1,)),
    **{
        name: (f"{name}; use stop: this", _OFF)
        for name in ("stopping_strings", "stop_strings", "stop_words", "stop_word", "stop_token")
    },
    "eos_token_id": ("eos_token_id; use stop_token_ids: this", _OFF[2:]),
    "ignore_eos_token": ("ignore_eos_token; use ignore_eos: this", _OFF),
    "temp": ("temp; use temperature: this", ()),
    "rep_pen": ("rep_pen; use repetition_penalty: this", (1,)),
    "max_time": ("a bound of the time (max_time)", _OFF),
    "t_max_predict_ms": ("a bound of the time (t_max_predict_ms)", (*_OFF, -1)),
    "no_stop_trim": ("no_stop_trim; use include_stop_str_in_output: this", _OFF),
    "ban_eos_token": ("ban_eos_token; use ignore_eos: this", _OFF),
    "add_bos_token": ("add_bos_token; use add_special_tokens: this", (True,)),
    "n_predict": ("n_predict; use the endpoint's own bound of tokens: this", (-1,)),
    "n_probs": ("n_probs; use logprobs: this", _OFF),
    "num_return_sequences": ("num_return_sequences; use n: this", (1,)),
    # What the answer tells besides.
    "token_ids_logprob": ("token_ids_logprob; use logprob_token_ids: this", _OFF),
    "return_hidden_states": ("return_hidden_states", _OFF),
}
"""Unsupported fields by name: what is not supported, and the values, besides null, that ask for nothing."""


_REASONING_HERE: Final = {"messages": "thinking", "responses": "reasoning"}
ELSEWHERE: Final[dict[str, tuple[str, tuple[Any, ...], Mapping[str, str]]]] = {
    # What is said to the model.
    "tools": ("tool calling (tools) outside of chats", _OFF, {}),
    "tool_choice": ("tool calling (tool_choice) outside of chats", (*_OFF, "none", "auto"), {}),
    "chat_template_kwargs": (
        "template variables (chat_template_kwargs) here",
        _OFF,
        {"messages": "thinking and output_config.effort"},
    ),
    "add_generation_prompt": ("a prompt that is left open (add_generation_prompt) here", (True,), {}),
    "continue_final_message": ("going on with a message (continue_final_message) here", _OFF, {}),
    "add_special_tokens": ("add_special_tokens here", _OFF, {}),
    "system": ("the field system", _OFF, {"chat": "a message of that role", "responses": "instructions"}),
    "instructions": ("the field instructions", _OFF, {"chat": "a system message", "messages": "system"}),
    "previous_response_id": ("a response to go on from (previous_response_id) here", _OFF, {}),
    # Whether and how hard it is to think.
    "max_reasoning_tokens": (
        "a bound of the reasoning (max_reasoning_tokens) here",
        (),
        {"messages": "thinking.budget_tokens"},
    ),
    **{name: (f"a say in the reasoning ({name}) here", (), _REASONING_HERE) for name in FIELDS},
    **{
        name: (
            f"a say in earlier reasoning ({name}) here",
            (),
            {"messages": "context_management", "responses": "chat_template_kwargs"},
        )
        for name in ("clear_thinking", "preserve_thinking")
    },
    "context_management": ("context_management", _OFF, {"chat": "thinking.keep"}),
    "output_config": ("output_config", _OFF, {"chat": "response_format", "responses": "text.format"}),
    "output_format": ("output_format", _OFF, {"chat": "response_format", "responses": "text.format"}),
    # What the answer must look like.
    "response_format": (
        "response_format",
        (*_OFF, {"type": "text"}),
        {"messages": "output_config.format", "responses": "text.format"},
    ),
    "text": ("the field text", (*_OFF, {"format": {"type": "text"}}), {"chat": "response_format"}),
    # Where it ends.
    "stop": ("the field stop", _OFF, {"messages": "stop_sequences"}),
    "stop_sequences": ("stop_sequences", _OFF, dict.fromkeys(("completions", "chat", "responses"), "stop")),
    "max_tokens": ("max_tokens", (), {"responses": "max_output_tokens"}),
    "max_completion_tokens": (
        "max_completion_tokens",
        (),
        {"completions": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"},
    ),
    "max_output_tokens": ("max_output_tokens", (), dict.fromkeys(("completions", "chat", "messages"), "max_tokens")),
    # How many answers there are, and what they tell besides.
    "n": ("more than one answer (n)", (1,), {}),
    "logprobs": ("log-probabilities (logprobs) here", (False,), {}),
    "top_logprobs": ("log-probabilities (top_logprobs) here", (0,), {}),
    "prompt_logprobs": (
        "log-probabilities of the prompt (prompt_logprobs) outside of /v1/completions",
        (False,),
        {},
    ),
    "echo": ("the prompt in the answer (echo) outside of /v1/completions", (False,), {}),
    "return_token_ids": ("token ids of the answer (return_token_ids) here", (False,), {}),
    "return_tokens_as_token_ids": ("ids in place of tokens (return_tokens_as_token_ids) here", (False,), {}),
    "logprob_token_ids": ("log-probabilities of chosen ids (logprob_token_ids) here", _OFF, {}),
}
"""Fields that some endpoints have, for the others: what is not supported, the values that ask for nothing, and by
endpoints the field that is to be used instead."""

AT: Final[Mapping[Endpoint, dict[str, tuple[str, tuple[Any, ...]]]]] = {
    "completions": {},
    "chat": {},
    "messages": {
        "container": ("a container", _OFF),
        "mcp_servers": ("a server of tools (mcp_servers)", _OFF),
        "compaction": ("a summary in place of the conversation (compaction)", _OFF),
        "fallbacks": ("another model in place of this one (fallbacks)", _OFF),
        "thread": ("a conversation that the server keeps (thread); send all of it without this field: this", _OFF),
        "parallel_tool_calls": (
            "parallel_tool_calls; use tool_choice.disable_parallel_tool_use: this",
            (True,),
        ),
    },
    "responses": {
        "background": ("an answer in the background (background)", _OFF),
        "conversation": (
            "a conversation that the server keeps (conversation); use previous_response_id: this",
            _OFF,
        ),
        "prompt": ("a prompt that the server keeps (prompt)", _OFF),
        "truncation": ("prompt truncation (truncation)", (*_OFF, "disabled")),
    },
}
"""Fields that only the API of one endpoint knows, and which are not supported there."""


ERROR_CODES: Final = {"thread": "thread_unsupported_request"}
"""Fields whose refusal has a name in Anthropic's API. Its client's tool runner asks for a thread by itself, and goes on
without one once it is told so."""
STREAM_OPTIONS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "include_obfuscation": (
        "padding of events (include_obfuscation) other than true and false, which have no effect:",
        (False, True),
    ),
    "chunk_include_usage": ("chunk_include_usage; use continuous_usage_stats: this", (False,)),
}
"""Fields within `stream_options`, as in `UNSUPPORTED`."""
_STREAM_OPTIONS_OF_CHATS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "continuous_usage_stats": ("a count of tokens in every event (continuous_usage_stats) here", (False,))
}
"""Those that only some endpoints have, for the others."""


def refused_at(endpoint: Endpoint, fields: Collection[str] = ()) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return the fields that an endpoint refuses whose body has `fields`, as in `UNSUPPORTED`."""
    elsewhere = {
        name: (f"{what}; use {instead[endpoint]}: this" if endpoint in instead else what, neutral)
        for name, (what, neutral, instead) in ELSEWHERE.items()
    }
    known = UNSUPPORTED | elsewhere | AT[endpoint]
    return {name: row for name, row in known.items() if name not in fields}


def reject_unsupported(raw: Mapping[str, Any], endpoint: Endpoint, fields: Collection[str] = ()) -> None:
    """400 for a field that asks for something this endpoint cannot do and that must not be ignored silently. `fields`:
    those that the body has, which are supported."""
    asked = {name: value for name, value in raw.items() if value is not None and name not in fields}
    known = refused_at(endpoint, fields) if asked else {}
    for name in (name for name in asked if name in known):
        _reject(asked[name], *known[name], name)
    if endpoint in ("messages", "responses"):
        reject_stream_options(raw.get("stream_options"), _STREAM_OPTIONS_OF_CHATS)


def reject_stream_options(value: Any, more: Mapping[str, tuple[str, tuple[Any, ...]]] | None = None) -> None:
    """400 for what a field `stream_options` asks for and no stream can do, nor any of the table `more`."""
    known = STREAM_OPTIONS | dict(more or {})
    for name in (name for name in known if isinstance(value, Mapping) and value.get(name) is not None):
        _reject(value[name], *known[name], "stream_options")


def _reject(value: Any, what: str, neutral: tuple[Any, ...], param: str) -> None:
    if not any(_same(value, harmless) for harmless in neutral):
        raise unsupported(what, param, ERROR_CODES.get(param))


def _same(value: Any, harmless: Any) -> bool:
    """Equal as JSON: to Python false is 0 and true is 1."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
