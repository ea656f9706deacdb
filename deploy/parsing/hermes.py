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

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesCalls(ObjectCalls):
    """Parser of the calls in one Hermes answer. A call that lacks its end is complete where its object is."""

    markers = (_BEGIN, _END)
    ends_content = markers
    begins = (_BEGIN,)
    begin, between = _BEGIN, "\n"
    control = re.compile("|".join(map(re.escape, markers)))

    @classmethod
    @override
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        head = (text('\n{"name": "'), name_of(tool), text('", "arguments": '))
        return sequence(*head, json_object(tool), text(f"}}\n{_END}"))

    @override
    def _marker(self, marker: str) -> None:
        self._fenced = False
        self._state = self._head if marker == _BEGIN else self._content

    def _head(self) -> bool:
        """State before the object."""
        self._skip_space()
        if self._rest.startswith(_BEGIN):
            self._take(len(_BEGIN))  # written twice
            return True
        begun = self._body_begun()
        if begun == "maybe" or (begun == "no" and _BEGIN.startswith(self._rest)):
            return False
        if begun == "no":
            return self._give_up()
        self._state = self._object_begun
        return True

    @override
    def _behind_object(self) -> bool:
        if not self._fence_end():
            return False
        if self._rest.startswith(_END):
            self._take(len(_END))
        elif _END.startswith(self._rest):
            return False
        self._raw, self._state = [], self._content
        return True
