"""Text that is not quite what it should be, made so: arguments of calls that are no JSON object, and halves of
surrogate pairs. A chat holds what was said before, and must be answered whatever that is."""

from __future__ import annotations

import json
import re
from typing import Any, AnyStr, Final

from pydantic_core import from_json

_REPLACEMENT: Final = "\ufffd"
_HALF: Final = re.compile("[\ud800-\udfff]")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPED_HALF: Final = rf"{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}"
_HALF_IN_BYTES: Final = re.compile(_ESCAPED_HALF.encode())
_HALF_IN_TEXT: Final = re.compile(_ESCAPED_HALF)
_MOST_HALVES: Final = 10_000
"""Most surrogate halves of a text that are replaced: each is looked at by itself."""
_LONGEST_RUN: Final = 64
"""Backslashes in a row that are counted."""
_ODD: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|,(?=\s*[}\]])', re.DOTALL)
"""A string, closed or not, or a comma that nothing follows."""
_CONTROL: Final = re.compile(r"[\x00-\x1f]")


def without_halves(text: str) -> str:
    """`text` with U+FFFD for every half of a surrogate pair, which no encoding can write."""
    return text if text.isascii() else _HALF.sub(_REPLACEMENT, text)


def with_whole_escapes(raw: bytes) -> bytes:
    """JSON in UTF-8 with U+FFFD for every escaped half of a surrogate pair. JavaScript writes those where a string was
    cut within a character. Of very many some are left."""
    return _HALF_IN_BYTES.sub(_whole, raw, count=_MOST_HALVES)


def whole_json(text: str) -> str:
    """JSON with U+FFFD for every half of a surrogate pair, escaped or not. Strict parsers refuse the former, and no
    encoding can write the latter."""
    if "\\u" in text:
        text = _HALF_IN_TEXT.sub(_whole, text, count=_MOST_HALVES)
    return without_halves(text)


def _whole(match: re.Match[AnyStr]) -> AnyStr:
    text, begin = match.string, match.start()
    backslash: AnyStr
    escaped: AnyStr
    backslash, escaped = ("\\", "\\ufffd") if isinstance(text, str) else (b"\\", b"\\ufffd")
    before = text[max(begin - _LONGEST_RUN, 0) : begin]
    run = len(before) - len(before.rstrip(backslash))
    # The backslash of this one is escaped itself where an odd number stands before it.
    return match.group() if run % 2 or run == _LONGEST_RUN else escaped


def object_of(text: str) -> dict[str, Any]:
    """The JSON object that `text` is or was going to be.

    One that was cut ends where it was cut; commas that nothing follows are left out; control characters within strings
    and halves of surrogate pairs are allowed; what follows the object is dropped. An array of one object is that
    object, and so is a string that holds one. Everything else is an empty object.
    """
    value = _value_of(text)
    if isinstance(value, str):
        value = _value_of(value)
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    return value if isinstance(value, dict) else {}


def _value_of(text: str) -> Any:
    text = whole_json(text).strip()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    text = _ODD.sub(_mended, text)
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    try:
        return from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None


def _mended(match: re.Match[str]) -> str:
    found = match.group()
    return "" if found == "," else _CONTROL.sub(lambda control: f"\\u{ord(control.group()):04x}", found)
