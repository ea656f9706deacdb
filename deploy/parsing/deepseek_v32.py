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
from dataclasses import dataclass

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
from deploy.parsing.json_body import call_of, is_wrapper
from deploy.parsing.json_object import in_json
from deploy.parsing.markers import markers_of
from deploy.parsing.parser import MakeId, Schemas, is_name, known_name
from deploy.parsing.schema_types import properties_of, types_of_argument
from deploy.parsing.tagged_calls import MOST_KEY, STRING, CallTail, TaggedCalls
from deploy.parsing.tagged_grammar import arguments

_BEGIN = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
_END = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
_TAG = "<｜DSML｜"
"""Beginning of all tags that are no end."""
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
_ALSO = ("<｜｜DSML｜｜", "<|DSML|", "<||DSML||", "<‖DSML‖")
"""Spellings of `_TAG` that models write besides."""
_TAGS = tuple(f"<{slash}{begin[1:]}" for begin in (_TAG, *_ALSO) for slash in ("", "/"))
_ARGUMENTS = ("parameter", "param", "argument", "arg")
_SECTIONS = ("function_calls", "tool_calls", "calls")


def _ends_of(*kinds: str) -> list[str]:
    """The tags that end what tags of these kinds began, in every spelling: models write a space before the kind."""
    return [f"{tag}{space}{kind}>" for tag in _TAGS if tag[1] == "/" for space in ("", " ") for kind in kinds]


_ENDS = _ends_of(*_ARGUMENTS)
_MARKED_END, _ANY_END = markers_of(*_ENDS), markers_of(*_ENDS, "</parameter>")
"""What ends a value, by whether the tag before it has its marker."""
_BARE_INVOKE = "<invoke"
_BARE = ("<param", "</param", "</invoke", _BARE_INVOKE)
"""Beginnings of tags within a call whose marker may be missing."""
_KINDS = (*_SECTIONS, "invoke", *_ARGUMENTS)
_KINDS_BEGUN = frozenset(name[:end] for name in _KINDS for end in range(len(name) + 1))
_MOST_TAG = MOST_KEY + 128

_MARK = "[｜|‖]{1,2}DSML[｜|‖]{1,2}"
_QUOTED = "\"[^\"]*\"|'[^']*'"
_ATTRIBUTE = re.compile(rf"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*=\s*({_QUOTED}|[^\s\"'<>/]+)")
_START = re.compile(rf"</?(?:{_MARK})?\s*(?P<kind>[a-z_]*)")
_WHOLE = re.compile(rf"<[^<>\"']*(?:(?:{_QUOTED})[^<>\"']*)*>")
_CUT = re.compile(rf"<[^<>\"']*(?:(?:{_QUOTED})[^<>\"']*)*(?:\"[^\"]*|'[^']*)?")
_MAY_END_TAG = re.compile("[<>]").search
_CONTROL = re.compile(
    rf"</?{_MARK}(?:\s*(?:{'|'.join(_KINDS)})\b(?:{_ATTRIBUTE.pattern})*(?:\s+[a-z]+(?:=(?:\"[^\"<>]*)?)?\Z)?\s*/?>?)?"
)


@dataclass(frozen=True)
class _Tag:
    kind: str
    ends: bool
    """Whether it ends what another tag began."""
    attributes: dict[str, str]
    closed: bool
    """Whether it ends what it begins."""
    text: str


