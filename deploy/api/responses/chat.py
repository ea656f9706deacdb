"""From a body of the Responses API to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from deploy.api.http.body import parse_object, validate
from deploy.api.http.errors import ApiError, unsupported
from deploy.api.job.bodies import ChatBody
from deploy.api.responses.bodies import ResponsesBody, reject_unsupported
from deploy.text.chat import joined
from deploy.text.turns import Messages, messages_of_items, with_instructions

NAMES: Final = {
    "response_format": "text",
    "guided_begin_after": "text",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}
"""What fields of chats are called here."""
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def named_here(error: ApiError) -> ApiError:
    """An error about a chat, with the field that the client gave."""
    first, dot, rest = (error.param or "").partition(".")
    if first in NAMES:
        error.param = NAMES[first] + dot + rest
    return error


def parse_response(raw: bytes) -> ResponsesBody:
    """The body of /v1/responses; 400 for what is wrong with it."""
    value = parse_object(raw)
    reject_unsupported(value)
    return validate(ResponsesBody, value)


def chat_of(body: ResponsesBody, messages: Messages) -> ChatBody:
    """The chat of these messages, that of the body last. 400 for what is no chat."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": with_instructions(messages, body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "tools": body.tools,
        "tool_choice": body.tool_choice,
        "response_format": body.text,
    }
    sampling = ("temperature", "top_p", "seed", "max_reasoning_tokens")
    same = (*sampling, "stream", "parallel_tool_calls", "return_accepted_drafts")
    try:
        more = {name: getattr(body, name) for name in same}
        return validate(ChatBody, {**fields, **more, "chat_template_kwargs": body.chat_template_kwargs})
    except ApiError as error:
        raise named_here(error) from None


def messages_of(items: Sequence[dict[str, Any]]) -> Messages:
    """Items as messages; 400 for content that nobody reads."""
    return messages_of_items(items, _text)


def _text(value: Any) -> str:
    """Content as one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, "input: content should be a string or a list of parts", param="input", code="invalid_value")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise unsupported(f"a content part of type {str(kind)[:64]!r}", "input")
        texts.append(part["text"])
    return joined(texts)
