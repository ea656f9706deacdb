"""Tool calls that are one JSON object each, with a name and arguments: what the parsers of such formats share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from typing_extensions import override

from deploy.parsing.call_grammar import AllowedTool, Tag, either, sequence, several, text, together, within_text
from deploy.parsing.function_calls import FunctionCalls
from deploy.parsing.json_object import JsonObject, State
from deploy.parsing.parser import MOST_NAME, is_name, known_name

_SPACE: Final = r"[ \t\n\r]*"
_HEAD = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"(?P<name>[^"\\]*)"{_SPACE},{_SPACE}"(?:arguments|parameters)"{_SPACE}:{_SPACE}'
    r"(?=\{)"
)
_MOST_HEAD: Final = MOST_NAME + 64
"""Characters before the arguments."""


class ObjectCalls(FunctionCalls):
    """States that read such an object. Arguments are passed on as they come where the name stands right before them,
    which is the order of every template; an object in another order is read when it is complete. Its other members mean
    nothing."""

    begin: ClassVar[str]
    """Text before a call."""
    between: ClassVar[str]
    """Text that the chat template writes between two calls."""

    @classmethod
    def grammar_for(cls, tools: Sequence[AllowedTool], must: bool, parallel: bool) -> Tag:
        """Answers with calls of these tools, as `JsonCalls.grammar_for` has them."""
        rest = either([cls._behind_begin(tool) for tool in together(tools)])
        if not must:
            return within_text({cls.begin: rest})
        call = sequence(text(cls.begin), rest)
        return several(call, cls.between) if parallel else call

    @classmethod
    def _behind_begin(cls, tool: AllowedTool) -> Tag:
        """The rest of a call."""
        raise NotImplementedError

    def _object_begun(self) -> bool:
        """State in an object, which `_rest` begins with, as far as the arguments."""
        found = _HEAD.match(self._rest, 0, _MOST_HEAD)
        name = known_name(found["name"], self._schemas) if found is not None else ""
        if found is not None and is_name(name):
            self._take(found.end())
            self._begin(self._make_id(), name)
            self._begin_body()
            return True
        if found is None and len(self._rest) < _MOST_HEAD and not self._decided():
            return False
        self._begin_object()
        return True

    def _decided(self) -> bool:
        """Whether the object is complete or broken, so that no head may come any more."""
        one = JsonObject()
        one.feed(self._rest)
        return one.state is not State.OPEN

    @override
    def _body_ended(self) -> None:
        self._end()
        self._state = self._behind_arguments

    def _behind_arguments(self) -> bool:
        """State behind the arguments, up to the end of the object around them. Models forget its brace."""
        self._skip_space()
        if not self._rest:
            return False
        if self._rest[0] == ",":
            marker, end = self._markers.search(self._rest), self._rest.find("}", 0, MOST_NAME)
            stop = marker.start() if marker is not None else len(self._rest)
            if marker is None and end < 0 and len(self._rest) < MOST_NAME:
                return False
            self._take(end + 1 if 0 <= end < stop else min(stop, MOST_NAME))
        elif self._rest[0] == "}":
            self._take(1)
        self._state = self._behind_object
        return True

    @override
    def _ended(self) -> None:
        if self._state in (self._behind_arguments, self._behind_object):  # the call is complete; its end is cut
            self._raw, self._rest, self._state = [], "", self._content
        elif self._state == self._object_begun:
            self._begin_object()
        else:
            super()._ended()
