"""The contract of what takes a model's text and says what is what, and what its implementations share.

A parser gets the text in pieces, cut anywhere. What it makes of them, with neighbouring pieces of one kind joined,
depends on the whole text alone. Nothing a model writes makes a parser fail: what is no tool call after all is content,
less the tokens that calls are marked with, which never are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Final, Protocol

from typing_extensions import override

from deploy.parsing.events import CallBegin, CallBroken, CallEnd, Content, Event
from deploy.parsing.markers import CLOSE, Line, Markers, markers_of

MOST_NAME: Final = 256
"""Characters of a tool's name, with what stands around it."""
_NAME = re.compile(r"[^\s<>\"'`{}\[\]()|｜]+")

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""
MakeId = Callable[[], str]
"""A new id for a call, of models that write none."""


_KIND = re.compile(r"(?:functions?|tools?)[.:/]")


class Parser(Protocol):
    """Parser of one answer."""

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""

    def finish(self, cut: bool = False) -> list[Event]:
        """The text has ended: what was held back. `cut`: it is not the model that ended it, so more was to come."""


def is_name(name: str) -> bool:
    """Whether this can be a tool's name."""
    return len(name) <= MOST_NAME and _NAME.fullmatch(name) is not None


def known_name(name: str, schemas: Schemas) -> str:
    """The tool that is meant by a name in quotation marks, with a colon or parentheses behind it, or with the word for
    its kind before it; `name` without white space where these are not the tool's own and none of the request's is."""
    if name.strip() in schemas:
        return name.strip()
    bare = name.strip().strip("`\"':").removesuffix("()").strip("`\"': ")
    without_kind = _KIND.sub("", bare, count=1)
    found = next((found for found in (bare, without_kind) if found in schemas), None)
    return found or in_other_case(without_kind, schemas) or name.strip()


def in_other_case(name: str, schemas: Schemas) -> str | None:
    """The only tool whose name is `name` but for the case of letters; None if there is none."""
    fitting = [known for known in schemas if known.casefold() == name.casefold()]
    return fitting[0] if len(fitting) == 1 else None


