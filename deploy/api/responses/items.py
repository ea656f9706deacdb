"""The output of a response: items of reasoning, text and calls, and the events that tell of them."""

from __future__ import annotations

import uuid
from typing import Any, Final

from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning

Events = list[dict[str, Any]]
"""By their types and fields, without their numbers."""
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIX: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputWriter:
    """Of one response. A call that breaks off is told of as incomplete, and is none of the output in the end."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        """The items so far."""
        self._item: dict[str, Any] | None = None
        """The one that goes on."""
        self._texts: list[str] = []
        """Of it."""
        self._index = -1

    def take(self, event: Event) -> Events:
        """Add what a parser found; returns the events that tell of it."""
        if isinstance(event, Content):
            return self._add_text("message", event.text)
        if isinstance(event, Reasoning):
            return self._add_text("reasoning", event.text)
        if isinstance(event, CallBegin):
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            return self.close() + self._begin("function_call", call)
        if isinstance(event, Arguments):
            self._texts.append(event.text)
            return [self._event("response.function_call_arguments.delta", delta=event.text)]
        if isinstance(event, CallEnd):
            return self.close()
        assert isinstance(event, CallBroken)
        events = self.close("incomplete")
        self.output.pop()
        return events

    def close(self, status: str = "completed") -> Events:
        """End the item that goes on, if one does."""
        if (item := self._item) is None:
            return []
        text = "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            done = self._event(f"response.{part['type']}.done", content_index=0, text=text, **more)
            events = [done, self._event("response.content_part.done", content_index=0, part=part)]
        events.append(self._event("response.output_item.done", item=dict(item)))
        self._item = None
        return events

    def _add_text(self, kind: str, text: str) -> Events:
        events: Events = []
        if self._item is None or self._item["type"] != kind:
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events = self.close() + self._begin(kind, {**own, "content": []})
            events.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._texts.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        delta = self._event(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **more)
        return [*events, delta]

    def _begin(self, kind: str, fields: dict[str, Any]) -> Events:
        name = f"{_PREFIX[kind]}_{uuid.uuid4().hex}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        self._texts = []
        self._index += 1
        self.output.append(self._item)
        added = {"type": "response.output_item.added", "output_index": self._index, "item": dict(self._item)}
        return [added]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        where = {"output_index": self._index}
        if kind != "response.output_item.done":
            where["item_id"] = self._item["id"]
        return {"type": kind, **where, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
