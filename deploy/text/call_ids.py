"""Ids of earlier calls in the form that a model's chat template writes or demands. Clients send ids that other servers
made, or that they made themselves."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

_SHORT: Final = re.compile(r"[A-Za-z0-9]{9}")


def with_ids(
    messages: Sequence[dict[str, Any]], of_call: Callable[[Mapping[str, Any], int], str], of_lost: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Messages whose calls have the ids that `of_call` makes of a call and its number in the conversation from 0, and
    whose results name the same ids. `of_lost` makes the id of a result that belongs to no call."""
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
                own = of_call(call, count)
                waiting.setdefault(call["id"], deque()).append(own)
                renamed.append({**call, "id": own})
                count += 1
            message = {**message, "tool_calls": renamed}
        elif message["role"] == "tool" and isinstance(call_id := message.get("tool_call_id"), str):
            if waiting.get(call_id):
                answered[call_id] = waiting[call_id].popleft()
            message = {**message, "tool_call_id": answered[call_id] if call_id in answered else of_lost(call_id)}
        made.append(message)
    return made


def with_short_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls and results have ids of nine letters and digits, as Mistral's chat templates demand. Ids of
    that form stay; others become what depends on them and on the calls before alone, so that equal chats give equal
    prompts. No two calls have the same."""
    used: set[str] = set()

    def of_call(call: Mapping[str, Any], count: int) -> str:
        given: str = call["id"]
        made = given
        while _SHORT.fullmatch(made) is None or made in used:
            made, count = _short(f"{given} {count}"), count + 1
        used.add(made)
        return made

    def of_lost(call_id: str) -> str:
        return call_id if _SHORT.fullmatch(call_id) else _short(call_id)

    given = [{**m, "tool_call_id": m.get("tool_call_id", "")} if m["role"] == "tool" else m for m in messages]
    return with_ids(given, of_call, of_lost)


def _short(text: str) -> str:
    return blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()[:9]
