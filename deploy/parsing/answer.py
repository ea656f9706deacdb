"""Parsing of one answer of a model: its reasoning, then what it says and calls.

Most models write `<think>` ... `</think>` around their reasoning; they differ in who writes the first of the two, the
model or its chat template at the end of the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from deploy.parsing.events import CallBegin, Content, Event, Reasoning
from deploy.parsing.markers import CLOSE, OPEN, Line, markers_of
from deploy.parsing.parser import CallParser

MOST_BLANK: Final = 256
"""Characters of white space that are held back where they may be the end of the reasoning, which is left out."""

MOST_PROBE: Final = 1024
"""Characters that are held back where a call may begin in the reasoning."""

_PROBE_STEP: Final = 64

Where = Literal["inside", "outside", "undecided"]


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning format of a family of models."""

    always: bool = False
    """The answer begins inside of the reasoning wherever the prompt does not say otherwise."""
    also_closed_by: str | None = None
    """Another marker that ends the reasoning, and belongs to the answer: models forget the closing tag before it."""
    open: str = OPEN
    close: str = CLOSE
    """The tags around it."""

    def begins(self, prompt: str) -> Where:
        """Tell where the model is at the end of a prompt: inside of the reasoning, outside, or undecided. Only the
        prompt's end matters."""
        end = prompt[-MOST_BLANK:].rstrip()
        if end.endswith(self.close):
            return "outside"
        return "inside" if self.always or end.endswith(self.open) else "undecided"

    def continues(self, message: str) -> Where:
        """Tell where a model is that continues `message`: inside of the reasoning or outside."""
        return "inside" if message.rfind(self.open) > message.rfind(self.close) else "outside"


class Probe(Protocol):
    """A parser of calls."""

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""


