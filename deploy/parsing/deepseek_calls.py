"""Tool calls of DeepSeek V3 (0324) and R1 (0528), as their chat templates write them:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

And those of DeepSeek V3.1:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Each of them is read in the other's form, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.json_calls import JsonCalls
from deploy.parsing.parser import MOST_NAME, is_name, known_name

_KIND = re.compile(r"(?:functions?|tools?)(?:[.:/]|\s+)")
_MAY_END_NAME = re.compile(r"[\n`{<(]").search
_END_OF_NAME = re.compile(r"[\n`{<]").search
_KINDS = ("function", "functions", "tool", "tools", "type")


def _spellings(*markers: str) -> Mapping[str, str]:
    """How models write markers that they spell out, as smaller ones distilled from these do: with bars and underscores
    of ASCII, with blanks, and the beginning of a section without its last word."""
    bars, blanks = ("｜", "|"), ("▁", "_", " ", "\\_")
    written = {
        marker.replace("｜", bar).replace("▁", blank): marker for marker in markers for bar in bars for blank in blanks
    }
    short = {f"<{bar}tool{blank}calls{bar}>": markers[0] for bar in bars for blank in blanks}
    return {spelling: marker for spelling, marker in (written | short).items() if spelling != marker}


def _spelled(spellings: Mapping[str, str], *markers: str) -> list[str]:
    """The spellings of these markers."""
    return [spelling for spelling, marker in spellings.items() if marker in markers]


class DeepSeekCalls(JsonCalls):
    """A subclass says how the grammar has a call."""

    section_begin = "<｜tool▁calls▁begin｜>"
    section_end = "<｜tool▁calls▁end｜>"
    call_begin = "<｜tool▁call▁begin｜>"
    call_end = "<｜tool▁call▁end｜>"
    separator = "<｜tool▁sep｜>"
    markers = (section_begin, section_end, call_begin, call_end, separator)
    spellings = _spellings(*markers)
    ends_content = (*markers, *spellings)
    begins = (section_begin, call_begin, *_spelled(spellings, section_begin, call_begin))
    control = re.compile("|".join(map(re.escape, ends_content)))

    @override
    def head(self, text: str) -> tuple[str, str] | None:
        """Id and name. The name is "" where a kind of tool stands for it, and a name follows."""
        if (kind := text.strip()) in _KINDS and kind not in self._schemas:  # the common cases, made short
            return "", ""
        if kind in self._schemas and is_name(kind):
            return self._make_id(), kind
        name = known_name(text, self._schemas)
        if name in self._schemas and is_name(name):
            return self._make_id(), name
        if name in _KINDS and name not in self._schemas:
            return "", ""
        bare = _KIND.sub("", name, count=1).strip()
        name = bare if bare in self._schemas or not is_name(name) else name
        return (self._make_id(), name) if is_name(name) else None

    @override
    def _stands_alone(self, head: str) -> bool:
        return head in _KINDS or super()._stands_alone(head)

    @override
    def _before(self) -> bool:
        return super()._before() if self._call[1] else self._name()

    def _name(self) -> bool:
        """The line with the name, which a fence, an object or the call's end may end, too."""
        if _MAY_END_NAME(self._rest) is None and len(self._rest) < MOST_NAME:  # the common case, made short
            self._ends_wait = _MAY_END_NAME
            return False
        self._skip_space()
        marker = (self._markers.at(self._rest) or "") if self._rest[:1] == "<" else ""
        if self._meant(marker) == self.separator:
            self._take(len(marker))  # written twice
            return True
        if marker == self.close:
            return self._leave_close_out() is True
        if not marker and self._rest[:1] in ("", "<") and self._markers.begun(self._rest):
            return False
        if len(self._rest) < MOST_NAME and _MAY_END_NAME(self._rest) is None:
            self._ends_wait = _MAY_END_NAME
            return False
        may_be_python = "(" in self._rest or self._rest[0] in "[`"
        if may_be_python and (python := self._python()) is not False:
            return python is True
        found = _END_OF_NAME(self._rest[:MOST_NAME])
        if found is None:
            return len(self._rest) >= MOST_NAME and self._give_up()
        call = self.head(self._rest[: found.start()])
        if call is None or not call[1]:
            return self._give_up()
        self._call = call
        self._take(found.start())
        return True


class DeepSeekV3Calls(DeepSeekCalls):
    """Reads one answer of DeepSeek V3 or R1."""

    between = "\n"

    @override
    @classmethod
    def one_call(cls, tool: AllowedTool) -> Tag:
        """A call, as `grammar_for` has it."""
        head = (text(f"{cls.call_begin}function{cls.separator}"), name_of(tool), text("\n```json\n"))
        return sequence(*head, json_object(tool), text(f"\n```{cls.call_end}"))


class DeepSeekV31Calls(DeepSeekCalls):
    """Reads one answer of DeepSeek V3.1."""
