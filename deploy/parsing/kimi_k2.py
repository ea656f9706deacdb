"""Tool calls of Kimi K2 and K2.5, as their chat templates write them:

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>
<|tool_calls_section_end|>

What stands before the arguments is the call's id, and the model wants to see it again with the result. Where the model
writes other ids, as it does once it has seen some in a conversation, the tools of the request say which name is meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, ClassVar

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.events import Arguments
from deploy.parsing.json_calls import JsonCalls
from deploy.parsing.parser import MakeId, Schemas, in_other_case, is_name
from deploy.parsing.schema_types import properties_of

SECTION_BEGIN = "<|tool_calls_section_begin|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.+):[0-9]+")
_SPACE = re.compile(r"\s*([.:])\s*")
_INDEX = re.compile(r"[.:_#-]?[0-9]+$")
_KIND = re.compile(r"(?:functions?|tools?)[.:_/-]?")
_NAMELESS = re.compile(r"(?:functions?[.:])?[0-9]+|call_[A-Za-z0-9_-]+|chatcmpl-tool-[A-Za-z0-9]+")


class KimiK2Calls(JsonCalls):
    """Reads one answer."""

    section_begin = SECTION_BEGIN
    section_end = "<|tool_calls_section_end|>"
    spellings: ClassVar[Mapping[str, str]] = {
        "<|tool_call_section_begin|>": section_begin,
        "<|tool_call_section_end|>": section_end,
    }
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (section_begin, section_end, *spellings, call_begin, call_end, separator)
    ends_content = markers
    begins = (section_begin, "<|tool_call_section_begin|>", call_begin)
    control = re.compile("|".join(map(re.escape, markers)))

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(schemas, make_id)
        self._ids: set[str] = set()
        """Ids of the calls so far."""
        self._nameless: list[str] | None = None
        """The arguments so far of a call whose id holds no name."""

    @override
    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        head = (text(f"{cls.call_begin}functions."), name_of(tool), text(":"), number, text(cls.separator))
        return sequence(*head, json_object(tool), text(cls.call_end))

    @override
    def head(self, text: str) -> tuple[str, str] | None:
        """The id, and the name in it: "" where only the arguments can tell."""
        found = _ID.fullmatch(text)
        if found is not None and found["name"] in self._schemas:  # the common case, made short
            return self._unique(text, found["name"]), found["name"]
        call_id = _SPACE.sub(r"\1", text.strip().strip("\"'"))
        found = _ID.fullmatch(call_id)
        names = list(_names_in(call_id))
        known = [name for name in names if name in self._schemas]
        known = known or [cased for name in names if (cased := in_other_case(name, self._schemas)) is not None]
        if known:
            return self._unique(call_id if found is not None else "", known[0]), known[0]
        if found is not None:
            return (self._unique(call_id, found["name"]), found["name"]) if is_name(found["name"]) else None
        if _NAMELESS.fullmatch(call_id) is not None and self._schemas:
            only = next(iter(self._schemas)) if len(self._schemas) == 1 else ""
            return self._unique(call_id, only) if only else call_id, only
        return (self._unique("", names[0]), names[0]) if names and is_name(names[0]) else None

    @override
    def _stands_alone(self, head: str) -> bool:
        return _ID.fullmatch(head) is not None or any(name in self._schemas for name in _names_in(head))

    @override
    def _new_id(self, name: str) -> str:
        return self._unique("", name)

    def _unique(self, call_id: str, name: str) -> str:
        """`call_id`, or an id as the model knows them where it is empty or taken."""
        index = self._calls
        while not call_id or call_id in self._ids:
            call_id, index = f"functions.{name}:{index}", index + 1
        return call_id

    @override
    def _begin(self, call_id: str, name: str) -> None:
        if name:
            self._ids.add(call_id)
            super()._begin(call_id, name)
        else:
            self._nameless = []

    @override
    def _begin_body(self) -> None:
        super()._begin_body()
        if self._nameless is not None:
            self._state = self._nameless_body

    def _nameless_body(self) -> bool:
        """The arguments of a call that begins once they are complete."""
        assert self._nameless is not None
        text, complete = self._read()
        self._nameless.append(text)
        if complete:
            self._body_ended()
        elif complete is False:
            self._give_up()
        return complete is not None

    @override
    def _write(self, text: str) -> None:
        if self._nameless is None:
            super()._write(text)
        else:
            self._nameless.append(text)

    @override
    def _body_ended(self) -> None:
        if self._nameless is not None:
            arguments, self._nameless = "".join(self._nameless), None
            name = self._tool_of(json.loads(arguments))
            if name is None:
                self._give_up()
                return
            self._begin(self._unique("", name), name)
            self._out.append(Arguments(self._calls, arguments))
        super()._body_ended()

    @override
    def _give_up(self, more: str = "") -> bool:
        self._nameless = None
        return super()._give_up(more)

    def _tool_of(self, arguments: dict[str, Any]) -> str | None:
        """The only tool that takes these arguments."""
        fitting = [name for name, schema in self._schemas.items() if _takes(schema, arguments.keys())]
        return fitting[0] if len(fitting) == 1 else None


def _takes(schema: Mapping[str, Any], keys: Set[str]) -> bool:
    """Whether these may be the names of all arguments by their schema."""
    required = schema.get("required")
    needed = required if isinstance(required, list) else ()
    return keys <= (properties_of(schema) or {}).keys() and all(
        name in keys for name in needed if isinstance(name, str)
    )


def _names_in(call_id: str) -> Iterator[str]:
    """The names that an id may hold, the likeliest first."""
    without_index = re.sub(r":[0-9]+$", "", call_id)
    yield without_index.removeprefix("functions.")
    yield without_index
    for name in (without_index, _INDEX.sub("", call_id), _INDEX.sub("", without_index)):
        yield _KIND.sub("", name, count=1) if _KIND.match(name) else name
        yield re.split(r"[.:/]", name)[-1]