class ReasoningParser:
    """Tells the reasoning of one answer apart. Undecided, it is inside once the text begins with the opening tag.

    White space around the reasoning, and before the answer that follows it, is left out. A call ends the reasoning that
    it is written in, and belongs to the answer.
    """

    def __init__(self, form: ReasoningFormat, where: Where) -> None:
        self._form = form
        self._where = where
        self._begin = where != "outside"
        """Whether an opening tag may still come."""
        self._line: Line | None = None
        """The newest line of what was taken from `_rest`, where markers in it may be examples."""
        self._first = True
        """Whether white space that comes now stands before everything else of its kind."""
        self._ends = markers_of(form.close, *(() if form.also_closed_by is None else (form.also_closed_by,)))
        self._rest = ""
        self._after = False
        """Whether there was reasoning, so that white space may stand before the answer."""
        self._new_probe: Callable[[], Probe] | None = None
        self._probe: Probe | None = None
        """Decides whether a call begins at the marker that is next in `_rest`."""
        self._probed = 0
        """Characters that it has been given."""
        self.ended_by_call = False
        """Whether a call ended the reasoning, so that its closing tag may still come."""

    def look_for_calls(self, begins: Sequence[str], new_probe: Callable[[], Probe], in_prose: bool = False) -> None:
        """End the reasoning where a call begins. `begins`: what calls begin with. `new_probe`: makes a parser whose
        first event tells whether one did. `in_prose`: as `CallParser.in_prose`."""
        self._line = Line() if in_prose else None
        own = self._form.also_closed_by
        self._ends = markers_of(self._form.close, *(() if own is None else (own,)), *begins)
        self._new_probe = new_probe

    @property
    def inside(self) -> bool:
        """Whether what comes now is reasoning."""
        return self._where == "inside"

    @property
    def through(self) -> bool:
        """Whether all that comes is content, as it is."""
        return self._where == "outside" and not self._after

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""
        if self.through:
            return [Content(text)] if text else []
        out: list[Event] = []
        self._rest += text
        if self._begin and not self._opening():
            return out
        if self._where == "inside":
            self._reason(out)
        if self._where == "outside":
            self._answer(out)
        return out

    def finish(self, cut: bool = False) -> list[Event]:
        """End the text: what was held back, the same for reasoning that is cut."""
        out: list[Event] = []
        if self._where == "inside":
            self._reason(out, ended=True)
        rest, self._rest = self._rest, ""
        if self._where == "inside":
            rest = rest.strip() if self._first else rest.rstrip()
            return [*out, Reasoning(rest)] if rest else out
        if self._after:
            rest = rest.lstrip()
        return [*out, Content(rest)] if rest else out

    def _opening(self) -> bool:
        """Take the opening tag, if there is one, however often it is written; whether that is decided."""
        while len(self._rest) - len(text := self._rest.lstrip()) <= MOST_BLANK:
            if self._form.open.startswith(text) and text != self._form.open:
                return False
            if not text.startswith(self._form.open):
                break
            self._rest, self._where = text[len(self._form.open) :], "inside"
        if self._where == "undecided":
            self._where = "outside"
        self._begin = False
        return True

    def _reason(self, out: list[Event], ended: bool = False) -> None:
        """Take reasoning. `ended`: no more text comes."""
        if self._first:
            self._rest = self._rest.lstrip()
            if not self._rest:
                return
            self._first = False
        end: re.Match[str] | None = None
        certain, cut = True, len(self._rest)
        if not self._ends.absent(self._rest):
            end, certain, passed = self._end(ended)
            cut = end.start() if end is not None else max(passed, len(self._rest) - self._ends.held(self._rest))
        body = self._rest[:cut]
        shown = body[: max(len(body.rstrip()), len(body) - MOST_BLANK)]
        if shown:
            out.append(Reasoning(shown))
        if end is None or not certain:
            self._pass(len(shown))
            return
        self._rest = self._rest[end.end() if end.group() == self._form.close else end.start() :]
        self._where, self._after = "outside", True
        self.ended_by_call = end.group() != self._form.close

    def _end(self, ended: bool) -> tuple[re.Match[str] | None, bool, int]:
        """The end of the reasoning in `_rest`, whether it is certain that it is one, and how many characters are none
        for certain."""
        passed = 0
        while (end := self._ends.search(self._rest, passed)) is not None:
            if end.group() in (self._form.close, self._form.also_closed_by):
                break
            found = self._call_at(end.start()) if not self._quoted(end.start()) else False
            if found is None and not ended:
                return end, False, passed
            if found is True:
                break
            passed = end.start() + (MOST_PROBE if found is False and self._probed >= MOST_PROBE else 1)
            self._probe = None
        return end, True, passed

    def _quoted(self, place: int) -> bool:
        """Whether what stands at this place of `_rest` is an example of a marker."""
        if self._line is None:
            return False
        line = copy(self._line)
        line.add(self._rest[:place])
        return line.in_code

    def _pass(self, count: int) -> None:
        """Take as many characters of the reasoning from `_rest`."""
        if self._line is not None and count:
            self._line.add(self._rest[:count])
        self._rest = self._rest[count:]

    def _call_at(self, place: int) -> bool | None:
        """Whether a call begins at this place of `_rest`; None: more text will tell. It is fed to a parser of calls, a
        little at a time and every character once."""
        if self._probe is None:
            assert self._new_probe is not None, "markers of calls are looked for with it alone"
            self._probe, self._probed = self._new_probe(), 0
        while text := self._rest[place + self._probed :][: min(_PROBE_STEP, MOST_PROBE - self._probed)]:
            self._probed += len(text)
            if events := self._probe.push(text):
                self._probed = 0
                return isinstance(events[0], CallBegin)
        return False if self._probed >= MOST_PROBE else None

    def _answer(self, out: list[Event]) -> None:
        text = self._rest
        while self._after:
            text = text.lstrip()
            if self._form.close.startswith(text) and text != self._form.close:
                self._rest = text
                return
            if not text.startswith(self._form.close):
                break
            text = text[len(self._form.close) :]  # written once more
        self._rest = ""
        if text:
            self._after = False
            out.append(Content(text))


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
