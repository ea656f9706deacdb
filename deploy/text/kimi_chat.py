"""Changes that Moonshot's tokenizer class (`tokenization_kimi.py`) and its guide to tool calling make to the chat of a
Kimi model before the chat template gets it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

DECLARATIONS: Final = "tools_ts_str"
"""The variable in which the templates of K2.5 and later look for the tools as TypeScript (`deploy.text.typescript`)."""
_SECTION: Final = "<|tool_calls_section_begin|>"
_NUMBER: Final = re.compile(r"[0-9]+")


def is_of_kimi(template: str) -> bool:
    """Whether a chat template writes calls as Kimi does."""
    return _SECTION in template


def sorted_by_name(value: Any) -> Any:
    """A value of JSON with the fields of every object in it sorted by name; lists keep their order. Kimi's tokenizer
    does so to `tools`. RecursionError for one that is nested too deeply."""
    if isinstance(value, Mapping):
        return {name: sorted_by_name(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_by_name(item) for item in value]
    return value


def with_own_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls have ids as the model writes them, `functions.NAME:N` where N counts the calls of the
    conversation from 0, and whose results name the same ids. Other servers and clients give ids of their own, which the
    model would go on to write. A conversation whose calls all have the model's ids stays as it is."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    if all(_is_own(call) for call in calls):
        return [*messages]
    count = 0
    waiting: dict[str, deque[str]] = {}
    """New ids of those calls of the newest message that have no result yet, by the id that the client gave."""
    answered: dict[str, str] = {}
    made = []
    for message in messages:
        if given := message.get("tool_calls"):
            for call in given:  # some clients count from 0 in every answer
                waiting.pop(call["id"], None)
            renamed = []
            for call in given:
                own = f"functions.{call['function']['name']}:{count}"
                waiting.setdefault(call["id"], deque()).append(own)
                renamed.append({**call, "id": own})
                count += 1
            message = {**message, "tool_calls": renamed}
        elif message["role"] == "tool" and isinstance(call_id := message.get("tool_call_id"), str):
            if waiting.get(call_id):
                answered[call_id] = waiting[call_id].popleft()
            message = {**message, "tool_call_id": answered.get(call_id, call_id)}
        made.append(message)
    return made


def _is_own(call: Mapping[str, Any]) -> bool:
    head, found, number = call["id"].rpartition(":")
    return bool(found and head == f"functions.{call['function']['name']}" and _NUMBER.fullmatch(number))
