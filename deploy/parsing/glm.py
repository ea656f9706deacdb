"""Tool calls of GLM-4.5 to GLM-5, as their chat templates write them, the older ones with line breaks between the tags:

<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>

Strings are written as they are, other values as JSON. Which of the two a value is, the tool's schema says.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from deploy.parsing.markers import Markers
from deploy.parsing.parser import MOST_NAME, MakeId, Schemas, is_name
from deploy.parsing.tagged_calls import MOST_KEY, TaggedCalls
from deploy.parsing.tagged_grammar import arguments

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE = "<arg_key>", "</arg_key>", "<arg_value>"
_BREAK = optional(text("\n"))
"""As the older templates have it."""


class GlmCalls(TaggedCalls):
    """Of one answer."""

    value_end = "</arg_value>"
    markers = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, value_end)

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(Markers(_BEGIN), schemas, make_id)
        self._tags = Markers(_KEY, _END)

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """See `JsonCalls`."""
        rest = either([cls._behind_begin(tool) for tool in together(tools)])
        if not must:
            return within_text({_BEGIN: rest})
        call = sequence(text(_BEGIN), rest)
        return several(sequence(call, _BREAK), "") if parallel else call

    @classmethod
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        def write(key: Tag, value: Tag, raw: bool) -> Tag:
            return sequence(text(_KEY), key, text(_KEY_END), _BREAK, text(_VALUE), value, _BREAK)

        written = arguments(tool, cls.value_end, write, says=False)
        return sequence(name_of(tool), _BREAK, *written, text(_END))

    @override
    def _marker(self, marker: str) -> None:
        self._state = self._in_name

    def _in_name(self) -> bool:
        end = self._rest.find("<", 0, MOST_NAME + 1)
        if end < 0:
            return len(self._rest) > MOST_NAME and self._give_up()
        tag = self._tags.at(self._rest[end:])
        if tag is None and self._tags.begun(self._rest[end:]):
            return False
        name = self._rest[:end].strip()
        if tag is None or not is_name(name):
            return self._give_up()
        self._take(end)
        self._begin_call(name)
        return True

    @override
    def _next(self) -> bool:
        self._skip_space()
        tag = self._tags.at(self._rest)
        if tag is None:
            return not self._tags.begun(self._rest) and self._give_up()
        self._take(len(tag))
        if tag == _KEY:
            self._state = self._in_key
        else:
            self._end_call()
            self._state = self._content
        return True

    def _in_key(self) -> bool:
        end = self._rest.find(_KEY_END, 0, MOST_KEY + len(_KEY_END))
        if end < 0:
            return len(self._rest) >= MOST_KEY + len(_KEY_END) and self._give_up()
        behind = self._rest[end + len(_KEY_END) :].lstrip()
        if not behind.startswith(_VALUE):
            return not _VALUE.startswith(behind) and self._give_up()
        key = self._rest[:end].strip()
        self._take(len(self._rest) - len(behind) + len(_VALUE))
        self._begin_argument(key)
        return True
