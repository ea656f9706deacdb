"""Tool calls whose arguments stand one by one between tags: GLM and DeepSeek V3.2. They become JSON on the fly."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Final

from typing_extensions import override

from deploy.parsing.events import Arguments, Event
from deploy.parsing.function_calls import FunctionCalls
from deploy.parsing.json_body import ARGUMENTS, is_wrapper
from deploy.parsing.json_object import in_json
from deploy.parsing.markers import begun_pattern, markers_of
from deploy.parsing.parser import MakeId, Schemas
from deploy.parsing.schema_types import as_json, types_of, types_of_argument

MOST_KEY: Final = 1024
"""Characters of an argument's name."""
_ALWAYS_AGAIN: Final = 1 << 16
_TIMES_AGAIN: Final = 8
"""Characters that are read again at most behind values whose end is missing: so many, and so many times as many as
these values have."""
STRING: Final = frozenset(("string",))
_AS_IT_IS: Final = re.compile(r'[^<"\\\x00-\x1f]+').fullmatch
"""Tells a part of a string that stands in JSON as it is and that begins no tag."""


class CallTail:
    """The end of a call, with a line break before it, where the end of a value may be missing."""

    def __init__(self, *ends: str) -> None:
        begun = "|".join(begun_pattern(end) for end in ends)
        self._pattern = re.compile(rf"\n?(?:(?P<whole>{'|'.join(map(re.escape, ends))})|(?:{begun})\Z)")

    def find(self, text: str) -> tuple[int, bool]:
        """Return the index at which the first one begins in `text`, and True; or where one would begin if more came,
        or the end of `text`, and False."""
        if "<" not in text:  # the common case, made short
            return len(text) - text.endswith("\n"), False
        found = self._pattern.search(text)
        return (found.start(), found["whole"] is not None) if found is not None else (len(text), False)


