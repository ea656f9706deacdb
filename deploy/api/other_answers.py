"""The shapes of answers of Anthropic's API and of OpenAI's Responses API, for the description of the API."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from deploy.api.openai.answers import Answer, DraftTokens, ErrorDetail


class MessageError(Answer):
    """Every answer with an error status below /v1/messages, and the last event of a stream that failed."""

    type: Literal["error"]
    error: ErrorDetail


class ThinkingTokens(DraftTokens):
    """Of what was generated."""

    thinking_tokens: int


class MessageUsage(Answer):
    """Token counts as Anthropic has them."""

    input_tokens: int
    """Of the prompt, without those that were cached."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Of the prompt, those that were cached."""
    output_tokens: int
    output_tokens_details: ThinkingTokens


class TextBlock(Answer):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """What it thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(Answer):
    """A call that the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Answer):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """One event of its stream, after `data: `; what else it has Anthropic describes."""

    model_config = ConfigDict(extra="allow")
    own_ending: ClassVar[bool] = True

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class MessageTokens(Answer):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class ResponseAnswer(Answer):
    """POST /v1/responses; what else it has OpenAI describes."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[dict[str, Any]]
    """Items of type reasoning, message and function_call."""
    usage: dict[str, Any] | None


class ResponseEvent(Answer):
    """One event of its stream, after `data: `; what else it has OpenAI describes."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    own_ending: ClassVar[bool] = True
    own_failure: ClassVar[bool] = True
