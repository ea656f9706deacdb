"""Calls as Qwen's coding models write them, which other models write where a call of their own form should stand:

<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import override

from deploy.parsing.json_object import in_json
from deploy.parsing.markers import begun_pattern
from deploy.parsing.parser import MOST_NAME, known_name
from deploy.parsing.python_calls import PythonCalls
from deploy.parsing.schema_types import as_json, types_of_argument

_OPEN, _END = "<function", "</function>"
_ARGUMENT_END: Final = "</parameter>"
_NAMED: Final = r"(?:\s*=\s*|\s+name\s*=\s*)[\"']?(?P<name>[^\"'<>]+?)[\"']?\s*>"
_FUNCTION = re.compile(rf"{_OPEN}{_NAMED}")
_ARGUMENT = re.compile(rf"<parameter{_NAMED}\n?")
_VALUE_END = re.compile(rf"\n?(?:{_ARGUMENT_END}|(?={_END}\s*</tool_call))|\n(?=<parameter\s*=[^\"'<>]+>)")
_LONGEST_END: Final = MOST_NAME + 64
"""Characters of what ends a value, with what tells that it does."""
_TAG_BEGUN = re.compile(
    rf"{begun_pattern(_END)}|(?:{begun_pattern('<parameter=')}|<parameter\s*=?[^<>]{{0,{MOST_NAME}}}>?)"
)


class FunctionCalls(PythonCalls):
    """States that read such calls. They are of the request's tools, and told when they are complete."""

    _function_name = ""
    _given: list[str]
    """Arguments so far, as members of an object."""
    _argument: str | None = None
    """Name of the argument whose value is being read."""
    _searched = 0
    """Characters of `_rest` in which no value ends."""

    def _function(self) -> bool | None:
        """Begin such a call if `_rest` begins with one; None where more text will tell."""
        if not self._rest.startswith("<f"):
            return None if self._rest == "<" else False
        found = _FUNCTION.match(self._rest, 0, MOST_NAME)
        if found is None:
            begun = _OPEN.startswith(self._rest[: len(_OPEN)]) or self._rest.startswith(_OPEN)
            return None if begun and ">" not in self._rest and len(self._rest) < MOST_NAME else False
        name = known_name(found["name"], self._schemas)
        if name not in self._schemas:
            return False
        self._take(found.end())
        self._function_name, self._given, self._argument, self._searched = name, [], None, 0
        self._state = self._in_function
        return True

    def _in_function(self) -> bool:
        """State before an argument or the call's end. Other markers end a call, too: models forget its own."""
        self._skip_space()
        if not self._rest:
            return False
        if self._rest.startswith(_END):
            self._take(len(_END))
            self._tell_function()
            return True
        if (found := _ARGUMENT.match(self._rest)) is not None:
            if found.end() == len(self._rest) and not found.group().endswith("\n"):
                return False  # a line break that belongs to the tag may come
            self._take(found.end())
            self._argument, self._searched, self._state = found["name"].strip(), 0, self._in_function_value
            return True
        if self._markers.at(self._rest) is not None:
            self._tell_function()
            return True
        if self._markers.begun(self._rest) or _TAG_BEGUN.fullmatch(self._rest) is not None:
            return False
        return self._give_up()

    def _in_function_value(self) -> bool:
        found = _VALUE_END.search(self._rest, self._searched)
        if found is None:
            self._searched = max(0, len(self._rest) - _LONGEST_END)
            return False
        self._end_function_value(self._take(found.end())[: found.start() - found.end() or None])
        return True

    def _end_function_value(self, text: str) -> None:
        assert self._argument is not None
        types = types_of_argument(self._schemas[self._function_name], self._argument)
        value = in_json(text) if types == {"string"} else as_json(text, types)
        self._given.append(f"{in_json(self._argument)}: {value}")
        self._argument, self._state = None, self._in_function

    def _tell_function(self) -> None:
        self._begin(self._new_id(self._function_name), self._function_name)
        self._write(f"{{{', '.join(self._given)}}}")
        self._end()
        self._state = self._behind_object

    @override
    def _ended(self) -> None:
        if self._cut or self._state not in (self._in_function, self._in_function_value):
            super()._ended()
            return
        if self._argument is not None and (end := self._rest.rfind(_END)) >= 0:
            self._end_function_value(self._take(end).removesuffix("\n"))
        if self._argument is None and self._given:
            self._rest = ""
            self._tell_function()
            self._raw, self._state = [], self._content
            return
        super()._ended()
