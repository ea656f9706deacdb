"""The shapes of answers, for the description of the API. `deploy.api.openai.format` builds them by hand, for it does so
for every token; a test holds the one against the other."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from deploy.api.generation.choice import DraftTokens
from deploy.api.http.openapi import Answer

FinishReason = Literal["stop", "length", "tool_calls"]


class CachedTokens(Answer):
    """Of the prompt."""

    cached_tokens: int


class ReasoningTokens(DraftTokens):
    """Of what was generated."""

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
    """Comes when it is asked for, or without a tokenizer."""
    accepted_drafts: list[bool] = Field(default_factory=list)
    """For each new token whether it was a draft that was accepted; comes when it is asked for."""


class CompletionLogprobs(Answer):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """null for the first token of a prompt that is echoed: nothing stands before it."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where the tokens begin in the text, in characters."""


class PromptToken(Answer):
    """How probable a token was at a place of a prompt."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str


class CompletionChoice(_Ending):
    """One choice, or an event's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: list[dict[str, PromptToken] | None] = Field(default_factory=list)
    """For each token of the prompt, the first aside, the most probable tokens and itself, by id; comes when it is asked
    for."""


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
    """One event of its stream, after `data: `."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """Counts in the last event, null before it; comes when stream_options asks for it."""


class TokenLogprob(Answer):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """The token that was chosen."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class Function(Answer):
    """What is called."""

    name: str
    arguments: str
    """One JSON object."""


class ToolCall(Answer):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    """null where there are calls and no words."""
    refusal: None
    reasoning_content: str = ""
    """What it thought before; comes where its reasoning is told apart."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Come where there are any."""


class ChatChoice(_Ending):
    """One choice of a whole answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(_Head):
    """POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Answer):
    """More of a call."""

    name: str = ""
    """Comes first."""
    arguments: str
    """All of them together are one JSON object."""


class ToolCallDelta(Answer):
    """The beginning of a call, or more of its arguments."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """New text of a choice."""

    role: Literal["assistant"] = "assistant"
    """Comes first."""
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatEventChoice(_Ending):
    """An event's part of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatEvent(_Head):
    """One event of its stream, after `data: `."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    usage: Usage | None = None
    """Counts in the last event, null before it; comes when stream_options asks for it."""


class TokenizeAnswer(Answer):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """How the vocabulary spells them; null unless it is asked for."""


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
    sampling_defaults: dict[str, float]
    """How requests are sampled that do not say so, where that is not temperature 1 without a filter. An extension."""


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]
