"""Tool calls of Kimi K2 and K2.5, as their chat templates write them:

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>
<|tool_calls_section_end|>

What stands before the arguments is the call's id, and the model wants to see it again with the result.
"""

from __future__ import annotations

import re

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.json_calls import JsonCalls
from deploy.parsing.parser import is_name

SECTION_BEGIN = "<|tool_calls_section_begin|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.+):[0-9]+")


class KimiK2Calls(JsonCalls):
    """Of one answer."""

    section_begin = SECTION_BEGIN
    section_end = "<|tool_calls_section_end|>"
    call_begin = "<|tool_call_begin|>"
    call_end = "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (section_begin, section_end, call_begin, call_end, separator)

    @override
    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        number = {"type": "regex", "pattern": "[0-9]{1,4}"}
        head = (text(f"{cls.call_begin}functions."), name_of(tool), text(":"), number, text(cls.separator))
        return sequence(*head, json_object(tool), text(cls.call_end))

    @override
    def head(self, text: str) -> tuple[str, str] | None:
        """The id, and the name in it."""
        call_id = text.strip()
        found = _ID.fullmatch(call_id)
        return (call_id, found["name"]) if found is not None and is_name(found["name"]) else None
