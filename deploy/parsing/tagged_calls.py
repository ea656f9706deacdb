"""Tool calls whose arguments stand one by one between tags: GLM and DeepSeek V3.2. They become JSON on the fly."""

from __future__ import annotations

import json
from typing import Final

from deploy.parsing.events import Arguments
from deploy.parsing.markers import Markers
from deploy.parsing.parser import CallParser, MakeId, Schemas
from deploy.parsing.schema_types import as_json, types_of_argument

MOST_KEY: Final = 1024
"""Characters of an argument's name."""
_STRING: Final = frozenset(("string",))


class TaggedCalls(CallParser):
    """A subclass says what the tags are. Strings are passed on as they come, other values when they are complete."""

    value_end: str
    """Ends a value."""

    def __init__(self, markers: Markers, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(markers)
        self._end_of_value = Markers(self.value_end)
        self._schemas = schemas
        self._make_id = make_id
        self._name = ""
        self._arguments = 0
        """Of the call, so far."""
        self._value: list[str] = []
        self._types = _STRING

    def _next(self) -> bool:
        """Where another argument, or the call's end, is to come."""
        raise NotImplementedError

    def _write(self, text: str) -> None:
        if text:
            self._out.append(Arguments(self._calls, text))

    def _begin_call(self, name: str) -> None:
        self._begin(self._make_id(), name)
        self._name, self._arguments = name, 0
        self._write("{")
        self._state = self._next

    def _end_call(self) -> None:
        self._write("}")
        self._end()

    def _begin_argument(self, key: str, types: frozenset[str] | None = None) -> None:
        """`types`: what the value may be; what the schema says if the model does not."""
        comma = ", " if self._arguments else ""
        self._arguments += 1
        self._types = types_of_argument(self._schemas.get(self._name), key) if types is None else types
        self._write(f"{comma}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._types == _STRING else ""))
        self._value = []
        self._state = self._in_value

    def _in_value(self) -> bool:
        end = self._end_of_value.search(self._rest)
        cut = end.start() if end is not None else len(self._rest) - self._end_of_value.held(self._rest)
        text = self._take(cut)
        if self._types == _STRING:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)
        if end is None:
            return False
        self._take(len(self.value_end))
        self._write('"' if self._types == _STRING else as_json("".join(self._value), self._types))
        self._state = self._next
        return True
