"""One JSON object in text that arrives in pieces: passed on as far as it goes, as JSON whatever the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from deploy.text.mending import without_halves

MOST_DEPTH: Final = 200
"""Objects and arrays in each other; clients' parsers give up at some depth, too."""

_PLAIN: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"[^'\"\\\x00-\x1f]+"),
    "”": re.compile(r"[^”\"\\\x00-\x1f]+"),
    "`": re.compile(r"[^`\"\\\x00-\x1f]+"),
}
"""Text within a string that stands in JSON as it is, by the quotation mark that ends the string."""
_QUOTES: Final = {'"': '"', "'": "'", "“": "”"}
"""Quotation marks that begin a string, and those that end it."""
_QUOTES_OF_VALUES: Final = {**_QUOTES, "`": "`"}
"""Those of an object's values, which JavaScript's templates are, too. Elsewhere it is a fence."""
_OPENS: Final = {"{": "{", "[": "[", "(": "["}
"""Brackets of values, and those that they are in JSON: tuples are arrays."""
_PREFIXES: Final = frozenset(("u", "b", "f", "r", "br", "rb", "fr", "rf"))
"""Letters before Python's strings."""
_BEHIND_VALUES: Final = frozenset(",}]")
_SPACES: Final = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]+")
_WITHIN_WORDS: Final = frozenset("-+._")
_IN_WORD = re.compile(r"[\w\-+.]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ODD_NUMBER = re.compile(r"\+?(?P<sign>-?)(?P<whole>0|[1-9][0-9]*)?(?:\.(?P<part>[0-9]*))?(?P<power>[eE][-+]?[0-9]+)?")
_WORDS: Final = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
    "undefined": "null",
    "TRUE": "true",
    "FALSE": "false",
    **dict.fromkeys(("NULL", "Null", "nil"), "null"),
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "null"),
}
_MOST_WORD: Final = 400
_MOST_COMMENT: Final = 400
"""Characters of a comment: one that does not end must not swallow the rest of an answer."""
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_ENDS: Final = {"{": "}", "[": "]"}


_encoded: Final = json.JSONEncoder(ensure_ascii=False).encode
_HIGH_HALVES: Final = frozenset(f"d{digit}" for digit in "89ab")
_LOW_HALVES: Final = frozenset(f"d{digit}" for digit in "cdef")
"""Digits that escapes of halves of surrogate pairs begin with: of the first half, and of the second one."""
_NO_CHARACTER: Final = "\\ufffd"


def in_json(value: Any) -> str:
    """The text of a value in JSON, characters beyond ASCII as they are, and U+FFFD for halves of surrogate pairs."""
    return without_halves(_encoded(value))


