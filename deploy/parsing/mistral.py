"""Tool calls of Mistral's models since 2025, as their chat templates write them, one behind the other:

[TOOL_CALLS]NAME[ARGS]ARGUMENTS

Some versions write the call's id between, [CALL_ID]ID. Before, all calls of an answer were one JSON array of objects
behind one marker, which is read as well.
"""

from __future__ import annotations

import re
from typing import Final

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, json_object, name_of, sequence, text
from deploy.parsing.json_body import NOTHING
from deploy.parsing.object_calls import ObjectCalls
from deploy.parsing.parser import MOST_NAME, MakeId, Schemas, is_name, known_name

CLOSE: Final = "[/THINK]"
"""The end of the reasoning of these models."""
_CALL, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_END_OF_NAME = re.compile(r"[\[{`]")
_OWN_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids as these models write them, and want to see them again."""


class MistralCalls(ObjectCalls):
    """Parser of the calls in one Mistral answer."""

    markers = (_CALL, _ID, _ARGUMENTS)
    ends_content = markers
    begins = (_CALL,)
    begin, between = _CALL, ""
    control = re.compile("|".join(map(re.escape, markers)))
    close = CLOSE

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(schemas, make_id)
        self._name = self._id = ""
        self._ids: set[str] = set()
        """Ids of the calls so far."""
        self._in_array = False

    @classmethod
    @override
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        return sequence(name_of(tool), text(_ARGUMENTS), json_object(tool))

    @override
    def _marker(self, marker: str) -> None:
        self._fenced = self._in_array = False
        self._state = self._head if marker == _CALL else self._content

    def _head(self) -> bool:
        """The name, which ends at a marker or where the arguments begin; or an object or an array of such."""
        self._skip_space()
        if self._rest and (closed := self._leave_close_out()) is not False:
            return closed is True
        if (python := self._python()) is not False:
            return python is True
        if self._rest.startswith("`") and not self._fenced:
            begun = self._body_begun()
            return self._fenced or (begun != "maybe" and self._give_up())
        if self._rest.startswith("{"):
            self._state = self._object_begun
            return True
        if self._rest.startswith("["):
            marker = self._markers.at(self._rest)
            if marker is None and self._markers.begun(self._rest):
                return False
            if marker in (_ID, _ARGUMENTS):
                return self._give_up()
            self._take(len(marker or "["))  # a marker that was written twice
            self._in_array = marker is None
            self._state = self._head if marker else self._item
            return True
        found = _END_OF_NAME.search(self._rest, 0, MOST_NAME + 1)
        if found is None:
            return len(self._rest) > MOST_NAME and self._give_up()
        behind = self._rest[found.start() :]
        marker = self._markers.at(behind)
        if found.group() == "[" and marker is None and self._markers.begun(behind):
            return False
        name = known_name(self._rest[: found.start()], self._schemas)
        if not is_name(name) or (found.group() == "[" and marker is None):
            return self._give_up()
        self._name, self._id = name, ""
        self._take(found.start() + len(marker if marker in (_ID, _ARGUMENTS) else ""))
        self._state = self._in_id if marker == _ID else self._before
        return True

    def _in_id(self) -> bool:
        """The id, which ends at a marker or where the arguments begin."""
        found = _END_OF_NAME.search(self._rest, 0, MOST_NAME + 1)
        if found is None:
            return len(self._rest) > MOST_NAME and self._give_up()
        behind = self._rest[found.start() :]
        marker = self._markers.at(behind)
        if found.group() == "[" and marker is None and self._markers.begun(behind):
            return False
        if found.group() == "[" and marker != _ARGUMENTS:
            return self._give_up()
        self._id = self._rest[: found.start()].strip()
        self._take(found.start() + len(marker or ""))
        self._state = self._before
        return True

    def _before(self) -> bool:
        """State before the arguments, which may be missing in calls of a tool that takes none."""
        self._skip_space()
        marker = self._markers.at(self._rest)
        if marker == self.close:
            return self._leave_close_out() is True
        if marker == _ARGUMENTS:
            self._take(len(marker))
            return True
        begun = self._body_begun()
        if begun == "yes":
            self._begin(self._own_id(), self._name)
            self._begin_body()
            return True
        if marker == _CALL and self._name in self._schemas:
            self._begin(self._own_id(), self._name)
            self._write("{}")
            self._body_ended()
            return True
        other = self._other_begun() if begun == "no" else "no"
        if other == "yes":
            self._begin(self._own_id(), self._name)
            self._begin_other()
            return True
        if "maybe" in (begun, other) or (marker is None and self._markers.begun(self._rest)):
            return False
        return self._give_up()

    def _own_id(self) -> str:
        """The id that the model wrote, or a new one where there is none, or it was another call's."""
        if _OWN_ID.fullmatch(self._id) is None or self._id in self._ids:
            return self._make_id()
        self._ids.add(self._id)
        return self._id

    @override
    def _body_ended(self) -> None:
        if self._in_array or not self._name:
            super()._body_ended()
            return
        self._name = ""
        self._end()
        self._state = self._behind_object

    def _item(self) -> bool:
        """State in an array of calls."""
        self._skip_space()
        if not self._rest:
            return False
        if self._rest[0] in ",]":
            ended = self._take(1) == "]"
            self._in_array, self._raw = not ended, []
            self._state = self._behind_object if ended and self._fenced else self._content if ended else self._item
            return True
        if self._rest[0] != "{":
            return self._give_up()
        self._state = self._object_begun
        return True

    @override
    def _behind_object(self) -> bool:
        if not self._fence_end():
            return False
        if not self._rest:
            return False
        if self._in_array:
            self._raw, self._state = [], self._item
            return True
        behind = self._rest.lstrip(" ,;\n")
        if not behind and self._rest.isspace() is False and len(self._rest) < MOST_NAME:
            return False
        more = behind.startswith("{") or any(self._called(name, behind) for name in self._schemas)
        if not more and any(self._called(name, behind) is None for name in self._schemas):
            return False
        self._raw, self._state = [], self._head if more else self._content
        self._rest = behind if more else self._rest
        return True

    def _called(self, name: str, text: str) -> bool | None:
        """Whether `text` is a call of this tool without the marker before it; None where more text will tell."""
        if not text.startswith(name):
            return None if text and name.startswith(text) else False
        rest = text[len(name) :].lstrip()
        if rest.startswith((_ARGUMENTS, _ID)):
            return True
        return None if any(marker.startswith(rest) for marker in (_ARGUMENTS, _ID)) else False

    @override
    def _ended(self) -> None:
        if self._state == self._item and not "".join(self._raw).strip():  # the array's end is cut
            self._raw, self._rest, self._state = [], "", self._content
            return
        if self._state == self._behind_object and not self._in_array and not self._fenced:
            self._raw, self._state = [], self._content  # what may have been another call is none
            return
        ends_with_head = self._state == self._before and self._rest in ("", *NOTHING) and not self._fenced
        if ends_with_head and not self._cut and self._name in self._schemas:
            self._rest = ""
            self._begin(self._own_id(), self._name)
            self._no_arguments()
            return
        super()._ended()
