"""Tool calls of DeepSeek V3.2, as its published encoding writes them:

<｜DSML｜function_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>

Values with string="true" are strings as they are, the others JSON. Its successors call the section tool_calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from typing_extensions import override

from deploy.parsing.call_grammar import (
    AllowedTool,
    Tag,
    either,
    name_of,
    sequence,
    several,
    text,
    together,
    within_text,
)
from deploy.parsing.markers import Markers
from deploy.parsing.parser import MOST_NAME, MakeId, Schemas, is_name
from deploy.parsing.schema_types import types_of
from deploy.parsing.tagged_calls import MOST_KEY, TaggedCalls
from deploy.parsing.tagged_grammar import arguments

_BEGIN = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
_END = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
_TAG = "<｜DSML｜"
"""With which all that is no end begins."""
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER = '<｜DSML｜parameter name="'
_HEAD = re.compile(r'(?P<key>[^"]*)" string="(?P<string>true|false)')
_TYPES = {"true": frozenset(("string",)), "false": types_of(None)}


class DeepSeekV32Calls(TaggedCalls):
    """Of one answer."""

    value_end = "</｜DSML｜parameter>"
    markers = (*_BEGIN, *_END, _INVOKE, _INVOKE_END, _PARAMETER, value_end)

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(Markers(*_BEGIN, *_END), schemas, make_id)
        self._in_section = Markers(_INVOKE, *_END)
        self._in_call = Markers(_PARAMETER, _INVOKE_END)

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """See `JsonCalls`."""
        call = either([cls._call(tool) for tool in together(tools)])
        begun = either([text(begin.removeprefix(_TAG) + "\n") for begin in _BEGIN])
        ended = either([text(end) for end in _END])
        rest = sequence(begun, several(call, "") if parallel else call, ended)
        return sequence(text(_TAG), rest) if must else within_text({_TAG: rest}, never=_END)

    @classmethod
    def _call(cls, tool: AllowedTool) -> Tag:
        def write(key: Tag, value: Tag, raw: bool) -> Tag:
            string = text(f'" string="{str(raw).lower()}">')
            return sequence(text(_PARAMETER), key, string, value, text("\n"))

        written = arguments(tool, cls.value_end, write, says=True)
        head = (text(_INVOKE), name_of(tool), text('">\n'))
        return sequence(*head, *written, text(f"{_INVOKE_END}\n"))

    @override
    def _marker(self, marker: str) -> None:
        if marker in _BEGIN:
            self._state = self._section
        elif self._calls:
            self._raw = []  # a section's end behind something that was none of its calls
        else:
            self._give_up()

    def _section(self) -> bool:
        self._skip_space()
        tag = self._in_section.at(self._rest)
        if tag == _INVOKE:
            self._take(len(tag))
            self._state = self._in_name
            return True
        if tag is not None and self._calls:
            self._take(len(tag))
            self._raw, self._state = [], self._content
            return True
        return (tag is not None or not self._in_section.begun(self._rest)) and self._give_up()

    def _in_name(self) -> bool:
        end = self._rest.find('">', 0, MOST_NAME + 2)
        if end < 0:
            return len(self._rest) >= MOST_NAME + 2 and self._give_up()
        name = self._rest[:end]
        if not is_name(name):
            return self._give_up()
        self._take(end + 2)
        self._begin_call(name)
        return True

    @override
    def _next(self) -> bool:
        self._skip_space()
        tag = self._in_call.at(self._rest)
        if tag is None:
            return not self._in_call.begun(self._rest) and self._give_up()
        self._take(len(tag))
        if tag == _PARAMETER:
            self._state = self._in_head
        else:
            self._end_call()
            self._state = self._section
        return True

    def _in_head(self) -> bool:
        end = self._rest.find('">', 0, MOST_KEY + 2)
        if end < 0:
            return len(self._rest) >= MOST_KEY + 2 and self._give_up()
        head = _HEAD.fullmatch(self._rest[:end])
        if head is None:
            return self._give_up()
        self._take(end + 2)
        self._begin_argument(head["key"], _TYPES[head["string"]])
        return True

    @override
    def _give_up(self, more: str = "") -> bool:
        if self._state == self._section and self._calls and not "".join(self._raw).strip():
            self._raw = []  # blanks between calls
            more = "" if more and self._in_section.begun(more) else more  # the text ended in a tag
        return super()._give_up(more)
