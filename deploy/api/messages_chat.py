"""From a body of Anthropic's shape to a chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from deploy.api.body import parse_object, validate
from deploy.api.errors import ApiError
from deploy.api.messages_protocol import Blocks, MessagesBody, MessagesPrompt, Turn, reject_unsupported
from deploy.api.protocol import ChatBody
from deploy.text.chat import joined

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
    }
    return body, _chat_of(body, **more)


def parse_prompt(raw: bytes) -> ChatBody:
    """The same of /v1/messages/count_tokens."""
    value = parse_object(raw)
    reject_unsupported(value)
    return _chat_of(validate(MessagesPrompt, value))


def _chat_of(body: MessagesPrompt, **more: Any) -> ChatBody:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        messages += _assistant(turn.content) if turn.role == "assistant" else _user(turn)
    goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    thinks = body.thinking is not None and body.thinking.type == "enabled"
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": goes_on,
        "add_generation_prompt": not goes_on,
        **more,
    }
    if body.thinking is None or body.thinking.type != "adaptive":
        # Under the names that the templates of these models know it by.
        fields["chat_template_kwargs"] = {"thinking": thinks, "enable_thinking": thinks}
    if thinks and body.thinking is not None:
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


def _text(blocks: Blocks) -> str:
    return joined([block["text"] for block in blocks if block["type"] == "text"])


def _assistant(blocks: Blocks) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    if thought := joined([block["thinking"] for block in blocks if block["type"] == "thinking"]):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _user(turn: Turn) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, and stand before what the user says."""
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            text = content if isinstance(content, str) else _text(content)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    said = [block for block in turn.content if block["type"] == "text"]
    if said or not messages:
        messages.append({"role": "user", "content": _text(said)})
    return messages
