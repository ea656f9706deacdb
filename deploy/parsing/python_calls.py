"""Calls as Python writes them, `NAME(city="Oslo", days=3)`, which models write where a call of their own form should
stand, alone, one behind the other or in a list."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from typing_extensions import override

from deploy.parsing.json_body import JsonBody
from deploy.parsing.json_object import JsonObject, State
from deploy.parsing.parser import MOST_NAME, known_name
from deploy.parsing.schema_types import expression_of, properties_of

_LEAD = re.compile(r"\s*+(?:```[A-Za-z_]*+[ \t]*+\n\s*+)?+(?P<list>\[)?\s*+")
_LEAD_BEGUN = re.compile(r"\s*(?:`{1,2}|```[A-Za-z_]*[ \t]*)")
_NAME: Final = r"[A-Za-z_][\w.\-]*+"
_HEAD = re.compile(rf"(?P<name>{_NAME})\(\s*+(?=(?P<next>\S))")
_HEAD_BEGUN = re.compile(rf"(?:{_NAME}(?:\(\s*+)?+)?+")
_PLAIN = re.compile(r"[^'\"()\[\]{}<]+")
_WITHIN: Final = {mark: re.compile(rf"[^{mark[0]}\\]+") for mark in ('"', "'", '"""', "'''")}
"""What stands in a string as it is, by what ends the string."""
_ENDS: Final = {"(": ")", "[": "]", "{": "}"}
_MOST_DEPTH: Final = 60
"""Brackets in each other: Python's own parser gives up at 200 levels, some of which it takes for itself."""
_WORDS: Final = {"true": True, "false": False, "null": None}


class PythonCalls(JsonBody):
    """States that read such calls. They are of the request's tools, and told when they are complete."""

    _python_name = ""
    _listed_python = False
    """Whether the calls stand in a list."""
    _written: list[str]
    """Text of the arguments so far."""
    _open_brackets: list[str]
    _string_end: str
    """What ends the string that is open; "" outside of one."""

    def _python(self, alone: bool = True) -> bool | None:
        """Begin a call as Python writes it if `_rest` begins with one; None where more text will tell. `alone`: one
        without arguments in no list may be the name of a tool before its arguments, and is left."""
        lead = _LEAD.match(self._rest)
        assert lead is not None, "it may be empty"
        found = _HEAD.match(self._rest, lead.end())
        if found is None:
            begun = _HEAD_BEGUN.fullmatch(self._rest, lead.end()) or _LEAD_BEGUN.fullmatch(self._rest)
            return None if begun and len(self._rest) - lead.end() < MOST_NAME else False
        name = known_name(found["name"], self._schemas)
        if name not in self._schemas or (alone and not lead["list"] and found["next"] == ")"):
            return False
        self._take(found.end())
        self._fenced = self._fenced or "`" in lead.group()
        self._python_name, self._listed_python = name, self._listed_python or bool(lead["list"])
        self._written, self._open_brackets, self._string_end = [], ["("], ""
        self._state = self._in_python
        return True

    def _in_python(self) -> bool:
        """The arguments, up to the bracket that ends them, or a marker: models forget brackets."""
        while self._rest:
            taken = self._part_of_string() if self._string_end else self._part_of_arguments()
            if not taken:
                return taken is None or self._state != self._in_python
            self._written.append(self._take(taken))
            if not self._open_brackets:
                self._written[-1] = ""
                self._tell_python()
                return True
        return False

    def _part_of_string(self) -> int:
        """Characters that belong to the string that is open; 0 where more text will tell."""
        rest, end = self._rest, self._string_end
        if (plain := _WITHIN[end].match(rest)) is not None:
            return plain.end()
        if rest[0] == "\\":
            return 2 if len(rest) > 1 else 0
        if rest.startswith(end):
            self._string_end = ""
            return len(end)
        return 0 if end.startswith(rest) else 1

    def _part_of_arguments(self) -> int | None:
        """Characters that belong to the arguments outside of strings; 0 where more text will tell, None where the call
        ended otherwise."""
        rest = self._rest
        if self._markers.at(rest) is not None:
            self._written += [_ENDS[bracket] for bracket in reversed(self._open_brackets[1:])]
            self._tell_python()
            return None
        if self._markers.begun(rest):
            return 0
        if (plain := _PLAIN.match(rest)) is not None:
            return plain.end()
        char = rest[0]
        if char in "'\"":
            if rest[:3] in (char, char * 2):
                return 0
            self._string_end = char * 3 if rest.startswith(char * 3) else char
            return len(self._string_end)
        if char in _ENDS:
            self._open_brackets.append(char)
        elif char != "<" and _ENDS[self._open_brackets.pop()] != char:
            self._give_up()
            return None
        if len(self._open_brackets) > _MOST_DEPTH:
            self._give_up()
            return None
        return 1

    def _tell_python(self) -> None:
        name = self._python_name
        arguments = arguments_of("".join(self._written), self._schemas[name])
        if arguments is None:
            self._give_up()
            return
        self._tell_call(name, arguments)
        self._state = self._behind_python

    def _behind_python(self) -> bool:
        """State behind such a call, where another one may follow."""
        self._skip_space()
        while self._rest[:1] in (",", ";") or (self._listed_python and self._rest[:1] == "]"):
            self._listed_python &= self._take(1) != "]"
            self._skip_space()
        begun = self._python(alone=False) if self._rest else None
        if begun is False:
            self._listed_python, self._state = False, self._behind_object
        return begun is not None

    @override
    def _give_up(self, more: str = "") -> bool:
        self._listed_python = False
        return super()._give_up(more)

    @override
    def _ended(self) -> None:
        if self._state == self._behind_python:
            self._raw, self._listed_python, self._state = [], False, self._behind_object
        else:
            super()._ended()


def arguments_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name: what stands between its brackets, by keyword or in the order of the schema's
    properties, or as one object. None if it is neither Python nor nearly JSON."""
    try:
        call = expression_of(f"f({text}\n)")
        if not isinstance(call, ast.Call):
            return None
        given: dict[str, Any] = {}
        for keyword in call.keywords:
            value = _value(keyword.value)
            given.update({keyword.arg: value} if keyword.arg is not None else value)
        positional = [_value(argument) for argument in call.args]
        json.dumps(given, allow_nan=False), json.dumps(positional, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _members_of(text)
    known = properties_of(schema)
    if len(positional) == 1 and isinstance(only := positional[0], dict) and not given:
        first = next(iter(known or ()), None)
        if known is None or only.keys() <= known.keys() or first is None:
            return only
    names = [name for name in known or () if name not in given]
    return {**dict(zip(names, positional, strict=False)), **given} if len(positional) <= len(names) else None


def _members_of(text: str) -> dict[str, Any] | None:
    """Arguments that are written like the members of an object, as `city: "Oslo"`."""
    one, members = JsonObject(), f"{{{text}\n}}"
    used, written = one.feed(members)
    return json.loads(written) if one.state is State.DONE and used == len(members) else None


def _value(node: ast.expr) -> Any:
    """The JSON value that an expression is. ValueError or TypeError if it is none."""
    if isinstance(node, ast.Name):
        return _WORDS.get(node.id, node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys of an object are strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
