"""Answers as models write them: content, reasoning and tool calls in each format, and what parsers are to find."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from deploy.parsing.answer import AnswerParser, ReasoningParser, Where
from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from deploy.parsing.registry import REASONING_PARSERS, TOOL_PARSERS

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "exact": {"type": ["boolean", "null"]},
            "places": {"type": "array", "items": {"type": "object"}},
            "free": {},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Calls = list[tuple[str, dict[str, Any]]]


def deepseek_v3(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    inside = "\n".join(one.format(name, dumps(arguments)) for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    inside = "".join(one.format(name, dumps(arguments)) for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek_v32(calls: Calls) -> str:
    def parameter(name: str, value: Any) -> str:
        string = isinstance(value, str)
        text = value if string else dumps(value)
        return f'<｜DSML｜parameter name="{name}" string="{dumps(string)}">{text}</｜DSML｜parameter>\n'

    one = '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n'
    inside = "".join(
        one.format(name, "".join(itertools.starmap(parameter, arguments.items()))) for name, arguments in calls
    )
    return f"<｜DSML｜function_calls>\n{inside}</｜DSML｜function_calls>"


def kimi_k2(calls: Calls) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inside = "".join(one.format(name, index, dumps(arguments)) for index, (name, arguments) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def glm(calls: Calls, newline: str = "") -> str:
    def argument(name: str, value: Any) -> str:
        text = value if isinstance(value, str) else dumps(value)
        return f"<arg_key>{name}</arg_key>{newline}<arg_value>{text}</arg_value>{newline}"

    return newline.join(
        f"<tool_call>{name}{newline}{''.join(itertools.starmap(argument, arguments.items()))}</tool_call>"
        for name, arguments in calls
    )


def with_ending(text: str, ending: str) -> str:
    """The text with this ending in all tags of a Hy4."""
    return re.sub(r"<(/?(?:think|tool_calls?|arg_key|arg_value))>", rf"<\1{ending}>", text)


def hyv4(calls: Calls, ending: str = "") -> str:
    return with_ending(f"<tool_calls>{glm(calls)}</tool_calls>", ending)


def hermes(calls: Calls) -> str:
    one = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    return "\n".join(one.format(name, dumps(arguments)) for name, arguments in calls)


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "deepseek_v32": deepseek_v32,
    "kimi_k2": kimi_k2,
    "glm": glm,
    "hy_v4": hyv4,
    "hermes": hermes,
    "mistral": mistral,
}
MARKERS = {
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>", "function", "```json\n", "\n```",
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ],
    "deepseek_v32": [
        "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>", '<｜DSML｜parameter name="', '" string="true">', '" string="false">',
        "</｜DSML｜parameter>", '">', "<｜DSML｜", "</｜DSML｜", "<｜｜DSML｜｜", "</｜｜DSML｜｜", "<|DSML|",
        "</|DSML|", "/>", '<parameter name="', "</parameter>", "</invoke>",
    ],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "functions.now:3", "<|tool_call_section_begin|>", "<|tool_call_section_end|>",
    ],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "hy_v4": [
        "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
        "</arg_value>",
    ],
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": ', '"}'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "aB3dE6gH9", '[{"name": "now", "arguments": ', "[", "]"],
}  # fmt: skip
"""Markers of each format; mutations throw these in."""

_TAG = r"</?｜DSML｜[a-z_]+(?: [a-z]+=\"[^\"]*\")*>"
CONTROL = {
    name: re.compile(
        _TAG
        if name == "deepseek_v32"
        else "|".join(re.escape(m) for m in markers if m[0] == "<" or (m[0] == "[" and m[-1] == "]"))
    )
    for name, markers in MARKERS.items()
}
"""Patterns that are never content."""


def parser(tools: str | None, reasoning: str | None = None, where: Where = "undecided") -> AnswerParser:
    ids = map("call_{}".format, itertools.count())
    calls = None if tools is None else TOOL_PARSERS[tools](TOOLS, lambda: next(ids))
    return AnswerParser(None if reasoning is None else ReasoningParser(REASONING_PARSERS[reasoning], where), calls)


def events_of(parser: AnswerParser, pieces: Iterable[str]) -> list[Event]:
    """All events, neighbours of one kind joined."""
    events: list[Event] = []
    for event in [*(event for piece in pieces for event in parser.push(piece)), *parser.finish()]:
        last = events[-1] if events else None
        if isinstance(event, Content | Reasoning | Arguments):
            assert event.text
        if isinstance(event, Content) and isinstance(last, Content):
            events[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            events[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            assert last.index == event.index
            events[-1] = Arguments(event.index, last.text + event.text)
        else:
            events.append(event)
    return events


@dataclass
class Found:
    """Answer as a client puts it together."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    broken: int = 0


def found(events: list[Event]) -> Found:
    """The answer; asserts the order of events and that each call's arguments are one JSON object."""
    answer, open_call, text, index = Found(), None, "", 0
    for event in events:
        if isinstance(event, Content | Reasoning):
            assert open_call is None
        if isinstance(event, Content):
            answer.content += event.text
        elif isinstance(event, Reasoning):
            assert not answer.content
            assert not answer.calls
            answer.reasoning += event.text
        elif isinstance(event, CallBegin):
            assert (open_call, event.index) == (None, index)
            open_call, text = event, ""
        elif isinstance(event, Arguments):
            assert open_call is not None
            assert event.index == index
            text += event.text
        elif isinstance(event, CallEnd):
            assert open_call is not None
            arguments = json.loads(text)
            assert isinstance(arguments, dict)
            answer.calls.append((open_call.name, arguments))
            answer.ids.append(open_call.id)
            open_call, index = None, index + 1
        elif isinstance(event, CallBroken):
            assert open_call is not None
            answer.broken += 1
            open_call, index = None, index + 1
    assert open_call is None
    return answer
