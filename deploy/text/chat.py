"""A chat's messages and tools as its template gets them. Routers and replicas share this: equal chats must give equal
prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

MOST_MESSAGES: Final = 8192
"""Most messages of a chat. Each is looked at by itself, and a body has room for hundreds of thousands of empty ones."""
MOST_TEMPLATE_VARIABLES: Final = 256
"""Most template variables of a chat. The template's engine handles each by itself, several times."""
MOST_TOOLS: Final = 1024
"""Most tools of a chat, and most calls of a message."""

Content = str | list[dict[str, str]]
"""Content of a message: a text, or several parts of one, each `{"type": "text", "text": ...}`."""


class ChatTemplateError(Exception):
    """The messages do not fit the chat template, or there is none; the text says why."""


class ToolsUnknown(ChatTemplateError):
    """The chat template would leave tools, or what was done with them, out without a word. The text names
    them."""


def template_message(role: str, content: Content, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One message. What else the client gave is in `more`; answers keep their reasoning and their calls, results the
    call that they belong to, and all of them the name of who speaks."""
    message: dict[str, Any] = {"role": role, "content": content}
    more = more or {}
    if role == "assistant":
        if (reasoning := reasoning_of(more)) is not None:
            message["reasoning_content"] = reasoning
        if calls := more.get("tool_calls"):
            message["tool_calls"] = tool_calls_of(calls)
    if role == "tool" and isinstance(more.get("tool_call_id"), str):
        message["tool_call_id"] = more["tool_call_id"]
    if isinstance(name := more.get("name"), str) and name:
        message["name"] = name
    return message


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning that an assistant wrote before its answer; None if there is none. vLLM and others call the
    field `reasoning`."""
    given = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in given if isinstance(text, str)), None)


def content_of(texts: Sequence[str]) -> Content:
    """The content of a message that came as several parts of text."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def is_begun(messages: Any) -> bool:
    """Whether the last message of a chat is said to be the beginning of the answer, as the APIs of DeepSeek and Mistral
    (`prefix`) and of Kimi (`partial`) have it."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    return last.get("prefix") is True or last.get("partial") is True


def spoken(parts: Sequence[Any]) -> list[Any]:
    """The parts of what an assistant said, refusals as text."""
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, Mapping) and part.get("type") == "refusal"
        else part
        for part in parts
    ]


def joined(content: Content, separator: str = "\n") -> str:
    """Content as one text. What stands between parts is the chat template's choice where it takes them apart
    (`deploy.text.content_parts`)."""
    return content if isinstance(content, str) else separator.join(part["text"] for part in content)


def with_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose `developer` turns are system messages. Chat templates know OpenAI's newer role under its older
    name."""
    return [{**message, "role": "system"} if message["role"] == "developer" else {**message} for message in messages]


def tool_results_in_order(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The results of a message's calls, in the order of the calls as far as their ids say which is whose."""
    places = {call["id"]: place for place, call in reversed([*enumerate(calls)])}
    found = [places.get(result.get("tool_call_id", "")) for result in results]
    if None in found or len({*found}) < len(found):
        return [*results]
    return [result for _, result in sorted(zip(found, results, strict=True), key=lambda pair: pair[0] or 0)]


def speaks_of_tools(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether there are calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The field `tools`, each tool with the fields that templates know, in one order. ValueError."""
    tools = []
    for tool in _list(value, "tools"):
        function = function_of(tool) if isinstance(tool, Mapping) else None
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in ("", "function"):
            raise ValueError(f"a tool of type {kind[:64]!r} is not supported here: tools are functions")
        if not isinstance(function, Mapping) or kind not in (None, "", "function"):
            raise ValueError('a tool should be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        described: dict[str, Any] = {"name": _name(function)}
        if (description := function.get("description")) is not None:
            if not isinstance(description, str):
                raise ValueError("a tool's description should be a string")
            described["description"] = description
        if (parameters := function.get("parameters", function.get("input_schema"))) is not None:
            if not isinstance(parameters, Mapping):
                raise ValueError("a tool's parameters should be an object: the JSON schema of its arguments")
            described["parameters"] = parameters
        tools.append({"type": "function", "function": described})
    return tools


def function_of(tool: Mapping[str, Any]) -> Any:
    """The function that a tool is, which clients also write as the Responses API has it: without an object of its
    own. Some name its parameters as Anthropic's API does."""
    return tool if "function" not in tool and isinstance(tool.get("name"), str) else tool.get("function")


def tool_calls_of(value: Any) -> list[dict[str, Any]]:
    """The field `tool_calls` of a message, arguments as the text that the model wrote, whatever that is: a chat whose
    model once wrote no JSON goes on. ValueError."""
    calls = []
    for call in _list(value, "tool_calls"):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
            raise ValueError('a call should be {"id": ..., "type": "function", "function": {"name", "arguments"}}')
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        if isinstance(arguments, Mapping | list | int | float):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                raise ValueError("a call's arguments are nested too deeply") from None
        call_id = "" if call.get("id") is None else call["id"]
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
