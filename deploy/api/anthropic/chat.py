"""From a body of Anthropic's shape to a chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from deploy.api.anthropic.bodies import MessagesBody, MessagesPrompt, reject_unsupported
from deploy.api.http.body import parse_object, validate
from deploy.api.http.errors import ApiError
from deploy.api.job.bodies import ChatBody
from deploy.text.turns import goes_on, messages_of_turns, thinking_variables

NAMES: Final = {
    "response_format": "output_config",
    "max_reasoning_tokens": "thinking",
    "guided_begin_after": "output_config",
    "stop": "stop_sequences",
}
"""What fields of chats are called here."""


@contextmanager
def own_names() -> Iterator[None]:
    """Errors about a chat name the fields that the client gave."""
    try:
        yield
    except ApiError as error:
        error.param = NAMES.get(error.param or "", error.param)
        raise


def parse_messages(raw: bytes) -> tuple[MessagesBody, ChatBody]:
    """The body of /v1/messages, and the chat that it is; 400 for what is wrong with it."""
    value = parse_object(raw)
    reject_unsupported(value)
    body = validate(MessagesBody, value)
    more = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "return_accepted_drafts": body.return_accepted_drafts,
    }
    return body, _chat_of(body, **more)


def parse_prompt(raw: bytes) -> ChatBody:
    """The same of /v1/messages/count_tokens."""
    value = parse_object(raw)
    reject_unsupported(value)
    return _chat_of(validate(MessagesPrompt, value))


def _chat_of(body: MessagesPrompt, **more: Any) -> ChatBody:
    messages = messages_of_turns(body.system, [(turn.role, turn.content) for turn in body.messages])
    begun = goes_on(messages)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": begun,
        "add_generation_prompt": not begun,
        "chat_template_kwargs": thinking_variables(None if body.thinking is None else body.thinking.type),
        **more,
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["max_reasoning_tokens"] = body.thinking.budget_tokens
    if body.output_config is not None and (form := body.output_config.format) is not None:
        schema = {"name": "answer", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with own_names():
        return validate(ChatBody, fields | _tools(body))


def _tools(body: MessagesPrompt) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = kinds.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
