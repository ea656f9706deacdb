"""Changes that Moonshot's tokenizer class (`tokenization_kimi.py`) and its guide to tool calling make to the chat of a
Kimi model before the chat template gets it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deploy.text.call_ids import with_ids

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
    return with_ids(messages, lambda call, count: f"functions.{call['function']['name']}:{count}", lambda lost: lost)


def _is_own(call: Mapping[str, Any]) -> bool:
    head, found, number = call["id"].rpartition(":")
    return bool(found and head == f"functions.{call['function']['name']}" and _NUMBER.fullmatch(number))
