"""The contract of what takes a model's text and says what is what, and what its implementations share.

A parser gets the text in pieces, cut anywhere. What it makes of them, with neighbouring pieces of one kind joined,
depends on the whole text alone. Nothing a model writes makes a parser fail: what is no tool call after all is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from deploy.parsing.events import CallBegin, CallBroken, CallEnd, Content, Event
from deploy.parsing.markers import Markers

MOST_NAME: Final = 256
"""Characters of a tool's name, with what stands around it."""
_NAME = re.compile(r"[^\s<>\"'`{}\[\]()|｜]+")

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""
MakeId = Callable[[], str]
"""A new id for a call, of models that write none."""


class Parser(Protocol):
    """Of one answer."""

    def push(self, text: str) -> list[Event]:
        """Add text; returns what is certain now."""

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""


def is_name(name: str) -> bool:
    """Whether this can be a tool's name."""
    return len(name) <= MOST_NAME and _NAME.fullmatch(name) is not None


class CallParser:
    """What the parsers of tool calls share: text up to a marker is content, and behind it stand states.

    A state is a method that takes from the beginning of `_rest` what it understands, and returns whether to go on with
    the next. What it took since the call began is in `_raw`, to become content if there is no call after all. Blanks
    before, between and behind calls are no content.
    """

    def __init__(self, markers: Markers) -> None:
        """`markers`: all that ends content."""
        self._markers = markers
        self._rest = ""
        self._raw: list[str] = []
        self._out: list[Event] = []
        self._blank: list[str] | None = []
        """White space that is content if other content follows; None behind other content."""
        self._state: Callable[[], bool] = self._content
        self._calls = 0
        self._open = False
        """Whether a call has begun and not ended."""

    def push(self, text: str) -> list[Event]:
        """See `Parser`."""
        if self._blank is None and not self._rest and self._state == self._content and self._markers.absent(text):
            return [Content(text)] if text else []  # the common case, made short
        self._rest += text
        self._out = []
        while self._rest and self._state():
            pass
        return self._out

    def finish(self) -> list[Event]:
        """See `Parser`."""
        self._out = []
        if self._state == self._content:
            self._say(self._rest)
        else:
            self._give_up(self._rest)
        if self._blank and not self._calls:
            self._out.append(Content("".join(self._blank)))
        self._rest, self._blank = "", None
        return self._out

    def _marker(self, marker: str) -> None:
        """A marker ended content: take the state that it leads to."""
        raise NotImplementedError

    def _content(self) -> bool:
        found = self._markers.search(self._rest)
        if found is None:
            cut = len(self._rest) - self._markers.held(self._rest)
            self._say(self._rest[:cut])
            self._rest = self._rest[cut:]
            return False
        self._say(self._rest[: found.start()])
        self._rest = self._rest[found.end() :]
        self._raw = [found.group()]
        self._marker(found.group())
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._blank is not None:
            self._blank.append(text)
            if text.isspace():
                return
            text, self._blank = "".join(self._blank), None
        self._out.append(Content(text))

    def _take(self, count: int) -> str:
        """The next `count` characters, which now belong to a call."""
        taken, self._rest = self._rest[:count], self._rest[count:]
        self._raw.append(taken)
        return taken

    def _skip_space(self) -> None:
        self._take(len(self._rest) - len(self._rest.lstrip()))

    def _begin(self, call_id: str, name: str) -> None:
        self._out.append(CallBegin(self._calls, call_id, name))
        self._open = True

    def _end(self) -> None:
        """The call is complete."""
        self._out.append(CallEnd(self._calls))
        self._open = False
        self._calls += 1
        self._raw = []
        self._blank = []

    def _give_up(self, more: str = "") -> bool:
        """There is no call after all: what was taken, and `more`, is content."""
        if self._open:
            self._out.append(CallBroken(self._calls))
            self._open = False
            self._calls += 1
        raw, self._raw = "".join(self._raw) + more, []
        self._say(raw)
        self._state = self._content
        return True
