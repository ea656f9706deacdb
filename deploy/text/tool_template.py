"""A chat template's knowledge of tools, found out by trying it: nothing in its text says so reliably."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.text.call_ids import with_short_ids
from deploy.text.chat import ChatTemplateError, ToolsUnknown, tool_results_in_order
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
_USUAL_IDS: Final = ("functions.probe:0", "functions.probe:1")
_SHORT_IDS: Final = ("probe0000", "probe0001")


def _called(*ids: str) -> list[dict[str, Any]]:
    """A chat with a message of calls and their results."""
    function = {"name": "probe", "arguments": _ARGUMENTS}
    return [
        _USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids],
        },
        *({"role": "tool", "content": "Done.", "tool_call_id": i} for i in ids),
    ]


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
    wants_short_ids: bool = False
    """Whether it refuses calls whose ids are not nine letters and digits, as those of Mistral before 2025 do."""
    one_call_each: bool = False
    """Whether it refuses messages with several calls, as that of Llama 3.1 does."""

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

        def tried(messages: Sequence[dict[str, Any]]) -> str | None:
            try:
                return render(messages, [_TOOL])
            except ChatTemplateError:
                return None

        ids, called = _USUAL_IDS, tried(_called(_USUAL_IDS[0]))
        if called is None and (called := tried(_called(_SHORT_IDS[0]))) is not None:
            ids = _SHORT_IDS
        several = called is None or tried(_called(*ids)) is not None
        one_each = not several and tried(_with_one_call_each(_called(*ids))) is not None
        called = called or ""
        alone = False
        if not knows and _CALL_OF_V3 not in called and _CALL_OF_V31 not in called:
            user, calls, result = _called(ids[0])
            called = tried([user, {**calls, "content": None}, result]) or ""
            alone = _CALL_OF_V3 in called
        fences = not knows and _CALL_OF_V3 in called
        leaves = fences or (not knows and _CALL_OF_V31 in called)
        wants = False
        if knows:
            try:
                render([_USER], [_BARE_TOOL])
            except ChatTemplateError:
                wants = True
        as_text, short = (knows or leaves) and _ARGUMENTS in called, ids == _SHORT_IDS
        return ToolTemplate(knows, as_text, leaves, fences, alone, wants, short, one_each)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Tools as the template wants them."""
        if not self.wants_descriptions:
            return [dict(tool) for tool in tools]
        return [{**tool, "function": _described(tool["function"])} for tool in tools]

    def messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template wants them. ToolsUnknown where it knows no tools."""
        if not (self.knows_tools or self.leaves_tools_to_system):
            raise ToolsUnknown("tool calling, of which this model's chat template knows nothing,")
        if self.wants_short_ids:
            messages = with_short_ids(messages)
        if self.one_call_each:
            messages = _with_one_call_each(messages)
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


def _with_one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of one call at most, each with its result behind it. Results that belong to none come last."""
    made: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        end = place
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = [*tool_results_in_order(calls, messages[place:end])]
        known = {call["id"] for call in calls}
        in_turn = len(results) == len(calls) and not any(result.get("tool_call_id") in known for result in results)
        place = end
        for index, call in enumerate(calls):
            silent = {"content": "", "reasoning_content": None} if index else {}
            said = {**message, **silent, "tool_calls": [call]}
            made.append({name: value for name, value in said.items() if value is not None or name == "content"})
            own = [at for at, result in enumerate(results) if in_turn or result.get("tool_call_id") == call["id"]]
            if own:
                made.append(dict(results.pop(own[0])))
        made += map(dict, results)
    return made


def _as_objects(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": object_of(call["function"]["arguments"])}}
        for call in calls
    ]
