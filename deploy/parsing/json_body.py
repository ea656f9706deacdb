"""A JSON object that stands for a call's arguments, perhaps in a fence of Markdown."""

from __future__ import annotations

import re
from typing import Literal

from deploy.parsing.events import Arguments
from deploy.parsing.json_object import JsonObject, State
from deploy.parsing.parser import CallParser

_FENCE = re.compile(r"```[ \t]*[A-Za-z]*[ \t]*(?=[^A-Za-z \t])")
_FENCE_BEGUN = re.compile(r"`{1,2}|```[ \t]*[A-Za-z]*[ \t]*")
_FENCE_END = "```"


class JsonBody(CallParser):
    """States of a parser whose calls may have such a body. A subclass begins the call before, and ends it behind."""

    _json: JsonObject
    _fenced = False
    """Whether a fence has begun and not ended."""

    def _body_begun(self) -> Literal["yes", "no", "maybe"]:
        """Whether a body begins with `_rest`, which does not begin with white space. A fence before it is taken."""
        if not self._fenced and (fence := _FENCE.match(self._rest)) is not None:
            self._take(fence.end())
            self._fenced = True
            self._skip_space()
        if self._rest.startswith("{"):
            return "yes"
        if not self._rest or (not self._fenced and _FENCE_BEGUN.fullmatch(self._rest) is not None):
            return "maybe"
        return "no"

    def _begin_body(self) -> None:
        """The call has begun: its arguments come next."""
        self._json = JsonObject()
        self._state = self._body

    def _write(self, text: str) -> None:
        if text:
            self._out.append(Arguments(self._calls, text))

    def _body(self) -> bool:
        used, text = self._json.feed(self._rest)
        self._take(used)
        if text:
            self._out.append(Arguments(self._calls, text))
        if self._json.state is State.BROKEN:
            return self._give_up()
        if self._json.state is State.DONE:
            self._body_ended()
        return True

    def _body_ended(self) -> None:
        """The arguments are complete."""
        raise NotImplementedError

    def _fence_end(self) -> bool:
        """Take the fence's end, if there is one, and white space around it; whether that is decided."""
        self._skip_space()
        if self._fenced:
            if self._rest.startswith(_FENCE_END):
                self._take(len(_FENCE_END))
                self._fenced = False
                self._skip_space()
            elif _FENCE_END.startswith(self._rest):
                return False
        return True