class State(Enum):
    """State of the reading of an object."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class JsonObject:
    """Follows RFC 8259, and takes what models write in its place: values as Python or JavaScript spell them, other
    quotation marks, also within a string, three of them and letters before them, words without any, commas too many or
    missing, tuples, brackets that are not closed, comments, control characters in strings and escapes that there are
    not. What is passed on is JSON, and valid JSON is passed on as it
    is. A word that is no value is a string, and a number with zeros before it, too, so that nothing of it is lost."""

    __slots__ = (
        "_closed",
        "_comment",
        "_commented",
        "_expect",
        "_fresh",
        "_half",
        "_held",
        "_key",
        "_marks",
        "_quote",
        "_raw",
        "_stack",
        "_triple",
        "_word",
        "state",
    )

    def __init__(self) -> None:
        self.state = State.OPEN
        self._expect = "begin"
        self._stack: list[str] = []
        self._word = ""
        """A value or key without quotation marks, or an escape, so far."""
        self._half = ""
        """Escape of the first half of a surrogate pair, whose second half comes next or is missing."""
        self._key = False
        """Whether the string or word that is open is a key."""
        self._quote = '"'
        """What ends the string that is open."""
        self._fresh = self._raw = self._triple = False
        """Whether the string that is open has no character yet, has backslashes that are none but themselves, and ends
        with three quotation marks."""
        self._marks = 0
        """How many of three quotation marks there were."""
        self._closed = ""
        """The quotation mark that may end a value, and the white space behind it: what follows tells."""
        self._held = ""
        """A comma and the white space behind it, which are left out where nothing follows."""
        self._comment = ""
        """What the comment that is open began with."""
        self._commented = 0
        """Characters of that comment."""

    @property
    def as_it_is(self) -> Callable[[str], object | None] | None:
        """Tells whether all of a text that comes now is passed on as it is and changes nothing. None where none is."""
        in_string = self._expect == "string" and not self._fresh and not self._marks
        return _PLAIN[self._quote].fullmatch if in_string else None

    def feed(self, text: str) -> tuple[int, str]:
        """Add `text`; returns how many of its characters belong to the object, and those as they are to be passed on.
        `state` says whether it goes on; of what broke it, nothing is taken."""
        out: list[str] = []
        place = 0
        end = len(text)
        if self._expect == "begin" and text.startswith('{"'):  # the common case, made short
            out.append('{"')
            self._stack, self._key, self._quote, self._expect = ["{"], True, '"', "string"
            self._fresh, place = True, 2
        while place < end and self.state is State.OPEN:
            if self._expect == "string":
                plain = _PLAIN[self._quote].match(text, place)
                if text[place] == self._quote:
                    place += 1
                    if not self._triple and (self._key or text[place : place + 1] in _BEHIND_VALUES):
                        out.append('"')  # the common case, made short
                        self._expect = "colon" if self._key else "comma"
                    else:
                        self._end_string()
                elif self._marks:
                    out.append(('\\"' if self._quote == '"' else self._quote) * self._marks)
                    self._marks = 0
                elif plain is not None:
                    out.append(plain.group())
                    place, self._fresh = plain.end(), False
                else:
                    place += self._string(text, place, out)
                    self._fresh = False
            elif self._expect in _IN_ESCAPE:
                place += self._string(text, place, out)
            else:
                place += self._outside(text, place, out)
        return place, "".join(out)

    def closing(self) -> str | None:
        """Return the text that completes the object where it was left or broken; None where more is missing than its
        end."""
        if self._comment or self._expect not in _MAY_END or not 0 < len(self._stack) <= MOST_DEPTH:
            return None
        word = ""
        if self._expect == "word":
            if self._key or len(self._word) > _MOST_WORD:
                return None
            word = _value_of(self._word)
        return word + "".join(_ENDS[bracket] for bracket in reversed(self._stack))

    def _end_string(self) -> None:
        """Take the quotation mark that ends the value that is open, or one of three that do."""
        if self._triple:
            self._marks += 1
            if self._marks < len('"""'):
                return
            self._triple, self._marks = False, 0
        self._closed, self._expect = '"', "comma"

    def _behind_string(self, char: str, out: list[str]) -> int:
        """Take what stands behind the quotation mark of a value, which is within the string where words go on."""
        if char in _SPACES:
            self._closed += char
            return 1
        closed, self._closed = self._closed, ""
        if self._fresh and char == self._quote and closed == '"' and char in "\"'":
            self._triple, self._expect, self._fresh = True, "string", False
            return 1
        if char.isalnum() or char in ".!?\\":
            out.append("\\" + closed[0] + in_json(closed[1:])[1:-1])
            self._expect = "string"
            return 0
        out.append(closed)
        return 0

    def _string(self, text: str, place: int, out: list[str]) -> int:
        """Take a character that is not passed on as it is, or a part of an escape, and that does not end the string."""
        char = text[place]
        if self._expect == "half":
            if char == "\\" and not self._raw:
                self._expect = "escape"
                return 1
            self._end_half(out)
            self._expect = "string"
            return 0
        if self._expect == "escape":
            if char != "u":
                self._end_half(out)
            return self._escape(char, out)
        if self._expect == "hex":
            if char not in _HEX:
                self._end_half(out)
                out.append("\\" + self._word)
                self._word, self._expect = "", "string"
                return 0
            self._word += char
            if len(self._word) == len("\\u0000"):
                word, self._word, self._expect = self._word, "", "string"
                self._escaped(word, out)
        elif char == "\\" and self._raw:
            out.append("\\\\")
        elif char == "\\":
            self._expect = "escape"
        else:
            out.append('\\"' if char == '"' else f"\\u{ord(char):04x}")
        return 1

    def _escaped(self, word: str, out: list[str]) -> None:
        """Take an escape by number. Of a surrogate pair both halves are passed on together, and a half alone is
        U+FFFD, as clients' parsers refuse it."""
        begins = word[2:4].lower()
        if begins in _LOW_HALVES:
            out.append(self._half + word if self._half else _NO_CHARACTER)
            self._half = ""
            return
        self._end_half(out)
        if begins in _HIGH_HALVES:
            self._half, self._expect = word, "half"
        else:
            out.append(word)

    def _end_half(self, out: list[str]) -> None:
        """The second half of a surrogate pair did not come."""
        if self._half:
            out.append(_NO_CHARACTER)
            self._half = ""

    def _escape(self, char: str, out: list[str]) -> int:
        """Take the character behind a backslash. One that needs none stands for itself, with the backslash unless it is
        a quotation mark."""
        self._expect = "string"
        if char == "u":
            self._word, self._expect = "\\u", "hex"
        elif char in _ESCAPES:
            out.append("\\" + char)
        elif char in _PLAIN:
            out.append(char)
        elif char < " ":
            out.append("\\n" if char == "\n" else f"\\\\\\u{ord(char):04x}")
        else:
            out.append("\\\\" + char)
        return 1

    def _outside(self, text: str, place: int, out: list[str]) -> int:
        char = text[place]
        if self._comment:
            return self._in_comment(char)
        if self._closed:
            return self._behind_string(char, out)
        if self._expect == "word":
            if (more := _IN_WORD.match(text, place)) is not None:
                free = _MOST_WORD - len(self._word)
                self._word += more.group()[: free + 1]
                return more.end() - place if more.end() - place <= free else free + self._broken()
            if char in "\"'" and not self._key and self._word.lower() in _PREFIXES:
                self._begin_string(char, out, raw="r" in self._word.lower())
                self._word = ""
                return 1
            out.append(in_json(self._word) if self._key else _value_of(self._word))
            self._word, self._expect = "", "colon" if self._key else "comma"
        space = _SPACE.match(text, place) if char in _SPACES else None
        if space is not None and self._expect != "begin":
            if self._held:
                self._held += space.group()
            else:
                out.append(space.group())
            return space.end() - place
        if char == "/" and self._expect != "begin":
            self._comment, self._commented = char, 0
            return 1
        return 1 if self._take(char, out) else self._broken()

    def _take(self, char: str, out: list[str]) -> bool:
        """Take one character outside of strings and words. Return whether it may stand here."""
        expect = self._expect
        if char in "}])":
            return self._close("{" if char == "}" else "[", out)
        if char in ",;":
            return self._comma(out)
        if expect == "value" and char == ">":
            return True  # of an arrow, in place of a colon
        if expect == "colon" and char in ":=":
            self._expect = "value"
            out.append(":")
            return True
        if char == "{" and expect == "first key" and len(self._stack) == 1:
            return True  # doubled, as in templates
        if expect == "comma" and (char in _QUOTES or (char in "{[" and self._stack[-1] == "[")):
            self._held, expect = ", ", self._behind_comma()
        begins_word = char.isalnum() or char in _WITHIN_WORDS
        if expect in ("key", "first key"):
            if char not in _QUOTES and not begins_word:
                return False
            self._key = True
        elif expect in ("value", "item", "first item", "begin"):
            quotes = _QUOTES_OF_VALUES if expect == "value" else _QUOTES
            begins = char == "{" if expect == "begin" else begins_word or char in quotes or char in _OPENS
            if not begins:
                return False
            self._key = False
        else:
            return False
        out.append(self._held)
        self._held = ""
        if char in _QUOTES_OF_VALUES:
            self._begin_string(char, out)
        elif char in _OPENS:
            bracket = _OPENS[char]
            out.append(bracket)
            self._stack.append(bracket)
            self._expect = "first key" if bracket == "{" else "first item"
            return len(self._stack) <= MOST_DEPTH
        else:
            self._word, self._expect = char, "word"
        return True

    def _begin_string(self, mark: str, out: list[str], raw: bool = False) -> None:
        out.append('"')
        self._quote, self._expect = _QUOTES_OF_VALUES[mark], "string"
        self._fresh, self._raw = True, raw

    def _behind_comma(self) -> str:
        return "key" if self._stack[-1] == "{" else "item"

    def _comma(self, out: list[str]) -> bool:
        """One where nothing stands before is left out."""
        if self._expect == "value":
            out.append("null")
        elif self._expect != "comma":
            return self._expect in ("key", "first key", "item", "first item")
        self._held, self._expect = ",", self._behind_comma()
        return True

    def _close(self, bracket: str, out: list[str]) -> bool:
        """End what the bracket began, and whatever is still open within."""
        if self._expect in ("begin", "colon") or bracket not in self._stack:
            return False
        if self._expect == "value":
            out.append("null")
        out.append(self._held[1:])
        self._held = ""
        while (ended := self._stack.pop()) != bracket:
            out.append(_ENDS[ended])
        out.append(_ENDS[bracket])
        self._expect = "comma"
        if not self._stack:
            self.state = State.DONE
        return True

    def _in_comment(self, char: str) -> int:
        self._commented += 1
        if self._commented > _MOST_COMMENT:
            return self._broken()
        if self._comment == "/":
            self._comment += char
            return 1 if char in "/*" else self._broken()
        if self._comment == "//":
            self._comment = "" if char == "\n" else "//"
        elif char == "*":
            self._comment = "/**"
        else:
            self._comment = "" if self._comment == "/**" and char == "/" else "/*"
        return 1

    def _broken(self) -> int:
        self.state = State.BROKEN
        return 0


_IN_ESCAPE: Final = ("escape", "hex", "half")
_MAY_END: Final = ("comma", "key", "first key", "item", "first item", "word")


def _value_of(word: str) -> str:
    """The JSON of a value that was written without quotation marks."""
    if _NUMBER.fullmatch(word):
        return word
    if word in _WORDS:
        return _WORDS[word]
    odd = _ODD_NUMBER.fullmatch(word)
    if odd is not None and (odd["whole"] or odd["part"]):
        part = f".{odd['part']}" if odd["part"] else ""
        return f"{odd['sign']}{odd['whole'] or '0'}{part}{odd['power'] or ''}"
    return in_json(word)
