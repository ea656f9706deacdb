"""A JSON object that stands for a call's arguments, perhaps in a fence of Markdown, or for a whole call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from typing_extensions import override

from deploy.parsing.events import Arguments, Event
from deploy.parsing.json_object import JsonObject, State, in_json
from deploy.parsing.parser import MOST_NAME, CallParser, Schemas, known_name
from deploy.parsing.schema_types import properties_of
from deploy.text.mending import without_halves

_FENCE = re.compile(r"```[ \t]*[A-Za-z]*[ \t]*(?=[^A-Za-z \t])")
_FENCE_BEGUN = re.compile(r"`{1,2}|```[ \t]*[A-Za-z]*[ \t]*")
_FENCE_END = "```"
_ENDS_FENCE = re.compile(r"[^A-Za-z]").search
NOTHING: Final = ("null", "None", "none", "undefined")
"""Words for no arguments."""
_WORDS = "|".join(NOTHING)
_OTHER = re.compile(rf'"(?=\s*(?:[{{"]|{_WORDS}))|\[\s*(?=[{{\]])|(?:{_WORDS})(?=[^A-Za-z0-9_])')
"""Beginning of arguments that are no object: one as a string, one in an array, or none."""
_OTHER_BEGUN = re.compile(r'\[\s*|"?\s*[A-Za-z]*')
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_NAMES: Final = ("name", "function", "function_name", "tool_name", "tool")
_ABOUT: Final = ("id", "call_id", "type", "index")
"""Members that say something of the call, where the tool has no parameters of these names."""
ARGUMENTS: Final = ("arguments", "parameters", "args", "params", "input", "kwargs")
"""Names of members that hold all arguments of a call."""
_BEGINS_WRAPPER: Final = frozenset(name[0] for name in (*ARGUMENTS, "name"))
_WRAPPER = re.compile(rf'\{{\s*(?:"name"\s*:\s*"[^"\\]*"\s*,\s*)?"(?:{"|".join(ARGUMENTS)})"\s*:\s*(?=[{{"])', re.ASCII)
_ANY_SPACE = re.compile(r"\s+")
_COMPOSED: Final = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties", "additionalProperties")
"""Keywords by which a tool may have arguments beside its properties."""


def call_of(value: Any, schemas: Schemas) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a call of one of the tools that is one JSON object; None if it is none. Models also write
    the arguments as a string that holds the object, beside the name, as the one member that has the tool's name, or
    leave them away, and put all into a member `function`. Of what stands beside the name all goes along where the
    schema takes it, else what it knows."""
    if not isinstance(value, dict):
        return None
    if isinstance(inner := value.get("function"), dict):
        return call_of(inner, schemas)
    if len(value) == 1:
        [(only, given)] = value.items()
        if isinstance(given, dict) and (called := known_name(only, schemas)) in schemas:
            return called, given
    key = next((key for key in _NAMES if isinstance(value.get(key), str)), "")
    name = value.get(key)
    if not isinstance(name, str) or (name := known_name(name, schemas)) not in schemas:
        return None
    held = next((held for held in ARGUMENTS if held in value), None)
    if held is not None:
        arguments = _object_of(value[held])
        return None if arguments is None else (name, arguments)
    known = properties_of(schemas[name])
    beside = {
        other: value[other] for other in value if other != key and (other in (known or ()) or other not in _ABOUT)
    }
    if known is None or beside.keys() <= known.keys():
        return name, beside
    taken = {other: value[other] for other in beside if other in known}
    return (name, taken) if taken else None


def is_wrapper(name: str, schema: Mapping[str, Any] | None) -> bool:
    """Whether an argument of this name is none of the tool's, but holds them all."""
    known = properties_of(schema)
    if name not in ARGUMENTS or schema is None or known is None or name in known:
        return False
    return not any(schema.get(keyword) for keyword in _COMPOSED)


def _object_of(value: Any) -> dict[str, Any] | None:
    """The object that stands for arguments, however it is wrapped."""
    if isinstance(value, str):
        text = value.strip()
        if not text or text in NOTHING:
            return {}
        one = JsonObject()
        used, text = one.feed(text)
        value = json.loads(text) if one.state is State.DONE and used else None
        return value if isinstance(value, dict) else None
    if isinstance(value, list) and len(value) < 2:
        value = value[0] if value else {}
    return {} if value is None else value if isinstance(value, dict) else None


