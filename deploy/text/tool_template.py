"""What a chat template knows of tools, found out by trying it: nothing in its text says so reliably."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_CALL: Final = {"id": "functions.probe:0", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}
_CALLED: Final = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "Done.", "tool_call_id": "functions.probe:0"},
)


_CALL_OF_V31: Final = f"<｜tool▁call▁begin｜>probe<｜tool▁sep｜>{_ARGUMENTS}"


@dataclass(frozen=True)
class ToolTemplate:
    """One template."""

    knows_tools: bool
    """Whether tools change what it writes."""
    arguments_as_text: bool
    """Whether it writes the arguments of earlier calls as the text that they were; else it wants objects."""
    leaves_tools_to_system: bool = False
    """Whether it writes calls as DeepSeek V3.1 does and the tools not at all: they belong into the system message."""

    @staticmethod
    def tried(render: Render) -> ToolTemplate:
        """What the template behind `render` knows."""
        try:
            knows = render([_USER], [_TOOL]) != render([_USER], [])
        except ChatTemplateError:
            knows = False
        try:
            called = render(_CALLED, [_TOOL])
        except ChatTemplateError:
            called = ""
        leaves = not knows and _CALL_OF_V31 in called
        return ToolTemplate(knows, (knows or leaves) and _ARGUMENTS in called, leaves)

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template wants them. ToolsUnknown where it knows no tools."""
        if not (self.knows_tools or self.leaves_tools_to_system):
            raise ToolsUnknown("tool calling, of which this model's chat template knows nothing,")
        if self.arguments_as_text:
            return [*messages]
        return [
            message if not message.get("tool_calls") else {**message, "tool_calls": _as_objects(message["tool_calls"])}
            for message in messages
        ]


def _as_objects(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": object_of(call["function"]["arguments"])}}
        for call in calls
    ]
