"""Tool calls of GLM-4.5 to GLM-5, as their chat templates write them, the older ones with line breaks between the tags:

<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>

Strings are written as they are, other values as JSON. Which of the two a value is, the tool's schema says.
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
    name_of,
    optional,
    sequence,
    several,
    text,
    together,
    within_text,
)
from deploy.parsing.parser import MOST_NAME, is_name, known_name
from deploy.parsing.schema_types import properties_of
from deploy.parsing.tagged_calls import MOST_KEY, CallTail, TaggedCalls
from deploy.parsing.tagged_grammar import arguments

_NAME = re.compile(r"[\w.-]+").fullmatch
"""A name without anything that might be no part of it."""
_END_OF_NAME = re.compile(r"[<{]|```")
_MAY_END_NAME = re.compile(r"[<{`(]").search
_NOT_BLANK = re.compile(r"\S").search
_TAG_BEGUN = re.compile("<").search
_BREAK = optional(text("\n"))
"""The line break that the older templates have."""


class GlmCalls(TaggedCalls):
    """Parser of the calls in one GLM answer."""

    begin, end = "<tool_call>", "</tool_call>"
    key, key_end, value, value_end = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
    all_begin, all_end = "", ""
    """What stands around all calls, where anything does."""
    markers: ClassVar = (begin, end, key, key_end, value, value_end)
    ends_content = tags = markers
    begins = (begin,)
    control = re.compile("|".join(map(re.escape, markers)))
    call_tail = CallTail(end)

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """Answers with calls of these tools, as `JsonCalls.grammar_for` has them."""
        rest = either([cls._behind_begin(tool) for tool in together(tools)])
        if not must:
            return within_text({cls.begin: rest})
        call = sequence(text(cls.begin), rest)
        return several(sequence(call, _BREAK), "") if parallel else call

    @classmethod
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        def write(key: Tag, value: Tag, raw: bool) -> Tag:
            return sequence(text(cls.key), key, text(cls.key_end), _BREAK, text(cls.value), value, _BREAK)

        written = arguments(tool, cls.value_end, write, says=False)
        return sequence(name_of(tool), _BREAK, *written, text(cls.end))

    @override
    def _marker(self, marker: str) -> None:
        self._state = self._in_name if marker == self.begin else self._content

    def _in_name(self) -> bool:
        """The name, which ends at a tag or where a JSON object begins."""
        if self._rest.endswith(self.key):  # the common case, made short
            name = self._rest[: -len(self.key)].strip()
            if name in self._schemas and _NAME(name) is not None:
                self._take(len(self._rest))
                self._begin_call(name)
                self._state = self._in_key
                return False
        if len(self._rest) < MOST_NAME and _MAY_END_NAME(self._rest) is None:
            self._ends_wait = _MAY_END_NAME
            return False
        found = _END_OF_NAME.search(self._rest, 0, MOST_NAME + 1)
        may_be_python = found is None or "(" in self._rest or "`" in self._rest
        if may_be_python and (python := self._python()) is not False:
            return python is True
        if found is None:
            return len(self._rest) > MOST_NAME and self._give_up()
        end = found.start()
        if self._rest[0] in "<\n " and found.group() == "<" and not self._rest[:end].strip():
            self._take(end)
            if (function := self._function()) is not False:
                return function is True
            end = 0
        tag = self._tags.at(self._rest[end:])
        if tag is None and self._markers.begun(self._rest[end:]):
            return False
        name = known_name(self._rest[:end], self._schemas)
        if (not name or name in self._schemas) and self._leave_close_out(end):
            return True
        if tag == self.begin and not name:
            self._take(end + len(tag))  # written twice
            return True
        if not name and found.group() == "{":
            self._take(end)
            self._begin_object()
            return True
        if tag == self.key_end and (known := self._name_before_key(self._rest[:end])):
            self._take(len(known))
            self._begin_call(known.strip())
            return True
        first = name.split(maxsplit=1)[0] if name else ""
        if first != name and first in self._schemas and tag == self.end:
            self._take(self._rest.index(first) + len(first))
            self._begin_call(first)
            return True
        ends = [self.begin, self.end, self.all_end, self.key, self.value_end]
        ends += [self.key_end] if name in self._schemas else []
        if not is_name(name) or (found.group() == "<" and tag not in ends):
            return self._give_up()
        self._take(end)
        self._begin_call(name)
        return True

    def _name_before_key(self, text: str) -> str:
        """The beginning of `text` that is the name of a tool, where what follows is an argument's name without its
        tag; "" if it is none."""
        text = text.rstrip()
        start = len(text) - len(text.lstrip())
        fitting = [name for name in self._schemas if text.startswith(name, start) and len(text) > start + len(name)]
        return text[: start + len(max(fitting, key=len))] if fitting else ""

    @override
    def _next(self) -> bool:
        if self._rest == self.key and self._arguments >= 0:  # the common case, made short
            self._take(len(self.key))
            self._state = self._in_key
            return False
        self._skip_space()
        if not self._rest or (closed := self._leave_close_out()) is None:
            return False
        tag = self._tags.at(self._rest)
        if tag is None:
            return closed or (not self._tags.begun(self._rest) and self._text())
        if tag == self.begin:
            return self._begun_within()
        if tag == self.value:
            return self._give_up()
        self._take(len(tag))
        if tag == self.key and self._arguments >= 0:
            self._state = self._in_key
        elif tag in (self.end, self.all_begin, self.all_end):
            self._end_call()
        elif tag == self.value_end and not self._arguments:
            self._complete = True  # what models write behind the name of a tool without arguments
        return True

    def _begun_within(self) -> bool:
        """The tag that begins a call stands for an argument's, or begins another call and the end of this is missing.
        What ends the text behind it says which."""
        end = self._rest.find("<", len(self.begin), len(self.begin) + MOST_KEY)
        rest = self._rest[end:] if end >= 0 else ""
        if end < 0 and len(self._rest) < len(self.begin) + MOST_KEY:
            return False
        if end >= 0 and rest != self.key_end and self.key_end.startswith(rest):
            return False
        text = self._rest[len(self.begin) : max(end, 0)]
        known = text.strip() in (properties_of(self._schemas.get(self._name)) or ())
        is_key = text.strip() and self._arguments >= 0 and (known or not self._name_before_key(text))
        if rest.startswith(self.key_end) and is_key:
            self._take(len(self.begin))
            self._state = self._in_key
        else:
            self._end_call()
        return True

    def _text(self) -> bool:
        """Text between arguments: a JSON object with all of them, the name of one whose tag is missing, or neither."""
        if not self._arguments and (begun := self._whole_body()) is not False:
            return begun is True
        found = self._tags.search(self._rest)
        begin = found.start() if found is not None else len(self._rest) - self._tags.held(self._rest)
        if found is None and begin <= MOST_KEY:
            return False
        if found is not None and found.group() == self.key_end and begin <= MOST_KEY and self._arguments >= 0:
            self._state = self._in_key
            return True
        return self._begin_aside()

    def _in_key(self) -> bool:
        """An argument's name, and the tags between it and the value, one of which may be missing."""
        if self._rest.endswith(self.value):  # the common case, made short
            named, closed, space = self._rest[: -len(self.value)].partition(self.key_end)
            if closed and _NAME(named) is not None and not space.strip():
                self._take(len(self._rest))
                self._begin_argument_or_all(named, self.value)
                return False
        self._skip_space()
        end = self._rest.find("<", 0, MOST_KEY + 1)
        if end < 0:
            self._ends_wait = _TAG_BEGUN if self._rest else None
            return len(self._rest) > MOST_KEY and self._give_up()
        tag, behind = self._tags.at(self._rest[end:]), self._rest[end:]
        if tag is None:
            return not self._tags.begun(behind) and self._give_up()
        if not end and tag == self.key:
            self._take(len(tag))  # written twice
            return True
        if not end or tag not in (self.key_end, self.value, self.value_end):
            return self._give_up()
        key, behind = self._rest[:end].strip(), behind[len(tag) :]
        if (bare := key.strip("`\"'")) in (properties_of(self._schemas.get(self._name)) or ()):
            key = bare
        if tag != self.value:
            behind = behind.lstrip()
            tag = self._tags.at(behind)
            if tag is None and self._tags.begun(behind):
                self._ends_wait = None if behind else _NOT_BLANK
                return False
            if tag not in (None, self.value, self.value_end):
                return self._give_up()
            behind = behind[len(self.value) :] if tag == self.value else behind
        self._take(len(self._rest) - len(behind))
        self._begin_argument_or_all(key, self.value if tag == self.value else "")
        return True
