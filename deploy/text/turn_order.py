"""Chats for templates that refuse turns in an order that clients send. Mistral's want users and assistants to take
turns, and one system message, at the beginning. Agents say several things in a row, and speak behind results of
tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_BETWEEN: Final = "\n\n"
"""What Mistral's own library, mistral-common, puts between messages that it joins."""
_NO_ANSWER: Final = "[No answer came.]"
_NO_QUESTION: Final = "[Nothing was asked.]"


def in_strict_order(messages: Sequence[dict[str, Any]], goes_on: bool = False) -> list[dict[str, Any]]:
    """Messages whose content is text, so that users and assistants take turns, but for calls of tools and their
    results. System messages behind the first message are said by the user; neighbours of one role are one message, with
    their calls; an assistant's message that says nothing is left out, unless the chat `goes_on` with it. Where a turn
    is missing, as between the result of a tool and a user, a few words in brackets stand for it."""
    made: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and index:
            message = {**message, "role": "user"}
        silent = message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")
        if silent and not (goes_on and index + 1 == len(messages)):
            continue
        if made and message["role"] == made[-1]["role"] and message["role"] in ("user", "assistant"):
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    whole, asked = list[dict[str, Any]](), False
    for message in made:
        if message["role"] == "user":
            if asked:
                whole.append({"role": "assistant", "content": _NO_ANSWER})
            asked = True
        elif message["role"] == "assistant" and not message.get("tool_calls"):
            if not asked:
                whole.append({"role": "user", "content": _NO_QUESTION})
            asked = False
        whole.append(message)
    return whole


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    made = {**first, **second}
    for name in ("content", "reasoning_content"):
        if texts := [message[name] for message in (first, second) if message.get(name)]:
            made[name] = _BETWEEN.join(texts)
    if calls := [call for message in (first, second) for call in message.get("tool_calls") or ()]:
        made["tool_calls"] = calls
    return made
