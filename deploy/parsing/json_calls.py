"""Tool calls whose arguments are written as JSON between markers: DeepSeek V3, R1 and V3.1, and Kimi K2.

    SECTION_BEGIN CALL_BEGIN head SEPARATOR arguments CALL_END CALL_BEGIN ... SECTION_END

The arguments end where their JSON object does, so a marker in one of their strings, as in code about such markers, is
text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
from deploy.parsing.parser import MOST_NAME, MakeId, Schemas, is_name
from deploy.parsing.python_calls import PythonCalls

_PLAIN_HEAD = re.compile(r"[\w.:-]+").fullmatch
"""The head of a call without anything that might be no part of it."""
_OBJECT = re.compile(r"\s*+(?:```[a-zA-Z]*+)?[\s,\[]*+\{")
_OBJECT_BEGUN = re.compile(r"\s*(?:`{1,2}|```[a-zA-Z]*[\s,\[]*|[\s,\[]*)")


class JsonCalls(PythonCalls):
    """A subclass says what its markers and heads are. Models leave markers out, and write text between calls: each call
    is found by its own markers, or within a section by the separator alone."""

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    separator: str
    spellings: ClassVar[Mapping[str, str]] = {}
    """Markers as models write them and templates do not, and which of the above each of them stands for."""
    between: ClassVar[str] = ""
    """Text that models write between the calls of a section."""
    markers: ClassVar[tuple[str, ...]]
    """Markers of this format."""

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(schemas, make_id)
        self._call_ends = (self.call_end, self.section_end)
        self._end_of_head, self._may_end_head = self._ends_of_head()
        self._call = ("", "")
        """Id and name of the call whose arguments come next."""
        self._in_section = False

    @classmethod
    @cache
    def _ends_of_head(cls) -> tuple[re.Pattern[str], Callable[[str], object | None]]:
        """What ends the head of a call; and a search for a character that may end it, or begin a call within it that
        Python writes."""
        markers = (*cls.ends_content, cls.close)
        first = "".join(sorted({marker[0] for marker in markers}))
        whole = "[{`]|" + "|".join(map(re.escape, markers))
        return re.compile(whole), re.compile(f"[{{`(\\[{re.escape(first)}]").search

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """Answers with calls of these tools. `must`: there is a call, and no text; else there is text, and calls where
        one begins. `parallel`: there may be several in a section."""
        call = either([cls.one_call(tool) for tool in together(tools)])
        rest = sequence(several(call, cls.between) if parallel else call, text(cls.section_end))
        if must:
            return sequence(text(cls.section_begin), rest)
        never = (cls.call_begin, cls.section_end, *cls.spellings)
        return within_text({cls.section_begin: rest}, never)

    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        head = (text(cls.call_begin), name_of(tool), text(cls.separator))
        return sequence(*head, json_object(tool), text(cls.call_end))

    def head(self, text: str) -> tuple[str, str] | None:
        """Id and name from what stands before the arguments; None where it is no head."""
        name = text.strip()
        return (self._make_id(), name) if is_name(name) else None

    def _meant(self, marker: str | None) -> str | None:
        """The marker as templates write it."""
        return marker if marker is None else self.spellings.get(marker, marker)

    @override
    def _marker(self, marker: str) -> None:
        meant = self._meant(marker)
        if meant == self.call_begin:
            self._begin_head()
            return
        if meant == self.section_begin:
            self._in_section = True
        elif meant == self.section_end:
            self._in_section = False
        self._state = self._section if self._in_section else self._content

    def _section(self) -> bool:
        """State between the calls of a section. Text is held back as far as it may be the head of a call, or an object
        that is one, perhaps in a list."""
        if self._rest == self.call_begin or self._rest == self.section_end:  # the common cases, made short
            own, self._rest = self._rest, ""
            self._found(own)
            return False
        marker = self._markers.at(self._rest)
        if marker is not None and self._meant(marker) not in (self.close, self.separator):  # as templates write it
            self._raw, self._state = [], self._content
            return True
        blank = len(self._rest) - len(self._rest.lstrip())
        if blank < len(self._rest) and (closed := self._leave_close_out(blank)) is not False:
            return closed is True
        if (begun := _OBJECT.match(self._rest)) is not None:
            self._raw = []
            before = self._take(begun.end() - 1)
            self._begin_object()
            self._bracketed, self._fenced = self._bracketed or "[" in before, "`" in before
            return True
        if len(self._rest) < MOST_NAME and _OBJECT_BEGUN.fullmatch(self._rest) is not None:
            return False
        self._raw = []
        if (python := self._python()) is not False:
            return python is True
        found = self._markers.search(self._rest)
        begin = found.start() if found is not None else len(self._rest) - self._markers.held(self._rest)
        if begin > MOST_NAME or (found is not None and self._meant(found.group()) != self.separator):
            self._state = self._content
            return True
        if found is None:
            self._ends_wait = self._may_end_head if self._may_end_head(self._rest) is None else None
            return False
        before = self._rest[:begin].rstrip()
        head = before.rsplit(maxsplit=1)[-1] if before else ""
        if not self._stands_alone(head):
            self._state = self._content
            return True
        self._say(before[: len(before) - len(head)])
        self._rest, self._raw = self._rest[len(before) - len(head) :], []
        self._begin_head()
        return True

    def _stands_alone(self, head: str) -> bool:
        """Whether a call begins with `head` though its marker is missing."""
        return head in self._schemas

    def _begin_head(self) -> None:
        self._state, self._fenced = self._head, False

    def _head(self) -> bool:
        """The head, which ends at the separator, or where the arguments begin or the call ends without one."""
        if len(self._rest) < MOST_NAME and self._may_end_head(self._rest) is None:
            self._ends_wait = self._may_end_head
            return False
        if self._rest.endswith(self.separator):  # the common case, made short
            text = self._rest[: -len(self.separator)]
            if _PLAIN_HEAD(text) is not None and (call := self.head(text)) is not None:
                self._take(len(self._rest))
                self._call, self._state = call, self._before
                return False
        found = self._end_of_head.search(self._rest)
        may_be_python = found is None or "(" in self._rest or "`" in self._rest
        if may_be_python and (python := self._python()) is not False:
            return python is True
        begin = found.start() if found is not None else len(self._rest) - self._markers.held(self._rest)
        if begin > MOST_NAME:
            return self._give_up()
        if found is None:
            return False
        text, mark = self._rest[:begin], self._meant(found.group())
        if mark == self.close and (not text.strip() or self._stands_alone(text.strip())):
            return self._leave_close_out(begin) is True
        if not text.strip() and mark in (self.call_begin, self.section_begin):
            self._take(found.end())  # a marker that was written twice
            return True
        if mark != self.separator and mark not in ("{", "`", *self._call_ends):
            return self._give_up()
        if text.strip() in ("", "[") and mark == "{":
            self._take(begin)
            self._begin_object()
            self._bracketed = bool(text.strip())
            return True
        call = self.head(text)
        if call is None:
            return self._give_up()
        self._call = call
        self._take(found.end() if mark == self.separator else begin)
        self._state = self._before
        return True

    def _before(self) -> bool:
        """State before the arguments' object."""
        self._skip_space()
        if self._rest.startswith("{"):  # the common case, made short
            self._begin(*self._call)
            self._begin_body()
            return True
        if not self._rest or self._fence_comes():
            return False
        marker = self._markers.at(self._rest) or ""
        if marker == self.close:
            return self._leave_close_out() is True
        if self._meant(marker) == self.separator:
            self._take(len(marker))
            return True
        begun = self._body_begun()
        if begun == "yes":
            self._begin(*self._call)
            self._begin_body()
            return True
        if not self._rest:
            return False
        other = self._other_begun() if begun == "no" else "no"
        if other == "yes":
            self._begin(*self._call)
            self._begin_other()
            return True
        marker = self._markers.at(self._rest) or ""  # behind a fence, which was taken
        if self._meant(marker) in (self.separator, self.close):
            return True
        if self._meant(marker) in self._call_ends:
            self._begin(*self._call)
            self._write("{}")
            self._body_ended()
            return True
        if "maybe" in (begun, other) or (not marker and self._markers.begun(self._rest)):
            return False
        return self._give_up()

    @override
    def _body_ended(self) -> None:
        self._end()
        self._state = self._behind

    @override
    def _behind_object(self) -> bool:
        self._state = self._behind
        return True

    @override
    def _give_up(self, more: str = "") -> bool:
        in_list = self._state == self._object and self._in_section
        given_up = super()._give_up(more)
        if in_list and not more:
            self._state = self._section
        return given_up

    def _behind(self) -> bool:
        """State behind the arguments, where white space is no content."""
        if self._rest == self.call_end and not self._fenced:  # the common case, made short
            self._raw, self._rest = [], ""
            self._state = self._section if self._in_section else self._content
            return False
        if not self._fence_end():
            return False
        self._raw = []
        if not self._rest:
            return False
        stray_fence = self._rest.startswith("```")
        text = self._rest[3:].lstrip() if stray_fence else self._rest
        marker = self._markers.at(text)
        if marker is None and (self._markers.begun(text) or self._rest in ("`", "``")):
            return False
        if stray_fence and marker is None:
            text = self._rest
        if marker is not None and self._meant(marker) == self.call_end:
            text = text[len(marker) :]
        self._rest = text
        self._state = self._section if self._in_section else self._content
        return True

    @override
    def _ended(self) -> None:
        if self._state == self._behind or (self._state == self._section and self._markers.begun(self._rest)):
            self._raw, self._rest, self._state = [], "", self._content  # a fence or a marker that is cut
            return
        super()._ended()
