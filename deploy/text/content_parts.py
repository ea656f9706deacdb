"""The text that a chat template writes between the parts of a message's content, found out by trying it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deploy.text.chat import ChatTemplateError, joined

Render = Callable[[Sequence[dict[str, Any]]], str]
"""Messages to a prompt. ChatTemplateError."""
USUAL: Final = "\n"
"""Separator of parts for a template that takes no lists of them."""
_FIRST, _SECOND = "first-part", "second-part"
_PARTS: Final = [{"type": "text", "text": _FIRST}, {"type": "text", "text": _SECOND}]
_USER: Final = {"role": "user", "content": "Hello"}
_CALL: Final = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"text": "probe"}},
}
_BEFORE: Final[Mapping[str, Sequence[dict[str, Any]]]] = {
    "system": (),
    "user": (),
    "assistant": (_USER,),
    "tool": (_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}),
}
"""Messages that stand before the one that is tried, by its role."""
_MOST: Final = 16
"""Characters between two parts: more is no separator."""


def separators(render: Render, arguments_as_text: bool) -> dict[str, str]:
    """Find the text that the template behind `render` writes between two parts of a message's content, by role. Text
    that is joined by it gives the prompt that the parts would give. `USUAL` where the template takes no parts."""
    return {role: _separator(render, role, arguments_as_text) for role in _BEFORE}


def with_joined_parts(messages: Sequence[dict[str, Any]], by_role: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages whose content is one text each."""
    return [
        {**message, "content": joined(message["content"], by_role.get(message["role"], USUAL))} for message in messages
    ]


def _separator(render: Render, role: str, arguments_as_text: bool) -> str:
    before = [*_BEFORE[role]]
    if role == "tool" and arguments_as_text:
        function = {"name": "probe", "arguments": '{"text": "probe"}'}
        before[-1] = {**before[-1], "tool_calls": [{**_CALL, "function": function}]}
    after = [] if role in ("user", "tool") else [_USER]

    def written(content: Any) -> str:
        message = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = _CALL["id"]
        return render([*before, message, *after])

    try:
        parted = written(_PARTS)
        begin, end = parted.find(_FIRST), parted.find(_SECOND)
        between = parted[begin + len(_FIRST) : end]
        taken = 0 <= begin < end and len(between) <= _MOST and written(_FIRST + between + _SECOND) == parted
    except ChatTemplateError:
        return USUAL
    return between if taken else USUAL
