"""A chat template's knowledge of tools, found out by trying it: nothing in its text says so reliably."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.text.errors import ChatTemplateError, ToolsUnknown
from deploy.text.mending import object_of

Render = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]]], str]
"""Messages and tools to a prompt. ChatTemplateError."""

_USER: Final = {"role": "user", "content": "Hello"}
_ARGUMENTS: Final = '{"text": "probe"}'
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_BARE_TOOL: Final = {"type": "function", "function": {"name": "probe"}}
_CALL: Final = {"id": "functions.probe:0", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}
_CALLED: Final = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "Done.", "tool_call_id": "functions.probe:0"},
)


_CALL_OF_V31: Final = f"<｜tool▁call▁begin｜>probe<｜tool▁sep｜>{_ARGUMENTS}"
_CALL_OF_V3: Final = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>probe\n```json\n{_ARGUMENTS}\n```"


@dataclass(frozen=True)
class ToolTemplate:
    """Properties of a chat template that concern tools."""

    knows_tools: bool
    """Whether tools change what it writes."""
    arguments_as_text: bool
    """Whether it writes the arguments of earlier calls as the text that they were; else it wants objects."""
    leaves_tools_to_system: bool = False
    """Whether it writes calls as DeepSeek V3 and V3.1 do and the tools not at all: they belong into the system
    message."""
    fences_arguments: bool = False
    """Whether such calls are those of V3 and R1, with their arguments in a fence."""
    calls_without_content: bool = False
    """Whether it writes the calls of messages whose content is none, and leaves out those of all others."""
    wants_descriptions: bool = False
    """Whether it refuses tools without a description or without a schema that has properties."""

    @staticmethod
    def tried(render: Render) -> ToolTemplate:
        """Try the template behind `render`, and return what it knows."""
        try:
            with_tool = render([_USER], [_TOOL])
        except ChatTemplateError:
            knows = False
        else:
            try:
                knows = with_tool != render([_USER], [])
            except ChatTemplateError:
                knows = True  # it writes chats with tools alone
        try:
            called = render(_CALLED, [_TOOL])
        except ChatTemplateError:
            called = ""
        alone = False
        if not knows and _CALL_OF_V3 not in called and _CALL_OF_V31 not in called:
            try:
                called = render([_USER, {**_CALLED[1], "content": None}, _CALLED[2]], [_TOOL])
            except ChatTemplateError:
                called = ""
            alone = _CALL_OF_V3 in called
        fences = not knows and _CALL_OF_V3 in called
        leaves = fences or (not knows and _CALL_OF_V31 in called)
        wants = False
        if knows:
            try:
                render([_USER], [_BARE_TOOL])
            except ChatTemplateError:
                wants = True
        return ToolTemplate(knows, (knows or leaves) and _ARGUMENTS in called, leaves, fences, alone, wants)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tools as the template wants them."""
        if not self.wants_descriptions:
            return [dict(tool) for tool in tools]
        return [{**tool, "function": _described(tool["function"])} for tool in tools]

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template wants them. ToolsUnknown where it knows no tools."""
        if not (self.knows_tools or self.leaves_tools_to_system):
            raise ToolsUnknown("tool calling, of which this model's chat template knows nothing,")
        if self.calls_without_content:
            return [part for message in messages for part in _calls_apart(message)]
        if self.arguments_as_text:
            return [*messages]
        return [
            message if not message.get("tool_calls") else {**message, "tool_calls": _as_objects(message["tool_calls"])}
            for message in messages
        ]


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function with a description and a schema that has properties, be they empty."""
    parameters = {"type": "object", "properties": {}, **function.get("parameters", {})}
    return {"description": "", **function, "parameters": parameters}


def _calls_apart(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message whose calls have a message of their own, without content."""
    if not message.get("tool_calls"):
        return [message]
    called = {**message, "content": None}
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return [said, called] if message["content"] else [called]


def _as_objects(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": object_of(call["function"]["arguments"])}}
        for call in calls
    ]