class JsonBody(CallParser):
    """States of a parser whose calls may have such a body. A subclass begins the call before, and ends it behind."""

    _json: JsonObject
    _pieces: list[str]
    """Text of a body that is read as a whole."""
    _fenced = False
    """Whether a fence has begun and not ended."""
    _bracketed = False
    """Whether the body stands in an array of its own."""
    _fed: tuple[int, str] | None = None
    """What `_json` has said to `_rest`, where it was given that already."""
    _as_it_is: Callable[[str], object | None] | None = None
    """See `JsonObject.as_it_is`."""

    def _body_begun(self) -> Literal["yes", "no", "maybe"]:
        """Whether a body begins with `_rest`, which does not begin with white space. A fence before it is taken."""
        if self._rest[:1] == "`" and not self._fenced and (fence := _FENCE.match(self._rest)) is not None:
            self._take(fence.end())
            self._fenced = True
            self._skip_space()
        if self._rest[:1] == "{":
            return "yes"
        if not self._rest or (not self._fenced and _FENCE_BEGUN.fullmatch(self._rest) is not None):
            self._ends_wait = _ENDS_FENCE if self._rest.startswith(_FENCE_END) else None
            return "maybe"
        return "no"

    def _fence_comes(self) -> bool:
        """Whether all of `_rest` is the beginning of a fence."""
        if self._fenced or self._rest not in ("`", "``", _FENCE_END):
            return False
        self._ends_wait = _ENDS_FENCE if self._rest == _FENCE_END else None
        return True

    def _other_begun(self) -> Literal["yes", "no", "maybe"]:
        """Whether arguments that are no object begin with `_rest`, where `_body_begun` found none."""
        if self._fenced and self._rest.startswith("`"):
            return (
                "yes" if self._rest.startswith(_FENCE_END) else "maybe" if _FENCE_END.startswith(self._rest) else "no"
            )
        if self._markers.at(self._rest) is not None:
            return "no"
        if _OTHER.match(self._rest) is not None:
            return "yes"
        begun = _OTHER_BEGUN.fullmatch(self._rest)
        if begun is None:
            return "no"
        begun_word = self._rest.removeprefix('"').lstrip()
        return "maybe" if self._rest[0] == "[" or any(word.startswith(begun_word) for word in NOTHING) else "no"

    def _begin_body(self) -> None:
        """The call has begun: its arguments come next."""
        self._json, self._bracketed = JsonObject(), False
        self._state = self._body_start

    def _begin_other(self) -> None:
        """The call has begun: arguments that are no object come next."""
        self._begin_body()
        if self._rest.startswith("["):
            found = _OTHER.match(self._rest)
            self._take(0 if found is None else found.end())
            self._bracketed = True
            if self._rest.startswith("]"):
                self._take(1)
                self._no_arguments()
        elif self._rest.startswith('"'):
            self._take(1)
            self._pieces, self._state = [], self._in_string
        else:
            found = _OTHER.match(self._rest)
            self._take(0 if found is None else found.end())
            self._no_arguments()

    def _no_arguments(self) -> None:
        self._write("{}")
        self._body_ended()

    def _write(self, text: str) -> None:
        if text:
            self._out.append(Arguments(self._calls, text))

    def _read(self) -> tuple[str, bool | None]:
        """Take what is there of the object. Return its text as it is to be passed on, and whether it is complete: None
        if it goes on, or if more text will tell; False if it is none."""
        used, text = self._fed or self._json.feed(self._rest)
        self._fed = None
        if self._json.state is State.OPEN:
            self._raw.append(self._rest)
            self._rest = ""
            return text, None
        self._take(used)
        if self._json.state is not State.BROKEN:
            return text, True if self._json.state is State.DONE else None
        closing = self._json.closing()
        ends = self._ends_body() if closing is not None else False
        return text + (closing or "") if ends else text, ends

    def _body_start(self) -> bool:
        """State before the object, which may hold the arguments as its one member `arguments`, perhaps behind the
        tool's name."""
        if self._rest == '{"' or self._rest == "{":  # the common cases, made short
            return False
        if self._rest[:1] == "{" and (self._rest[1:2] != '"' or self._rest[2] in _BEGINS_WRAPPER):
            wraps = self._wraps()
            if wraps is None:
                return False
            if wraps and (found := _WRAPPER.match(self._rest)) is not None:
                self._take(found.end())
                if self._rest.startswith('"'):
                    self._take(1)
                    self._pieces, self._state = [], self._in_string
                    return True
        self._state = self._body
        return True

    @override
    def _ended(self) -> None:
        if self._state == self._body_start:
            self._state = self._body
        else:
            super()._ended()

    def _wraps(self) -> bool | None:
        """Whether `_rest` begins with an object around the arguments; None where more text will tell."""
        schema = self._schemas.get(self._called_tool)
        begun = _ANY_SPACE.sub("", self._rest[:MOST_NAME])
        for name in (name for name in ARGUMENTS if is_wrapper(name, schema)):
            for head in (f'{{"{name}":', f'{{"name":"{self._called_tool}","{name}":'):
                if begun.startswith(head) and len(begun) > len(head):
                    return begun[len(head)] in '{"'
                if head.startswith(begun):
                    return None
        return False

    def _body(self) -> bool:
        text, complete = self._read()
        self._write(text)
        if complete:
            self._body_ended()
        elif complete is False:
            self._give_up()
        elif not self._rest:
            self._as_it_is, self._more = self._json.as_it_is, self._more_of_body
        return complete is not None

    def _more_of_body(self, text: str) -> list[Event] | None:
        """Take text within the body, which does not end there: what most texts do, made short."""
        if self._as_it_is is not None and self._as_it_is(text) is not None:
            self._raw.append(text)
            return [Arguments(self._calls, text)]
        fed = self._json.feed(text)
        if self._json.state is State.DONE and fed[0] == len(text):
            self._raw.append(text)
            self._more, self._out = None, []
            self._write(fed[1])
            self._body_ended()
            return self._out
        if self._json.state is not State.OPEN:
            self._fed = fed
            return None
        self._raw.append(text)
        self._as_it_is = self._json.as_it_is
        return [Arguments(self._calls, fed[1])] if fed[1] else []

    def _ends_body(self) -> bool | None:
        """Whether arguments end with `_rest` though brackets are open; None where more text will tell."""
        if self._rest.startswith("`"):
            return True if self._rest.startswith(_FENCE_END) else None if _FENCE_END.startswith(self._rest) else False
        if self._markers.at(self._rest) is not None:
            return True
        return None if self._markers.begun(self._rest) else False

    def _in_string(self) -> bool:
        """An object as a string, which is passed on when it is complete."""
        found = _IN_STRING.match(self._rest)
        self._pieces.append(self._take(0 if found is None else found.end()))
        if not self._rest.startswith('"'):
            return False
        self._take(1)
        try:
            value = _object_of(without_halves(json.loads(f'"{"".join(self._pieces)}"', strict=False)))
        except ValueError:
            value = None
        if value is None:
            return self._give_up()
        self._write(in_json(value))
        self._body_ended()
        return True

    def _body_ended(self) -> None:
        """The arguments are complete."""
        raise NotImplementedError

    def _begin_object(self) -> None:
        """An object that is a whole call comes next."""
        self._json, self._pieces, self._state = JsonObject(), [], self._object

    def _object(self) -> bool:
        """A call that is told when all of it is there."""
        text, complete = self._read()
        self._pieces.append(text)
        if not complete:
            return complete is False and self._give_up()
        call = call_of(json.loads("".join(self._pieces)), self._schemas)
        if call is None:
            return self._give_up()
        self._tell_call(*call)
        return True

    def _tell_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """An object was a whole call."""
        self._begin(self._new_id(name), name)
        self._write(in_json(arguments))
        self._end()
        self._state = self._behind_object

    def _new_id(self, name: str) -> str:
        """An id for a call of this tool that the model gave none."""
        return self._make_id()

    def _behind_object(self) -> bool:
        """The state behind an object that was a whole call."""
        raise NotImplementedError

    def _fence_end(self) -> bool:
        """Take the fence's end, if there is one, and white space and brackets too many around it; whether that is
        decided."""
        self._skip_strays()
        if self._fenced:
            if self._rest.startswith(_FENCE_END):
                self._take(len(_FENCE_END))
                self._fenced = False
                self._skip_strays()
            elif _FENCE_END.startswith(self._rest):
                return False
        return True

    def _skip_strays(self) -> None:
        strays = " \t\n\r\f\v}]" if self._bracketed else " \t\n\r\f\v}"
        if count := len(self._rest) - len(self._rest.lstrip().lstrip(strays).lstrip()):
            self._take(count)
