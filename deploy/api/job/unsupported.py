"""Fields of other servers' APIs that change the answer and that this server does not have.

Unknown fields are ignored, as clients expect. One of these must not be: its client would take the answer for what it
had asked for. The names are those of OpenAI, vLLM, SGLang, Text Generation Inference, llama.cpp and others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from deploy.api.http.errors import unsupported
from deploy.text.effort import FIELDS

_OFF: Final[tuple[Any, ...]] = (False, 0, "", [], {})

UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    # What is asked of the model.
    "suffix": ("text insertion (suffix)", _OFF),
    "functions": ("function calling (functions)", _OFF),
    "function_call": ("function calling (function_call)", (*_OFF, "none")),
    "web_search_options": ("web search (web_search_options)", ()),  # an empty object switches it on
    "modalities": ("a modality other than text (modalities)", (*_OFF, ["text"])),
    "audio": ("audio", _OFF),
    "moderation": ("moderation", _OFF),
    "documents": ("documents", _OFF),
    "chat_template": ("a chat template in the request (chat_template)", _OFF),
    "prompt_embeds": ("embeddings as a prompt (prompt_embeds)", _OFF),
    "input_embeds": ("embeddings as a prompt (input_embeds)", _OFF),
    "truncate_prompt_tokens": ("prompt truncation (truncate_prompt_tokens)", ()),
    "truncate": ("prompt truncation (truncate)", (False,)),
    "lora_path": ("an adapter (lora_path)", _OFF),
    # How openly it speaks.
    "verbosity": ("verbosity", ()),
    # What the answer must look like.
    "structured_outputs": (
        "structured output under this name (structured_outputs)",
        _OFF,
    ),
    "json_schema": ("structured output (json_schema)", _OFF),
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
    "typical_p": ("typical_p", (1,)),
    "tfs": ("tfs", (1,)),
    "tfs_z": ("tfs_z", (1,)),
    "top_a": ("top_a", _OFF),
    "top_n_sigma": ("top_n_sigma", (*_OFF, -1)),
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
    # What the answer tells besides.
    "return_hidden_states": ("return_hidden_states", _OFF),
}
"""By name: what is not supported, and the values, besides null, that ask for nothing."""


OF_CHATS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "tools": ("tool calling (tools) outside of chats", _OFF),
    "tool_choice": ("tool calling (tool_choice) outside of chats", (*_OFF, "none", "auto")),
    "max_reasoning_tokens": ("a bound of the reasoning (max_reasoning_tokens) outside of chats", ()),
    **{name: (f"a say in the reasoning ({name}) outside of chats", ()) for name in FIELDS},
}
"""The same, of what is supported where there are messages."""


OF_COMPLETIONS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "prompt_logprobs": ("log-probabilities of the prompt (prompt_logprobs) outside of /v1/completions", (False,)),
}
"""The same, of what is supported where there is a prompt."""


def reject_unsupported(raw: Mapping[str, Any], fields: Collection[str] = ()) -> None:
    """400 for a field that asks for something this server cannot do and that must not be ignored silently. `fields`:
    those that the body has, which are supported."""
    known = UNSUPPORTED | (OF_COMPLETIONS if "messages" in raw else OF_CHATS)
    for name in (raw.keys() & known.keys()).difference(fields):
        what, neutral = known[name]
        value = raw[name]
        if value is not None and not any(_same(value, harmless) for harmless in neutral):
            raise unsupported(what, name)


def _same(value: Any, harmless: Any) -> bool:
    """Equal as JSON: to Python false is 0 and true is 1."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)
