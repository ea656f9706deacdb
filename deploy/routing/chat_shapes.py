"""Bodies of /v1/messages and /v1/responses as chats, as far as their prompts go.

The path of a request is not known here, so a body's own fields say what it is: one without any that only Anthropic's
clients send is a chat as it stands, and differs at most at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deploy.text.changed_tools import told_by_turns
from deploy.text.chat import Content, content_of
from deploy.text.effort import FIELDS
from deploy.text.response_tools import read_tools, with_added
from deploy.text.turns import (
    configured,
    goes_on,
    messages_of_items,
    messages_of_turns,
    readable_items,
    thinking_fields,
    with_instructions,
)

_BLOCKS: Final = {"tool_use", "tool_result", "thinking", "redacted_thinking"}
_OF_CHATS: Final = (
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "chat_template_kwargs",
    "response_format",
)
"""Fields that Anthropic's clients do not send."""


def as_chat(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a chat that its prompt depends on. TypeError, ValueError, LookupError or AttributeError for what is
    none, or is not all here."""
    if "messages" in data:
        return _of_messages(data) if _is_anthropic(data) else data
    if data.get("previous_response_id") is not None:
        raise ValueError("only the replica that keeps it knows what came before")
    return _of_response(data)


def _is_anthropic(data: Mapping[str, Any]) -> bool:
    if _is_openai(data):
        return False
    # Some of OpenAI's clients know `thinking`, too; Anthropic's never leave out max_tokens.
    if "system" in data or (data.get("thinking") is not None and "max_tokens" in data):
        return True
    if any("input_schema" in tool for tool in data.get("tools") or ()):
        return True
    contents = (message["content"] for message in data["messages"] if isinstance(message.get("content"), list))
    return any(block.get("type") in _BLOCKS for content in contents for block in content)


def _is_openai(data: Mapping[str, Any]) -> bool:
    """Whether a body with `messages` has what only OpenAI's clients send, of whom some know `thinking`, too."""
    if any(data.get(name) is not None for name in (*FIELDS, *_OF_CHATS) if name != "thinking"):
        return True
    if not isinstance(data.get("thinking") or {}, Mapping):
        return True
    if any("function" in tool or "parameters" in tool for tool in data.get("tools") or ()):
        return True
    return any(message.get("role") in ("tool", "developer") or "tool_calls" in message for message in data["messages"])


def _of_messages(data: Mapping[str, Any]) -> dict[str, Any]:
    data = {**data, **told_by_turns(data)}
    turns = [(turn["role"], _blocks(turn["content"] or "")) for turn in data["messages"]]
    messages = messages_of_turns(_blocks(data.get("system") or []), turns)
    choice, tools = data.get("tool_choice") or {}, data.get("tools") or ()
    return {
        "messages": messages,
        "continue_final_message": goes_on(messages),
        "add_generation_prompt": not goes_on(messages),
        **thinking_fields(
            (data.get("thinking") or {}).get("type"),
            (data.get("output_config") or {}).get("effort"),
            data.get("context_management"),
        ),
        "tools": [
            _function(tool["name"], tool.get("description"), tool["input_schema"])
            for tool in tools
            if tool.get("type") in (None, "custom")
        ],
        "tool_choice": choice.get("type"),
    }


def _of_response(data: Mapping[str, Any]) -> dict[str, Any]:
    given = data["input"]
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    messages = messages_of_items([{"type": "message", **item} for item in readable_items(items)], _content)
    return {
        "messages": with_instructions(messages, data.get("instructions")),
        "tools": read_tools(with_added(data.get("tools") or (), items)).functions,
        "tool_choice": data.get("tool_choice"),
        "chat_template_kwargs": data.get("chat_template_kwargs"),
        "reasoning": {**(data.get("reasoning") or {}), **configured(items).get("reasoning", {})} or None,
    }


def _function(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: Any) -> Content:
    return content if isinstance(content, str) else content_of([part["text"] for part in content])
