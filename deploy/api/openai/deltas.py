"""What parsers found, in OpenAI's shapes: pieces of a stream, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning

REASONING: Final = "reasoning_content"
"""The field that others, too, answer reasoning in."""


def delta_of(events: Iterable[Event]) -> dict[str, Any]:
    """The `delta` of an event of a stream. Where a call turns out to be none, the client has begun to hear of it; its
    text comes as content, too."""
    texts: dict[str, str] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, Content):
            texts["content"] = texts.get("content", "") + event.text
        elif isinstance(event, Reasoning):
            texts[REASONING] = texts.get(REASONING, "") + event.text
        elif isinstance(event, CallBegin):
            calls[event.index] = _call(event)
        elif isinstance(event, Arguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return {**texts, "tool_calls": list(calls.values())} if calls else dict(texts)


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The `message` of a whole answer. Calls that are not complete are none."""
    texts: dict[str, list[str]] = {"content": [], REASONING: []}
    calls: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, Content):
            texts["content"].append(event.text)
        elif isinstance(event, Reasoning):
            texts[REASONING].append(event.text)
        elif isinstance(event, CallBegin):
            calls[event.index], arguments[event.index] = _call(event), []
        elif isinstance(event, Arguments):
            arguments[event.index].append(event.text)
        elif isinstance(event, CallEnd):
            calls[event.index]["function"]["arguments"] = "".join(arguments[event.index])
        elif isinstance(event, CallBroken):
            del calls[event.index]
    content = "".join(texts["content"])
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if texts[REASONING]:
        message[REASONING] = "".join(texts[REASONING])
    if calls:
        message["tool_calls"] = [
            {name: value for name, value in call.items() if name != "index"} for call in calls.values()
        ]
    return message


def _call(event: CallBegin) -> dict[str, Any]:
    function = {"name": event.name, "arguments": ""}
    return {"index": event.index, "id": event.id, "type": "function", "function": function}
