"""One JSON object in text that arrives in pieces: passed on while it is valid, as far as it goes."""

from __future__ import annotations

import re
import string
from enum import Enum
from typing import Final

MOST_DEPTH: Final = 200
"""Objects and arrays in each other; clients' parsers give up at some depth, too."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_IN_WORD: Final = frozenset(f"-+.{string.digits}{string.ascii_letters}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS: Final = ("true", "false", "null")
_MOST_DIGITS: Final = 400
_HEX: Final = frozenset("0123456789abcdefABCDEF")


class State(Enum):
    """State of the reading of an object."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class JsonObject:
    """Follows RFC 8259. Control characters inside of strings, which models write and JSON forbids, become escapes."""

    __slots__ = ("_expect", "_hex", "_key", "_stack", "_word", "state")

    def __init__(self) -> None:
        self.state = State.OPEN
        self._expect = "begin"
        self._stack: list[str] = []
        self._word = ""
        """A number or literal so far."""
        self._key = False
        """Whether the string that is open is a key."""
        self._hex = 0
        """Hexadecimal digits of an escape that are still to come."""

    def feed(self, text: str) -> tuple[int, str]:
        """Add `text`; returns how many of its characters belong to the object, and those as they are to be passed on.
        `state` says whether it goes on; of what broke it, nothing is taken."""
        out: list[str] = []
        place = 0
        while place < len(text) and self.state is State.OPEN:
            taken = self._string(text, place, out) if self._expect in _IN_STRING else self._outside(text, place, out)
            place += taken
        return place, "".join(out)

    def _string(self, text: str, place: int, out: list[str]) -> int:
        char = text[place]
        if self._expect == "hex":
            if char not in _HEX:
                return self._broken()
            self._hex -= 1
            if not self._hex:
                self._expect = "string"
        elif self._expect == "escape":
            if char == "u":
                self._expect, self._hex = "hex", 4
            elif char in '"\\/bfnrt':
                self._expect = "string"
            else:
                return self._broken()
        elif (plain := _PLAIN.match(text, place)) is not None:
            out.append(plain.group())
            return plain.end() - place
        elif char == "\\":
            self._expect = "escape"
        elif char == '"':
            self._expect = "colon" if self._key else "comma"
        else:
            out.append(f"\\u{ord(char):04x}")
            return 1
        out.append(char)
        return 1

    def _outside(self, text: str, place: int, out: list[str]) -> int:
        if self._expect == "word":
            # One by one: what breaks a word must not depend on how many of its characters came together.
            if text[place] in _IN_WORD:
                self._word += text[place]
                if not _may_be_a_value(self._word):
                    return self._broken()
                out.append(text[place])
                return 1
            if self._word not in _WORDS and not _NUMBER.fullmatch(self._word):
                return self._broken()
            self._word, self._expect = "", "comma"
        space = _SPACE.match(text, place)
        if space is not None and self._expect != "begin":
            out.append(space.group())
            return space.end() - place
        char = text[place]
        if not self._take(char):
            return self._broken()
        if self._expect == "word":
            return 0  # taken from its first character on, above
        out.append(char)
        return 1

    def _take(self, char: str) -> bool:
        """Take one character outside of strings and words. Return whether it may stand here."""
        expect, self._expect = self._expect, ""
        if char == "}" and expect in ("comma", "first key"):
            return self._close("{")
        if char == "]" and expect in ("comma", "first value"):
            return self._close("[")
        if char == "," and expect == "comma":
            self._expect = "key" if self._stack[-1] == "{" else "value"
        elif char == ":" and expect == "colon":
            self._expect = "value"
        elif char == '"' and expect in ("key", "first key", "value", "first value"):
            self._key = expect in ("key", "first key")
            self._expect = "string"
        elif char == "{" and expect in ("begin", "value", "first value"):
            return self._open("{", "first key")
        elif char == "[" and expect in ("value", "first value"):
            return self._open("[", "first value")
        elif expect in ("value", "first value") and (char == "-" or (char.isascii() and char.isalnum())):
            self._expect = "word"
        return bool(self._expect)

    def _open(self, bracket: str, expect: str) -> bool:
        self._stack.append(bracket)
        self._expect = expect
        return len(self._stack) <= MOST_DEPTH

    def _close(self, bracket: str) -> bool:
        if self._stack.pop() != bracket:
            return False
        self._expect = "comma"
        if not self._stack:
            self.state = State.DONE
        return True

    def _broken(self) -> int:
        self.state = State.BROKEN
        return 0


_IN_STRING: Final = ("string", "escape", "hex")
_BEGUN = re.compile(r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?")


def _may_be_a_value(word: str) -> bool:
    """Whether `word` begins a literal or a number."""
    if word[0].isalpha():
        return any(literal.startswith(word) for literal in _WORDS)
    return len(word) <= _MOST_DIGITS and _BEGUN.fullmatch(word) is not None
