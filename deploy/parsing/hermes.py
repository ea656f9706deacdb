"""Tool calls in the form that NousResearch's Hermes made common. Youtu-LLM and A.X K1 write them so:

<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>
"""

from __future__ import annotations

import re

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.object_calls import ObjectCalls
from deploy.parsing.parser import MOST_NAME, known_name

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesCalls(ObjectCalls):
    """Parser of the calls in one Hermes answer. A call that lacks its end is complete where its object is."""

    markers = (_BEGIN, _END)
    ends_content = markers
    begins = (_BEGIN,)
    begin, between = _BEGIN, "\n"
    control = re.compile("|".join(map(re.escape, markers)))
    in_prose = True
    _listed = False
    """Whether the calls behind the tag stand in a list."""

    @classmethod
    @override
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        head = (text('\n{"name": "'), name_of(tool), text('", "arguments": '))
        return sequence(*head, json_object(tool), text(f"}}\n{_END}"))

    @override
    def _marker(self, marker: str) -> None:
        self._fenced = self._listed = False
        self._state = self._head if marker == _BEGIN else self._content

    def _head(self) -> bool:
        """State before the object."""
        self._skip_space()
        if self._rest.startswith(_BEGIN):
            self._take(len(_BEGIN))  # written twice
            return True
        if self._rest and (closed := self._leave_close_out()) is not False:
            return closed is True
        if self._rest and (function := self._function()) is not False:
            return function is True
        begun = self._body_begun()
        if begun == "maybe" or (begun == "no" and _BEGIN.startswith(self._rest)):
            return False
        if begun == "no":
            return self._listed_or_named()
        self._state = self._object_begun
        return True

    def _listed_or_named(self) -> bool:
        """A list of calls, a call as Python writes it, or the name of a tool before its arguments."""
        if (python := self._python()) is not False:
            return python is True
        if self._rest.startswith("[") and not self._listed:
            self._take(1)
            self._listed = True
            return True
        end = self._rest.find("{", 0, MOST_NAME)
        name = known_name(self._rest[: max(end, 0)], self._schemas)
        if end < 0:
            begun = self._rest.strip().lstrip("`\"'").rstrip("`\"': ")
            may_be = len(self._rest) < MOST_NAME and any(known.startswith(begun) for known in self._schemas)
            return not may_be and self._give_up()
        if name not in self._schemas:
            return self._give_up()
        self._take(end)
        self._begin(self._make_id(), name)
        self._begin_body()
        return True

    @override
    def _behind_object(self) -> bool:
        if not self._fence_end():
            return False
        if self._rest and (closed := self._leave_close_out()) is not False:
            return closed is True
        while self._listed and self._rest[:1] in (",", "]"):
            self._take(1)
            self._skip_space()
        if self._rest.startswith("{"):  # one more behind the same tag
            self._raw, self._state = [], self._object_begun
            return True
        if self._rest.startswith(_END):
            self._take(len(_END))
        elif _END.startswith(self._rest):
            return False
        self._raw, self._state = [], self._content
        return True