class CallParser(Parser):
    """Base of the parsers of tool calls: text up to a marker is content, and behind it stand states.

    A state is a method that takes from the beginning of `_rest` what it understands, and returns whether to go on with
    the next. What it took since the call began is in `_raw`, to become content if there is no call after all. White
    space before, between and behind calls is no content, and markers never are.
    """

    begins: ClassVar[tuple[str, ...]]
    """Markers behind which a call may stand."""
    ends_content: ClassVar[tuple[str, ...]]
    """Markers that end content."""
    control: ClassVar[re.Pattern[str]]
    """Markers that are no content whatever stands around them."""
    in_prose: ClassVar[bool] = False
    """Whether models write the markers in words about calls, too, as they would any text: what begins a piece of code
    within a line is an example then."""
    close: ClassVar[str] = CLOSE
    """The closing tag of the model's reasoning."""

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        self._markers = self._own_markers()
        self._schemas = schemas
        self._make_id = make_id
        self._rest = ""
        self._raw: list[str] = []
        self._out: list[Event] = []
        self._blank: list[str] | None = []
        """White space that is content if other content follows; None behind other content."""
        self._state: Callable[[], bool] = self._content
        self._marked = False
        """Whether there was a marker."""
        self._calls = 0
        self._called_tool = ""
        """The tool of the call that has begun and not ended; "" where none has."""
        self._cut = False
        """Whether the text has ended before the model ended it."""
        self._drops_close = False
        """Whether a closing tag of the reasoning may still come."""
        self._line = Line()
        """What the marker that comes next stands behind."""
        self._plain = False
        """Whether text without markers that comes now is content as it is. As the two below, a state says so where it
        leaves off."""
        self._more: Callable[[str], list[Event] | None] | None = None
        """Takes a text that comes now and goes on with a call's arguments; returns None for any other, untaken."""
        self._ends_wait: Callable[[str], object | None] | None = None
        """Finds characters without which more text changes nothing while `_rest` is shorter than a name."""

    @classmethod
    @cache
    def _own_markers(cls) -> Markers:
        """What ends content."""
        return markers_of(*cls.ends_content, cls.close)

    @override
    def push(self, text: str) -> list[Event]:
        if self._plain:  # the two common cases, made short
            if self._markers.first(text) is None:
                if self.in_prose:
                    self._line.add(text)
                return [Content(text)] if text else []
        elif self._more is not None:
            if (events := self._more(text)) is not None:
                return events
            self._more = None
        self._rest += text
        if self._ends_wait is not None:
            if len(self._rest) < MOST_NAME and self._ends_wait(text) is None:
                return []
            self._ends_wait = None
        self._plain, self._out = False, []
        while self._rest and self._state():
            pass
        return self._out

    @override
    def finish(self, cut: bool = False) -> list[Event]:
        self._out, self._cut = [], cut
        while self._state != self._content:
            self._ended()
            while self._rest and self._state():
                pass
        self._say(self._rest)
        if self._blank and not self._marked:
            self._out.append(Content("".join(self._blank)))
        self._rest, self._blank = "", None
        return self._out

    @property
    def held(self) -> int:
        """Characters that are held back and will be content unless a call begins."""
        return len(self._rest) + sum(map(len, self._blank or ())) if self._state == self._content else 0

    def ends_reasoning(self) -> None:
        """A call in the reasoning ended it, so what comes may hold the closing tag that is due."""
        self._drops_close = True

    def fresh(self) -> CallParser:
        """Make another parser of this kind, for text that may turn out to hold no call."""
        return type(self)(self._schemas, str)

    def _marker(self, marker: str) -> None:
        """A marker ended content: take the state that it leads to, if any."""
        raise NotImplementedError

    def _ended(self) -> None:
        """The text has ended in this state, which is not `_content`: end what is complete, and leave the state."""
        rest, self._rest = self._rest, ""
        self._give_up(rest)

    def _content(self) -> bool:
        if self._rest in self.ends_content and not self.in_prose:  # the common case, made short
            marker, self._rest = self._rest, ""
            self._found(marker)
            return False
        found = self._markers.search(self._rest)
        if found is None:
            cut = len(self._rest) - self._markers.held(self._rest)
            self._say(self._rest[:cut])
            self._rest = self._rest[cut:]
            self._plain = self._blank is None and not self._rest
            return False
        self._say(self._rest[: found.start()])
        self._rest = self._rest[found.end() :]
        if self.in_prose and found.group() in self.begins and self._line.in_code:
            self._marked = True
            return True
        if found.group() == self.close:
            if not self._drops_close:
                self._say(self.close)
            elif self._blank is None:
                self._blank = []
            else:
                self._blank, self._state = [], self._behind_close
            return True
        self._found(found.group())
        return True

    def _found(self, marker: str) -> None:
        """A marker has come, which was taken from `_rest`."""
        self._blank, self._marked = self._blank or [], True
        self._raw = [marker]
        self._marker(marker)

    def _behind_close(self) -> bool:
        """State behind the closing tag that followed a call: white space before the answer is left out."""
        self._rest = self._rest.lstrip()
        if not self._rest:
            return False
        self._state = self._content
        return True

    def _leave_close_out(self, place: int = 0) -> bool | None:
        """Leave out the closing tag of the reasoning if it stands at this place of `_rest`, within a call: models end
        their reasoning in the middle of one. Return whether it did; None where more text will tell."""
        if self._rest[place : place + 1] not in ("", self.close[0]):  # the common case, made short
            return False
        if self._rest.startswith(self.close, place):
            self._rest = f"{self._rest[:place]}\n{self._rest[place + len(self.close) :]}"
            return True
        return None if self.close.startswith(self._rest[place:]) else False

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.in_prose:
            self._line.add(text)
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._out.append(Content(text))

    def _cleaned(self, text: str) -> str:
        """`text` that was taken for a part of a call, as content."""
        text = self.control.sub("", text)
        return text.replace(self.close, "") if self._drops_close else text

    def _take(self, count: int) -> str:
        """The next `count` characters, which now belong to a call."""
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._raw.append(taken)
        return taken

    def _put_back(self, text: str) -> None:
        """Take back `text`, which was taken last."""
        left = len(text)
        while left > 0:
            last = self._raw.pop()
            if len(last) > left:
                self._raw.append(last[: len(last) - left])
            left -= len(last)
        self._rest = text + self._rest

    def _skip_space(self) -> None:
        if self._rest[:1].isspace():
            self._take(len(self._rest) - len(self._rest.lstrip()))

    def _begin(self, call_id: str, name: str) -> None:
        self._out.append(CallBegin(self._calls, call_id, name))
        self._called_tool = name

    def _end(self) -> None:
        """The call is complete."""
        self._out.append(CallEnd(self._calls))
        self._called_tool = ""
        self._calls += 1
        self._raw = []
        self._blank = []

    def _give_up(self, more: str = "") -> bool:
        """Give up the call, as there is none after all: what was taken, and `more`, is content, less what is never
        content."""
        if self._called_tool:
            self._out.append(CallBroken(self._calls))
            self._called_tool = ""
            self._calls += 1
        raw, self._raw = "".join(self._raw) + more, []
        self._say(self._cleaned(raw))
        self._state = self._content
        return True
