"""Tool calls of DeepSeek V3 (0324) and R1 (0528), as their chat templates write them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.json_calls import JsonCalls
from deploy.parsing.parser import MOST_NAME, is_name


class DeepSeekV3Calls(JsonCalls):
    """Of one answer."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    markers = (section_begin, section_end, call_begin, call_end, separator)
    between = "\n"

    @override
    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        head = (text(f"{cls.call_begin}function{cls.separator}"), name_of(tool), text("\n```json\n"))
        return sequence(*head, json_object(tool), text(f"\n```{cls.call_end}"))

    @override
    def head(self, text: str) -> tuple[str, str] | None:
        """The kind of tool; there is one kind. The name follows."""
        return ("", "") if text.strip() == "function" else None

    @override
    def _before(self) -> bool:
        return super()._before() if self._call[1] else self._name()

    def _name(self) -> bool:
        """The line with the name, which a fence, an object or the call's end may end, too."""
        line = self._rest[:MOST_NAME]
        ends = [end for mark in ("\n", "`", "{", "<") if (end := line.find(mark, 1)) > 0]
        if not ends:
            return len(line) == MOST_NAME and self._give_up()
        name = line[: min(ends)].strip()
        if not is_name(name):
            return self._give_up()
        self._call = (self._make_id(), name)
        self._take(min(ends))
        return True
