"""The shapes of answers, for the description of the API. `deploy.api.openai.format` builds them by hand, for it does so
for every token; a test holds the one against the other."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from deploy.api.generation.choice import DraftTokens
from deploy.api.http.openapi import Answer

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Answer):
    """Breakdown of the prompt tokens."""

    cached_tokens: int


class ReasoningTokens(DraftTokens):
    """Breakdown of the generated tokens."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class _Ending(Answer):
    finish_reason: FinishReason | None
    """null in events before the last one of a choice."""
    stop_reason: str | int | None = None
    """The stop string, or the stop token id of the request, that ended it; comes with the end."""
    token_ids: list[int] = Field(default_factory=list)
    """Token ids. They are there when they are asked for, or without a tokenizer."""
    accepted_drafts: list[bool] = Field(default_factory=list)
    """For each new token, whether it was a draft that was accepted. It is there when it is asked for."""


class CompletionLogprobs(Answer):
    """Log-probabilities, with one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt that is echoed: nothing stands before it."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Offset of each token in the text, in characters."""


class PromptToken(Answer):
    """Log-probability of a token at a position of a prompt."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str


class CompletionChoice(_Ending):
    """Choice of a completion, or an event's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, PromptToken] | None] = Field(default_factory=list)
    """For each token of the prompt but the first, the most probable tokens and itself, by id. It is there when it is
    asked for."""


class _Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    """Changes with the model, the server's version and the settings that decide how it rounds."""


class CompletionAnswer(_Head):
    """POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionEvent(_Head):
    """Event of its stream, after `data: `."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Counts in the last event, null before it unless all events are to have them; comes when stream_options asks for
    it."""


class TokenLogprob(Answer):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """The token that was chosen."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities, with one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class Function(Answer):
    """Function that is called, and its arguments."""

    name: str
    arguments: str
    """Arguments as one JSON object."""


class ToolCall(Answer):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Answer):
    """Message that the model wrote."""

    role: Literal["assistant"]
    content: str | None
    """null where there are calls and no words."""
    refusal: None
    reasoning_content: str = ""
    """Reasoning before the answer. It is there where reasoning is told apart."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Tool calls. The field is there if there are any."""


class ChatChoice(_Ending):
    """Choice of a whole answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(_Head):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    """Next part of a call."""

    name: str = ""
    """Name of the function. It is in the first part of a call."""
    arguments: str
    """Part of the arguments. All parts together are one JSON object."""


class ToolCallDelta(Answer):
    """The beginning of a call, or more of its arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """New text of a choice."""

    role: Literal["assistant"] = "assistant"
    """Role. It is in the first event of a choice."""
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatEventChoice(_Ending):
    """An event's part of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatEvent(_Head):
    """Event of its stream, after `data: `."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | None = None
    """Counts in the last event, null before it unless all events are to have them; comes when stream_options asks for
    it."""


class TokenizeAnswer(Answer):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """Spelling of the tokens in the vocabulary; null unless it is asked for."""


class DetokenizeAnswer(Answer):
    """POST /detokenize."""

    prompt: str


class ModelCard(Answer):
    """A model that is served here."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "latentserve"
    root: str
    parent: None = None
    max_model_len: int
    sampling_defaults: dict[str, Any]
    """Fields of requests that give none, where these are not temperature 1 without a filter. An extension."""


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
