"""Parsing of one answer of a model: its reasoning, then what it says and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from deploy.parsing.events import CallBegin, Content, Event
from deploy.parsing.parser import CallParser
from deploy.parsing.reasoning import ReasoningParser


class StopWatch(Protocol):
    """Looks for stop strings in text that comes in pieces."""

    matched: str | None
    """Stop string that was found; None before."""

    def feed(self, text: str) -> str:
        """Add text; returns what may be shown now."""

    def flush(self) -> str:
        """Return the text that was held back, once all text has come."""


class AnswerParser:
    """Reasoning is told apart first, then tool calls. What is left is content, and is watched for stop strings: one
    that stands in a call, in its arguments or its markers, ends nothing."""

    __slots__ = ("_begun", "_matcher", "_reasoning", "_through", "_tools", "_unwatched", "straight")

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: CallParser | None,
        calls_in_reasoning: bool = True,
        calls_or_content: bool = False,
    ) -> None:
        """`calls_in_reasoning`: a call that is written in the reasoning ends it and counts. `calls_or_content`: what
        comes behind the reasoning is calls if it begins with one, and otherwise content as it is, markers included."""
        self._reasoning = reasoning
        self._tools = tools
        if reasoning is not None and tools is not None and calls_in_reasoning:
            reasoning.look_for_calls(tools.begins, tools.fresh, tools.in_prose)
        self._through = reasoning is None or reasoning.through
        """Whether all that comes is for the parser of tool calls."""
        self._matcher: StopWatch | None = None
        self._unwatched = 0
        """Characters of the content that comes next which are not watched, though they come with text that is."""
        self._begun: str | None = "" if calls_or_content and tools is not None else None
        """Text that may be the beginning of a call or of content; None once it is known, or if it does not matter."""
        self.straight: Callable[[str], list[Event]] | None = None
        """Takes all text that comes, where nothing else has to look at it and no reasoning comes any more."""
        self._go_straight()

    def _go_straight(self) -> None:
        """Let the parser of tool calls take all text that comes, where nothing else has to look at it."""
        alone = self._through and self._matcher is None and self._begun is None
        self.straight = self._tools.push if alone and self._tools is not None else None

    def watch(self, matcher: StopWatch) -> None:
        """Let `matcher` look for stop strings in the content."""
        self._matcher = matcher
        self._go_straight()

    @property
    def stop(self) -> str | None:
        """The stop string that was found: the answer ends before it, and what comes after it is dropped."""
        return None if self._matcher is None else self._matcher.matched

    @property
    def reasoning(self) -> bool:
        """Whether what comes now is reasoning."""
        return not self._through and self._reasoning is not None and self._reasoning.inside

    def push(self, text: str, watched: bool = True) -> list[Event]:
        """Add text; returns what is certain now. Text that is not `watched` may hold stop strings; none may follow
        text that was."""
        if self.straight is not None:  # the common case, made short
            return self.straight(text)
        if self._through or self._reasoning is None:
            return self._answer(text, watched)
        out: list[Event] = []
        for event in self._reasoning.push(text):
            out += self._behind(event.text, watched) if isinstance(event, Content) else [event]
        self._through = self._reasoning.through
        if self._through:
            self._go_straight()
        return out

    def finish(self, cut: bool = False) -> list[Event]:
        """End the text: what was held back. Nothing comes behind a stop string."""
        if self.stop is not None:
            return []
        out: list[Event] = []
        if self._reasoning is not None:
            for event in self._reasoning.finish(cut):
                out += self._behind(event.text, True) if isinstance(event, Content) else [event]
        if self.stop is not None:
            return out
        if self._tools is not None:
            begun, self._begun = self._begun, None
            out += self._watched(self._tools.push(begun)) if begun else []
            out += self._watched(self._tools.finish(cut))
        if self._matcher is not None and self.stop is None and (held := self._matcher.flush()):
            out.append(Content(held))
        return out

    def _behind(self, text: str, watched: bool) -> list[Event]:
        """Handle the text that the reasoning parser has found to come after the reasoning."""
        if self._tools is not None and self._reasoning is not None and self._reasoning.ended_by_call:
            self._tools.ends_reasoning()
        return self._answer(text, watched)

    def _answer(self, text: str, watched: bool) -> list[Event]:
        """Handle text that comes after the reasoning."""
        if self.stop is not None:
            return []
        events = self._tell(text)
        if self._matcher is None:
            return events
        if watched:
            return self._watched(events)
        self._unwatched = len(self._begun or "") + (self._tools.held if self._tools is not None else 0)
        return events

    def _watched(self, events: list[Event]) -> list[Event]:
        """The events up to the first stop string in their content."""
        if self._matcher is None:
            return events
        out: list[Event] = []
        for event in events:
            if isinstance(event, CallBegin):
                self._unwatched, held = 0, self._matcher.flush()
                out += [Content(held), event] if held else [event]
            elif isinstance(event, Content):
                free = event.text[: self._unwatched]
                self._unwatched -= len(free)
                if text := free + self._matcher.feed(event.text[len(free) :]):
                    out.append(Content(text))
                if self._matcher.matched is not None:
                    break
            else:
                out.append(event)
        return out

    def _tell(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._begun is not None and self._tools is not None:
            self._begun += text
            begun = self._begun.lstrip()
            if not any(begun.startswith(marker) for marker in self._tools.begins):
                if any(marker.startswith(begun) for marker in self._tools.begins):
                    return []
                self._tools = None
            text, self._begun = self._begun, None
            self._go_straight()
        return [Content(text)] if self._tools is None else self._tools.push(text)
