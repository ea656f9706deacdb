"""Tool calls whose arguments are written as JSON between markers: DeepSeek V3, R1 and V3.1, and Kimi K2.

    SECTION_BEGIN CALL_BEGIN head SEPARATOR arguments CALL_END CALL_BEGIN ... SECTION_END

The arguments end where their JSON object does, so a marker in one of their strings, as in code about such markers, is
text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from deploy.parsing.call_grammar import (
    AllowedTool,
    Tag,
    either,
    json_object,
    name_of,
    sequence,
    several,
    text,
    together,
    within_text,
)
from deploy.parsing.events import Arguments
from deploy.parsing.json_object import JsonObject, State
from deploy.parsing.markers import Markers
from deploy.parsing.parser import MOST_NAME, CallParser, MakeId, Schemas, is_name

_FENCE = re.compile(r"```[a-z]*(?=[^a-z])")
_FENCE_BEGUN = re.compile(r"`{1,2}|```[a-z]*")


class JsonCalls(CallParser):
    """A subclass says what its markers and heads are."""

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    separator: str
    between: ClassVar[str] = ""
    """What models write between the calls of a section."""

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        """`schemas` are not needed: the model writes JSON itself."""
        super().__init__(Markers(self.section_begin, self.section_end, self.call_begin))
        self._inside = Markers(self.section_begin, self.section_end, self.call_begin, self.call_end)
        self._make_id = make_id
        self._json = JsonObject()
        self._call = ("", "")
        """Id and name of the call whose arguments come next."""
        self._fenced = False

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """Answers with calls of these tools. `must`: there is a call, and no text; else there is text, and calls where
        one begins. `parallel`: there may be several in a section."""
        call = either([cls.one_call(tool) for tool in together(tools)])
        rest = sequence(several(call, cls.between) if parallel else call, text(cls.section_end))
        if must:
            return sequence(text(cls.section_begin), rest)
        return within_text({cls.section_begin: rest}, never=(cls.call_begin, cls.section_end))

    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        head = (text(cls.call_begin), name_of(tool), text(cls.separator))
        return sequence(*head, json_object(tool), text(cls.call_end))

    def head(self, text: str) -> tuple[str, str] | None:
        """Id and name from what stands before the separator; None where it is no head."""
        name = text.strip()
        return (self._make_id(), name) if is_name(name) else None

    @override
    def _marker(self, marker: str) -> None:
        if marker == self.call_begin:
            self._state = self._head
        elif marker == self.section_begin:
            self._state = self._section
        elif self._calls:
            self._raw, self._state = [], self._content  # a section's end behind something that was none of its calls
        else:
            self._give_up()

    def _section(self) -> bool:
        """Between the calls of a section."""
        self._skip_space()
        marker = self._inside.at(self._rest)
        if marker == self.call_begin:
            self._take(len(marker))
            self._state = self._head
            return True
        if marker == self.section_end and self._calls:
            self._take(len(marker))
            self._raw, self._state = [], self._content
            return True
        if marker is None and self._inside.begun(self._rest):
            return False
        return self._give_up()

    def _head(self) -> bool:
        end = self._rest.find(self.separator, 0, MOST_NAME + len(self.separator))
        if end < 0:
            return len(self._rest) >= MOST_NAME + len(self.separator) and self._give_up()
        call = self.head(self._rest[:end])
        if call is None:
            return self._give_up()
        self._call = call
        self._take(end + len(self.separator))
        self._state, self._fenced = self._before, False
        return True

    def _before(self) -> bool:
        """Before the arguments' object, which may stand in a fence of Markdown."""
        self._skip_space()
        if not self._rest:
            return False
        if self._rest[0] == "{":
            self._begin(*self._call)
            self._json, self._state = JsonObject(), self._object
            return True
        if self._rest.startswith(self.call_end):
            self._begin(*self._call)
            self._out.append(Arguments(self._calls, "{}"))
            self._end()
            self._state = self._behind
            return True
        if not self._fenced and (fence := _FENCE.match(self._rest)) is not None:
            self._take(fence.end())
            self._fenced = True
            return True
        fence_begun = not self._fenced and _FENCE_BEGUN.fullmatch(self._rest) is not None
        if fence_begun or self.call_end.startswith(self._rest):
            return False
        return self._give_up()

    def _object(self) -> bool:
        used, text = self._json.feed(self._rest)
        self._take(used)
        if text:
            self._out.append(Arguments(self._calls, text))
        if self._json.state is State.BROKEN:
            return self._give_up()
        if self._json.state is State.DONE:
            self._end()
            self._state = self._behind
        return True

    def _behind(self) -> bool:
        """Behind the arguments."""
        self._rest = text = self._rest.lstrip()
        if self._fenced:
            if text.startswith("```"):
                self._rest, self._fenced = text[3:], False
                return True
            if "```".startswith(text):
                return False
        marker = self._inside.at(text)
        if marker is None and self._inside.begun(text):
            return False
        if marker == self.call_end:
            text = text[len(marker) :]
        self._rest = text
        self._state = self._section if marker is not None else self._content
        return True

    @override
    def _give_up(self, more: str = "") -> bool:
        after_call = self._state == self._behind or (self._state == self._section and self._calls)
        if after_call and more and (self._inside.begun(more) or not more.strip("` \t\r\n")):
            more = ""  # the text ended in a marker, or in what is left of a fence
        if self._state == self._section and self._calls and not "".join(self._raw).strip():
            self._raw = []  # blanks between calls
        return super()._give_up(more)