class DeepSeekV32Calls(TaggedCalls):
    """Reads one answer."""

    value_end = _PARAMETER_END
    markers = (*_BEGIN, *_END, _INVOKE, _INVOKE_END, _PARAMETER, value_end)
    ends_content = _TAGS
    tags = (*_TAGS, *_BARE)
    begins = (_TAG, *_ALSO)
    control = _CONTROL
    call_tail = CallTail(*_ends_of("invoke", *_SECTIONS))

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(schemas, make_id)
        self._bare = False
        """Whether the tag that began the call lacks its marker."""
        self._spaced = False
        """Whether white space came behind the tag that began the call."""

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """Answers with calls of these tools, as `JsonCalls.grammar_for` has them."""
        call = either([cls._call(tool) for tool in together(tools)])
        begun = either([text(begin.removeprefix(_TAG) + "\n") for begin in _BEGIN])
        ended = either([text(end) for end in _END])
        rest = sequence(begun, several(call, "") if parallel else call, ended)
        return sequence(text(_TAG), rest) if must else within_text({_TAG: rest}, never=(*_END, *_ALSO[:2]))

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
        self._rest, self._raw = marker + self._rest, []
        self._state = self._outside

    def _outside(self) -> bool:
        """A tag outside of calls: the beginning of a call, or nothing."""
        tag = self._tag()
        if tag is None:
            return False
        self._state = self._content
        self._take(len(tag.text))
        if tag.kind == "invoke" and not tag.ends:
            name = known_name(tag.attributes.get("name", tag.attributes.get("function", "")), self._schemas)
            if is_name(name):
                self._bare = not tag.text.startswith(_TAGS)
                self._begin_call(name)
                if len(tag.attributes) > 1:
                    self._attributes(tag)
                if tag.closed:
                    self._end_call()
        elif tag.kind in _SECTIONS and not tag.ends:
            self._raw, self._state = [], self._in_section
        return True

    def _attributes(self, tag: _Tag) -> None:
        """Take the arguments that stand as attributes within the tag of the call."""
        schema = self._schemas.get(self._name)
        given = {key: value for key, value in tag.attributes.items() if key != "name"}
        for key in (key for key in given if key in (properties_of(schema) or {})):
            self._begin_argument(key, "")
            self._add(given[key])
            self._end_value(given=True)
        called = call_of({"name": self._name, **given}, self._schemas)
        if not self._arguments and called is not None and any(is_wrapper(key, schema) for key in given):
            self._write(in_json(called[1]))
            self._arguments, self._complete = -1, True

    def _in_section(self) -> bool:
        """Where a call begins whose tag may lack its marker."""
        text = self._rest = self._rest.lstrip()
        if text and (closed := self._leave_close_out()) is not False:
            return closed is True
        if _BARE_INVOKE.startswith(text[: len(_BARE_INVOKE)]):
            if len(text) <= len(_BARE_INVOKE):
                return False
            self._raw, self._state = [], self._outside
            return True
        if text.startswith("{"):
            self._raw = []
            self._begin_object()
            return True
        self._raw = []
        if (python := self._python()) is not False:
            return python is True
        self._state = self._content
        return True

    @override
    def _end_call(self) -> None:
        super()._end_call()
        if self._bare:
            self._state = self._in_section

    def _tag(self) -> _Tag | None:
        """The tag that `_rest` begins with, one of no kind if it is none; None where more text will tell."""
        start = _START.match(self._rest)
        kind = start["kind"] if start is not None else ""
        if start is not None and start.end() == len(self._rest) and kind in _KINDS_BEGUN:
            return None
        whole = _WHOLE.match(self._rest, 0, _MOST_TAG) if kind in _KINDS else None
        if whole is not None:
            text = whole.group()
            given = _ATTRIBUTE.findall(text, start.end()) if start is not None and "=" in text else ()
            attributes = {name: value.strip("\"'") for name, value in given}
            return _Tag(kind, text.startswith("</"), attributes, text.endswith("/>"), text)
        if kind in _KINDS and len(self._rest) < _MOST_TAG and _CUT.fullmatch(self._rest) is not None:
            self._ends_wait = _MAY_END_TAG
            return None
        return _Tag("", False, {}, False, self._tags.at(self._rest) or self._rest[:1])

    @override
    def _begin_call(self, name: str) -> None:
        self._spaced = False
        super()._begin_call(name)

    @override
    def _next(self) -> bool:
        self._spaced |= self._rest[0].isspace()
        self._skip_space()
        if not self._rest or (closed := self._leave_close_out()) is not False:
            return bool(self._rest) and closed is True
        if self._tags.at(self._rest) is None:
            return not self._tags.begun(self._rest) and self._text()
        tag = self._tag()
        if tag is None:
            return False
        if tag.kind == "invoke" and not tag.ends:
            same = known_name(tag.attributes.get("name", ""), self._schemas) == self._name
            if same and not self._arguments and not tag.closed and (self._takes_arguments or not self._spaced):
                self._take(len(tag.text))  # written twice
            else:
                self._end_call()
        elif tag.kind in _SECTIONS and tag.ends:
            self._end_call()
        elif tag.kind in _ARGUMENTS and not tag.ends and self._arguments >= 0:
            return self._parameter(tag)
        elif not tag.kind and not tag.text.startswith(_TAGS):
            return self._stray(tag.text)
        else:
            self._take(len(tag.text))
            if tag.kind == "invoke":
                self._end_call()
        return True

    @property
    def _takes_arguments(self) -> bool:
        """Whether the tool has any, as far as its schema says."""
        return properties_of(self._schemas.get(self._name)) != {}

    def _stray(self, text: str) -> bool:
        """Text that looks like a tag and is none."""
        if not self._complete:
            return self._give_up()
        self._aside.append(self._take(len(text)))
        return self._begin_aside()

    def _text(self) -> bool:
        """Text between arguments: a JSON object with all of them, or none."""
        if not self._arguments and (begun := self._whole_body()) is not False:
            return begun is True
        return self._begin_aside()

    def _parameter(self, tag: _Tag) -> bool:
        key, says = tag.attributes.get("name", tag.attributes.get("key")), tag.attributes.get("string", "").lower()
        if key is None:
            return self._give_up()
        self._take(len(tag.text))
        self._ends_of_value = _MARKED_END if tag.text.startswith(_TAGS) else _ANY_END
        is_string = says == "true" and "string" in types_of_argument(self._schemas.get(self._name), key)
        begin = self._begin_argument if tag.closed else self._begin_argument_or_all
        begin(key, tag.text, STRING if is_string else None, says == "false")
        if tag.closed:
            self._add(tag.attributes.get("value", ""))
            self._end_value(given=True)
        return True