class TaggedCalls(FunctionCalls):
    """A subclass says what the tags are. Strings are passed on as they come, other values when they are complete.

    Models also write all arguments as one JSON object. A call whose end is missing is complete where another call
    begins and, once it has arguments, where the model ends the text. Text between its tags is content behind it.

    A value ends at its own tag, whatever stands before it: it may be about such tags. Where its tag is missing it goes
    on to the next one, with all the tags between. Two kinds of values are known to have ended before: one that no tag
    of its own follows at all ends where the call does; and one that must not be a string ends at the first tag, unless
    all of it is such a value.
    """

    value_end: str
    """Ends a value."""
    tags: ClassVar[tuple[str, ...]]
    """Markers that end text within a call."""
    call_tail: ClassVar[CallTail]
    """The end of a call."""

    _values = 0
    """Characters of the answer's values that have tags in them where none should be, each counted once."""
    _again = 0
    """Characters that were read again behind such values."""
    _if_alone: Callable[[], None] | None = None
    """Begins the argument that may hold all others, if it does not."""

    def __init__(self, schemas: Schemas, make_id: MakeId) -> None:
        super().__init__(schemas, make_id)
        self._ends_of_value = markers_of(self.value_end)
        self._tags = markers_of(*self.tags)
        self._name = ""
        self._arguments = 0
        """Arguments of the call so far; -1 where an object has held them all."""
        self._complete = False
        """Whether the call may end without saying so."""
        self._value: list[str] = []
        self._types = STRING
        self._is_json = False
        """Whether the model says that the value is no plain string."""
        self._value_tag = ""
        """Tag that the value began with; "" where the tag is missing."""
        self._later: list[str] = []
        """Text from the end of a call within a value on: a part of the value if that ends behind it."""
        self._aside: list[str] = []
        """Text within the call that belongs to no argument."""

    def _next(self) -> bool:
        """State before another argument or the call's end."""
        raise NotImplementedError

    def _begin_call(self, name: str) -> None:
        self._begin(self._make_id(), name)
        self._name, self._arguments, self._complete, self._fenced, self._aside = name, 0, False, False, []
        self._state = self._next

    def _end_call(self) -> None:
        if not self._arguments:
            self._write("{}")
        elif self._arguments > 0:
            self._write("}")
        self._end()
        self._state = self._content
        if self._aside:
            self._say(self._cleaned("".join(self._aside)))

    def _begin_aside(self) -> bool:
        """Begin text that belongs to no argument. A call that has no text of this kind is given up as one."""
        if not self._complete:
            return self._give_up()
        self._state = self._in_aside
        return True

    def _in_aside(self) -> bool:
        found = self._tags.search(self._rest)
        end = found.start() if found is not None else len(self._rest) - self._tags.held(self._rest)
        self._aside.append(self._take(end))
        if found is not None:
            self._state = self._next
        return found is not None

    @override
    def _body_ended(self) -> None:
        self._arguments, self._complete = -1, True
        self._state = self._behind_body

    def _behind_body(self) -> bool:
        if not self._fence_end() or not self._rest:
            return False
        self._state = self._next
        return True

    @override
    def _behind_object(self) -> bool:
        if not self._fence_end() or not self._rest:
            return False
        self._raw, self._state = [], self._content
        return True

    def _whole_body(self) -> bool | None:
        """Begin a body that holds all arguments, if `_rest` begins with one; None where more text will tell."""
        begun = self._body_begun()
        if begun == "yes":
            self._begin_body()
            return True
        other = self._other_begun() if begun == "no" else "no"
        if other == "yes":
            self._begin_other()
            return True
        return None if "maybe" in (begun, other) else False

    def _begin_argument(self, key: str, tag: str, types: frozenset[str] | None = None, is_json: bool = False) -> None:
        """`tag`: what the value began with. `types`: what the value may be; what the schema says if the model does
        not. `is_json`: the model says that it is JSON."""
        start = ", " if self._arguments else "{"
        self._arguments += 1
        self._types = types_of_argument(self._schemas.get(self._name), key) if types is None else types
        self._is_json = is_json
        if is_json and self._types == STRING:
            self._types = types_of(None)
        self._write(f"{start}{in_json(key)}: " + ('"' if self._types == STRING else ""))
        self._value, self._value_tag = [], tag
        self._state = self._value_begun

    def _begin_argument_or_all(
        self, key: str, tag: str, types: frozenset[str] | None = None, is_json: bool = False
    ) -> None:
        """`_begin_argument`, unless the value is an object that holds all arguments."""
        if self._arguments or key not in ARGUMENTS or not is_wrapper(key, self._schemas.get(self._name)):
            self._begin_argument(key, tag, types, is_json)
            return
        self._if_alone = partial(self._begin_argument, key, tag, types, is_json)
        self._state = self._one_or_all

    def _one_or_all(self) -> bool:
        """State before a value that may be an object with all arguments."""
        self._skip_space()
        if not self._rest:
            return False
        assert self._if_alone is not None
        if self._rest.startswith("{"):
            self._begin_body()
        else:
            self._if_alone()
        return True

    def _value_begun(self) -> bool:
        """State before a value, whose tag may have been written twice."""
        if self._value_tag and self._value_tag.startswith(self._rest) and self._rest != self._value_tag:
            return False
        if self._value_tag and self._rest.startswith(self._value_tag):
            self._take(len(self._value_tag))
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        if self._ends_of_value.begun(self._rest) and self._ends_of_value.at(self._rest) is None:
            return False
        end = self._ends_of_value.search(self._rest)
        if end is None:
            cut, ended = self.call_tail.find(self._rest)
            if ended and self._value_tag:
                self._add(self._take(cut))
                self._later, self._state = [], self._behind_end
                return True
            if ended:  # a value whose own tag is missing does not end with the call
                cut = len(self._rest)
            if not self._ends_of_value.absent(self._rest):
                cut = min(cut, len(self._rest) - self._ends_of_value.held(self._rest))
            self._add(self._take(cut))
            if self._types == STRING and not self._rest:
                self._more = self._more_of_string
            return False
        self._add(self._take(end.start()))
        self._end_value(self._take(len(end.group())))
        return True

    def _more_of_string(self, text: str) -> list[Event] | None:
        """Take text within a string that stands in JSON as it is and ends nothing."""
        if _AS_IT_IS(text) is None:
            return None
        self._raw.append(text)
        return [Arguments(self._calls, text)]

    def _behind_end(self) -> bool:
        """State behind the end of a call within a value: the end of the value is missing unless it comes yet."""
        end = self._ends_of_value.search(self._rest)
        if end is None:
            self._later.append(self._take(len(self._rest) - self._ends_of_value.held(self._rest)))
            return False
        self._later.append(self._take(end.start()))
        self._add("".join(self._later))
        self._end_value(self._take(len(end.group())))
        return True

    def _add(self, text: str) -> None:
        """Add text to the value."""
        if self._types == STRING:
            self._write(in_json(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self, end: str = "", given: bool = False) -> None:
        """End the value, whose tag is `end`. `given`: it stands within a tag, so that none of it is read again."""
        self._state, self._complete = self._next, True
        if self._types == STRING:
            self._write('"')
            return
        text = "".join(self._value)
        written = as_json(text, self._types, self._is_json)
        if written[0] == '"' and "string" not in self._types and not given:
            written = self._value_before_tag(text, end) or written
        self._write(written)

    def _value_before_tag(self, text: str, end: str) -> str | None:
        """The value that `text` is up to the first tag in it, what follows being read again; None if that is none. So
        that many such values cost no more than their text, no more than a few times as much is read again."""
        tag = self._tags.search(text)
        if tag is None:
            return None
        first = as_json(text[: tag.start()], self._types, self._is_json)
        again = text[tag.start() :] + end
        most = _ALWAYS_AGAIN + _TIMES_AGAIN * (self._values + len(text))
        if first[0] == '"' or self._again + len(again) > most:
            self._values += len(text)
            return None
        self._values += tag.start()
        self._again += len(again)
        self._put_back(again)
        return first

    @override
    def _ended(self) -> None:
        if self._cut:
            super()._ended()
            return
        if self._state == self._behind_end:
            self._put_back("".join(self._later))
            self._end_value()
            return
        if self._state == self._behind_object:
            self._rest, self._raw, self._state = "", [], self._content
            return
        if self._state in (self._next, self._in_aside, self._behind_body) and self._complete:
            rest, self._rest = self._rest, ""
            self._end_call()
            self._say(self._cleaned(rest[: len(rest) - self._tags.held(rest)]))  # without a tag that is cut
            return
        super()._ended()
