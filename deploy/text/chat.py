"""A chat's messages and tools as its template gets them. Routers and replicas share this: equal chats must give equal
prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

MOST_MESSAGES: Final = 8192
"""Of a chat. Each is looked at by itself, and a body has room for hundreds of thousands of empty ones."""
MOST_TEMPLATE_VARIABLES: Final = 256
"""Of a chat. The template's engine handles each by itself, several times."""
MOST_TOOLS: Final = 1024
"""Of a chat, and calls of a message."""


def template_message(role: str, content: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One message. Models know OpenAI's newer role `developer` under its older name. What else the client gave is in
    `more`; answers keep their reasoning and their calls, and results the call that they belong to."""
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    more = more or {}
    if role == "assistant":
        if isinstance(reasoning := more.get("reasoning_content"), str):
            message["reasoning_content"] = reasoning
        if calls := more.get("tool_calls"):
            message["tool_calls"] = tool_calls_of(calls)
    if role == "tool":
        message |= {name: more[name] for name in ("tool_call_id", "name") if isinstance(more.get(name), str)}
    return message


def joined(texts: list[str]) -> str:
    """The content of a message that came as several parts of text."""
    return "\n".join(texts)


def speaks_of_tools(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether there are calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The field `tools`, each tool with the fields that templates know, in one order. ValueError."""
    tools = []
    for tool in _list(value, "tools"):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ValueError('a tool should be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        described: dict[str, Any] = {"name": _name(function)}
        if (description := function.get("description")) is not None:
            if not isinstance(description, str):
                raise ValueError("a tool's description should be a string")
            described["description"] = description
        if (parameters := function.get("parameters")) is not None:
            if not isinstance(parameters, Mapping):
                raise ValueError("a tool's parameters should be an object: the JSON schema of its arguments")
            described["parameters"] = parameters
        tools.append({"type": "function", "function": described})
    return tools


def tool_calls_of(value: Any) -> list[dict[str, Any]]:
    """The field `tool_calls` of a message, arguments as the JSON text that models write. ValueError."""
    calls = []
    for call in _list(value, "tool_calls"):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise ValueError('a call should be {"id": ..., "type": "function", "function": {"name", "arguments"}}')
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                raise ValueError("a call's arguments are nested too deeply") from None
        call_id = call.get("id", "")
        if not isinstance(arguments, str) or not isinstance(call_id, str):
            raise ValueError("a call's id and arguments should be strings")
        calls.append({"id": call_id, "type": "function", "function": {"name": _name(function), "arguments": arguments}})
    return calls


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} should be a list")
    if len(value) > MOST_TOOLS:
        raise ValueError(f"at most {MOST_TOOLS} {what} are allowed, not {len(value)}")
    return value


def _name(function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a function should have a name")
    return name
