"""One answer of a model: its reasoning, then what it says and calls."""

from __future__ import annotations

from deploy.parsing.events import Content, Event
from deploy.parsing.parser import Parser
from deploy.parsing.reasoning import ReasoningParser


class AnswerParser:
    """Reasoning is told apart first; tool calls are looked for in what is left."""

    __slots__ = ("_reasoning", "_through", "_tools")

    def __init__(self, reasoning: ReasoningParser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._through = reasoning is None or reasoning.through
        """Whether all that comes is for the parser of tool calls."""

    @property
    def reasoning(self) -> bool:
        """Whether what comes now is reasoning."""
        return not self._through and self._reasoning is not None and self._reasoning.inside

    def push(self, text: str) -> list[Event]:
        """See `Parser`."""
        if self._through or self._reasoning is None:
            return self._tools.push(text) if self._tools is not None else [Content(text)] if text else []
        events = self._reasoning.push(text)
        self._through = self._reasoning.through
        return self._with_calls(events)

    def finish(self) -> list[Event]:
        """See `Parser`."""
        events = self._with_calls(self._reasoning.finish()) if self._reasoning is not None else []
        return events + self._tools.finish() if self._tools is not None else events

    def _with_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        out: list[Event] = []
        for event in events:
            out += self._tools.push(event.text) if isinstance(event, Content) else [event]
        return out
