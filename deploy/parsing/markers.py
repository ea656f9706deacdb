"""Markers found in text that arrives in pieces."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

OPEN: Final = "<think>"
CLOSE: Final = "</think>"
"""The tags that most models write around their reasoning."""


class Markers:
    """A few fixed strings. Where several match at one place the longest is found."""

    __slots__ = ("_beginnings", "_firsts", "_longest", "_pattern", "first")

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._beginnings = frozenset(marker[:end] for marker in markers for end in range(len(marker) + 1))
        self.first = re.compile("[" + re.escape("".join(sorted({marker[0] for marker in markers}))) + "]").search
        """Finds a character in a text that begins a marker."""
        self._firsts = frozenset(marker[0] for marker in markers)
        self._longest = len(longest_first[0])

    def search(self, text: str, begin: int = 0) -> re.Match[str] | None:
        """The first marker in `text` from `begin` on."""
        return self._pattern.search(text, begin)

    def held(self, text: str) -> int:
        """Return the number of characters at the end of `text` that may begin a marker. `text` holds no whole one."""
        place = max(0, len(text) - self._longest + 1)
        while (found := self.first(text, place)) is not None:
            if text[found.start() :] in self._beginnings:
                return len(text) - found.start()
            place = found.start() + 1
        return 0

    def absent(self, text: str) -> bool:
        """Whether `text` neither holds nor begins a marker; said at once."""
        return self.first(text) is None

    def at(self, text: str) -> str | None:
        """The marker that `text` begins with."""
        if text[:1] not in self._firsts:  # the common case, made short
            return None
        match = self._pattern.match(text)
        return match.group() if match is not None else None

    def begun(self, text: str) -> bool:
        """Whether `text` is the beginning of a marker."""
        return text in self._beginnings


def begun_pattern(literal: str) -> str:
    """A pattern for all beginnings of `literal`, the empty one among them, but for the whole."""
    pattern = ""
    for char in reversed(literal[:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern


@lru_cache(maxsize=128)
def markers_of(*markers: str) -> Markers:
    """`Markers`, made once for all answers."""
    return Markers(*markers)


class Line:
    """The newest line of a text in Markdown."""

    __slots__ = ("_tail", "_ticks")

    def __init__(self) -> None:
        self._ticks = 0
        self._tail = ""

    def add(self, text: str) -> None:
        """Add what comes next."""
        if "`" not in text and "\n" not in text:  # the common case, made short
            self._tail = "" if text else self._tail
            return
        begin = text.rfind("\n") + 1
        self._ticks = text.count("`", begin) + (0 if begin else self._ticks)
        self._tail = (self._tail + text)[-2:]

    @property
    def in_code(self) -> bool:
        """Whether a piece of code within the line begins here. A fence, which models put around calls, is none."""
        return self._ticks % 2 == 1 and self._tail.endswith("`") and self._tail != "``"
