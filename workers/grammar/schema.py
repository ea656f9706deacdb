"""The JSON schemas that xgrammar enforces to the letter. Keywords that it would ignore or only approximate are refused
by name.

The rules are of xgrammar 0.2.8, and `tests/workers/grammar/test_schema.py` tries every one of them: whatever text a
schema allows here, the schema's own definition finds valid. The other way round need not hold: a model is not free to
write everything that is valid, such as keys in any order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final

from workers.grammar.automaton import work
from workers.grammar.endings import endless
from workers.grammar.regex import (
    Node,
    Ranges,
    RegexError,
    json_without,
    of_length,
    of_string,
    rules,
    text_without,
)

ANNOTATIONS: Final = frozenset(
    ("$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
"""Keywords that say nothing about what is valid."""
FORMATS: Final = frozenset(
    ("date", "time", "date-time", "duration", "email", "ipv4", "ipv6", "uri", "uri-reference", "uuid")
)
"""Values of `format` that are enforced."""
_OF_TYPE: Final = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(
        ("properties", "required", "additionalProperties", "minProperties", "maxProperties")
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}  # fmt: skip
"""Keywords that are enforced where `type` names their type."""
_OF_FORM: Final = _OF_TYPE["string"]
_LENGTHS: Final = frozenset(("minLength", "maxLength"))
_WHOLE: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that xgrammar takes for all that a schema says."""
_TYPED: Final = frozenset(("type", "properties", "items"))
"""Keywords that say more of a value than most that would have to go for them."""
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_NAMES: Final = ("properties", *_DEFINITIONS)
"""Keywords whose value is an object of schemas by name, whatever the names are."""


class SchemaError(ValueError):
    """A schema that is none, or of which something would not be enforced; the message says what, and where."""

    def __init__(self, message: str, within: Mapping[str, Any] | None = None, keyword: str = "") -> None:
        """`within`: the very object, within the schema that was checked, of which `keyword` is the culprit."""
        super().__init__(message)
        self.within, self.keyword = within, keyword


_DATE = (
    "[1-9][0-9][0-9][0-9]-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_OWN_PATTERNS: Final = {
    "date": f"^({_DATE})$",
    "date-time": f"^({_DATE}T{_TIME})$",
    "ipv4": f"^{_BYTE}([.]{_BYTE}){{3}}$",
}
"""Patterns for formats of which xgrammar's own also match what is none, such as a 31st of November. Not all that is of
the format matches, but what matches is."""


_MAKE_RULES: Final = "\u00e9{0}"
"""Suffix of a pattern. It matches nothing more, but makes xgrammar 0.2.8 take the pattern for rules, as every character
does that is not of ASCII. Its automata, which it would make otherwise, match too much."""


def check_schema(schema: Any, most_nested: int, *, within_text: bool = False) -> None:
    """SchemaError unless everything that the schema says is enforced. At most so many levels deep. `within_text`: other
    text stands around, so that its vocabulary must have control characters, too. Strings of a form that xgrammar holds
    them to could then hold some, and are refused; those with a pattern of ours (`with_own_patterns`) are not."""
    _Walk(schema, most_nested, within_text).schema(schema, "#", 0)


def with_own_patterns(
    schema: Any, *, within_text: bool = False, never: str = "", quick: Callable[[Node], str | None]
) -> Any:
    """A schema that was checked, with the patterns of its strings, and those of formats that need one, as xgrammar
    reads them. Lengths are such patterns `within_text`, and where `quick` has an automaton: counted in rules they take
    up to 0.1 s per mask, rather than 1 ms. `never`: characters that strings of a form do not hold."""
    if isinstance(schema, list):
        return [with_own_patterns(item, within_text=within_text, never=never, quick=quick) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "type" in schema and (node := _form_of(schema, json_without(never))) is not None:
        kept = {name: value for name, value in schema.items() if name not in _OF_FORM}
        if (expression := quick(node)) is not None:
            return {**kept, "pattern": expression}
        if within_text or _LENGTHS.isdisjoint(schema):
            return {**kept, "pattern": rules(node) + _MAKE_RULES}

    def within(name: str, value: Any) -> Any:
        if name in ("enum", "const", "examples", "default"):
            return value
        if name in _OF_NAMES and isinstance(value, dict):  # these names are none of keywords
            return {key: own(item) for key, item in value.items()}
        return own(value)

    own = partial(with_own_patterns, within_text=within_text, never=never, quick=quick)
    return {name: within(name, value) for name, value in schema.items()}


def form_as_text(schema: Any, never: str) -> str | None:
    """An expression for the strings that a schema allows, as they are rather than in JSON, without the characters of
    `never`; None where it asks nothing of them. SchemaError."""
    try:
        node = _form_of(schema, text_without(never))
    except RegexError as error:
        raise SchemaError(str(error)) from None
    return None if node is None else rules(node)


def work_of_form(schema: Mapping[str, Any]) -> int:
    """`work` of the pattern or the lengths of a string that was checked; 0 without."""
    if not isinstance(schema.get("pattern"), str) and _LENGTHS.isdisjoint(schema):
        return 0
    node = _form_of(schema, json_without(""))
    return 0 if node is None else work(node)


def _form_of(schema: Mapping[str, Any], chars: Ranges) -> Node | None:
    """Return the form of a string of certain characters; None if it has none, or one that only xgrammar knows.
    RegexError for patterns that are not supported."""
    if isinstance(pattern := schema.get("pattern"), str):
        return of_string(pattern, chars)
    if isinstance(name := schema.get("format"), str):
        return of_string(_OWN_PATTERNS[name], chars) if name in _OWN_PATTERNS else None
    if not _LENGTHS.isdisjoint(schema):
        return of_length(schema.get("minLength", 0), schema.get("maxLength"), chars)
    return None


class _Walk:
    def __init__(self, root: Any, most_nested: int, within_text: bool) -> None:
        self._root, self._most_nested, self._within_text = root, most_nested, within_text

    @cached_property
    def _endless(self) -> frozenset[str]:
        return endless(self._root, self._most_nested)

    def schema(self, schema: Any, place: str, depth: int) -> None:
        """Check a schema, and all schemas within it."""
        if depth > self._most_nested:
            raise SchemaError(f"{place}: schemas are nested more than {self._most_nested} levels deep")
        if schema is True:
            return
        if schema is False:
            raise SchemaError(f"{place}: false allows no value; leave the property or the items out")
        if not isinstance(schema, dict):
            raise SchemaError(f"{place}: a schema is an object or true, not {type_of(schema)}")
        said = {name for name in schema if name not in ANNOTATIONS and not name.startswith("x-")}
        if depth == 0:
            said -= {"$id"}
        for name in _DEFINITIONS:
            if name in said:
                self._each(schema[name], f"{place}/{name}", depth)
        said -= set(_DEFINITIONS)
        if whole := [name for name in _WHOLE if name in said]:
            self._whole(schema, whole[0], said, place, depth)
        else:
            self._typed(schema, said, place, depth)

    def _each(self, schemas: Any, place: str, depth: int) -> None:
        if not isinstance(schemas, dict):
            raise SchemaError(f"{place}: an object of schemas is expected, not {type_of(schemas)}")
        for name, schema in schemas.items():
            self.schema(schema, f"{place}/{name}", depth + 1)

    def _whole(self, schema: dict[str, Any], name: str, said: set[str], place: str, depth: int) -> None:
        """A schema that one keyword says all of."""
        value, beside = schema[name], said - {name}
        if name in ("enum", "const"):
            beside -= {"type"}
        if beside:
            other = sorted(beside)[0]
            raise SchemaError(
                f"{place}: {other} beside {name} would not be enforced; it is not supported",
                schema,
                name if name not in ("$ref", "enum", "const") and not beside.isdisjoint(_TYPED) else other,
            )
        if name == "$ref":
            try:
                self.target(value, place)
            except SchemaError as error:
                raise SchemaError(str(error), schema, name) from None
            if value in self._endless:
                raise SchemaError(
                    f"{place}/$ref: {value[:64]} leads back to itself without an end; have it lead back in items, or "
                    "in a property that is not required or may be null",
                    schema,
                    name,
                )
        elif name in ("enum", "const"):
            self._values(schema, value if name == "enum" else [value], f"{place}/{name}")
        else:
            if not isinstance(value, list) or not value:
                raise SchemaError(f"{place}/{name}: a list of schemas is expected", schema, name)
            for index, option in enumerate(value):
                self.schema(option, f"{place}/{name}/{index}", depth + 1)
            if name == "allOf" and len(value) > 1:
                raise SchemaError(f"{place}: allOf of more than one schema is not supported", schema, name)
            if name == "oneOf":
                try:
                    self._disjoint(value, f"{place}/{name}")
                except SchemaError as error:
                    raise SchemaError(str(error), schema, name) from None

    def target(self, reference: Any, place: str) -> Any:
        """Return the schema that a reference leads to. SchemaError if it is not supported or leads nowhere."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"{place}/$ref: only references within the schema (#/...) are supported")
        if "~" in reference or "%" in reference:
            raise SchemaError(f"{place}/$ref: escapes (~ and %) are not supported; rename what it leads to")
        found = self._root
        for name in reference.split("/")[1:]:
            if not isinstance(found, dict) or name not in found:
                raise SchemaError(f"{place}/$ref: {reference} leads nowhere")
            found = found[name]
        if reference != "#" and reference.split("/")[1] not in _DEFINITIONS:
            raise SchemaError(f"{place}/$ref: only references to $defs, definitions or # are supported")
        return found

    def _values(self, schema: dict[str, Any], values: Any, place: str) -> None:
        keyword = place.rpartition("/")[2]
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{place}: a list of values is expected, and not an empty one", schema, keyword)
        types = self.types(schema, place)
        for value in values:
            if types is not None and not any(_is(value, name) for name in types):
                raise SchemaError(f"{place}: a value is not of the type that the schema names", schema, keyword)

    def types(self, schema: dict[str, Any], place: str) -> tuple[str, ...] | None:
        """The types that a schema names; None if it names none."""
        if "type" not in schema:
            return None
        named = schema["type"]
        types = tuple(named) if isinstance(named, list) else (named,)
        for name in types:
            if not isinstance(name, str) or name not in _OF_TYPE:
                raise SchemaError(f"{place}: type {str(name)[:64]!r} is none of {', '.join(_OF_TYPE)}", schema, "type")
        if not types:
            raise SchemaError(f"{place}: an empty list of types allows no value", schema, "type")
        return types

    def _typed(self, schema: dict[str, Any], said: set[str], place: str, depth: int) -> None:
        """A schema of the values of some types."""
        types = self.types(schema, place)
        said = said - {"type"}
        enforced = frozenset().union(*(_OF_TYPE[name] for name in types or ()))
        if types is not None and "integer" in types and "number" in types:
            raise SchemaError(
                f"{place}: type integer beside number is not supported; number allows integers, too", schema, "type"
            )
        known = frozenset().union(*_OF_TYPE.values())
        for name in sorted(said):
            if name not in known:
                raise SchemaError(f"{place}: {name[:64]} is not supported: it would not be enforced", schema, name)
            if name not in enforced:
                what = "type is not named" if types is None else f"type is {' or '.join(types)}"
                raise SchemaError(
                    f"{place}: {name} is not supported where {what}: it would not be enforced", schema, name
                )
        checks: dict[str, Callable[[dict[str, Any], set[str], str, int], None]] = {
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "array": self._array,
            "object": self._object,
        }
        for name in dict.fromkeys(types or ()):
            if name in checks:
                checks[name](schema, said, place, depth)

    def _string(self, schema: dict[str, Any], said: set[str], place: str, depth: int) -> None:
        beside = said & _OF_FORM
        for whole in ("pattern", "format"):
            if whole in beside and len(beside) > 1:
                other = sorted(beside - {whole})[0]
                raise SchemaError(
                    f"{place}: {other} beside {whole} would not be enforced; it is not supported", schema, other
                )
        if "pattern" in said and not isinstance(schema["pattern"], str):
            raise SchemaError(f"{place}: pattern must be a string", schema, "pattern")
        if "format" in said and schema["format"] not in FORMATS:
            raise SchemaError(f"{place}: format {str(schema['format'])[:64]!r} is not supported", schema, "format")
        _counts(schema, "minLength", "maxLength", place)
        try:
            form = _form_of(schema, json_without(""))
        except RegexError as error:
            raise SchemaError(f"{place}/{sorted(beside)[0]}: {error}", schema, sorted(beside)[0]) from None
        if beside and form is None and self._within_text:
            name = sorted(beside)[0]
            raise SchemaError(f"{place}: {name} is not supported within a structural tag", schema, name)

    def _number(self, schema: dict[str, Any], said: set[str], place: str, depth: int) -> None:
        bounds = [name for name in _OF_TYPE["number"] if name in said]
        for name in (*bounds, *(["multipleOf"] if "multipleOf" in said else [])):
            value = schema[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise SchemaError(f"{place}: {name} must be a number", schema, name)
        for one, other in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if one in said and other in said:
                raise SchemaError(f"{place}: {one} beside {other} is not supported; give one of them", schema, other)
        least = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
        most = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
        open_ended = len({"exclusiveMinimum", "exclusiveMaximum"} & said)
        step = 1 if schema.get("type") == "integer" and least % 1 == most % 1 == 0 else 0
        if least > most or (open_ended and most - least <= (open_ended - 1) * step):
            name = next(name for name in ("minimum", "exclusiveMinimum") if name in said)
            raise SchemaError(f"{place}: {name} is too large beside what bounds it from above", schema, name)
        if "multipleOf" in said:
            if bounds:
                raise SchemaError(
                    f"{place}: {bounds[0]} beside multipleOf would not be enforced; it is not supported",
                    schema,
                    "multipleOf",
                )
            if not isinstance(schema["multipleOf"], int) or schema["multipleOf"] < 1:
                raise SchemaError(
                    f"{place}: multipleOf is supported for whole numbers above 0 alone", schema, "multipleOf"
                )

    def _array(self, schema: dict[str, Any], said: set[str], place: str, depth: int) -> None:
        _counts(schema, "minItems", "maxItems", place)
        if "prefixItems" in said:
            if not isinstance(schema["prefixItems"], list) or not schema["prefixItems"]:
                raise SchemaError(f"{place}/prefixItems: a list of schemas is expected", schema, "prefixItems")
            for index, item in enumerate(schema["prefixItems"]):
                self.schema(item, f"{place}/prefixItems/{index}", depth + 1)
        if schema.get("items") is False and schema.get("minItems", 0) > len(schema.get("prefixItems", ())):
            raise SchemaError(f"{place}: minItems is more than the items that there may be", schema, "minItems")
        if "items" in said and schema["items"] is not False:
            self.schema(schema["items"], f"{place}/items", depth + 1)

    def _object(self, schema: dict[str, Any], said: set[str], place: str, depth: int) -> None:
        _counts(schema, "minProperties", "maxProperties", place)
        properties = schema.get("properties", {})
        self._each(properties, f"{place}/properties", depth)
        if schema.get("additionalProperties", False) is False and schema.get("minProperties", 0) > len(properties):
            raise SchemaError(
                f"{place}: minProperties is more than the properties that there may be", schema, "minProperties"
            )
        required = schema.get("required", [])
        if isinstance(required, list) and schema.get("maxProperties", len(required)) < len(required):
            raise SchemaError(
                f"{place}: maxProperties is less than the properties that are required", schema, "maxProperties"
            )
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{place}/required: a list of names is expected", schema, "required")
        for name in required:
            if name not in properties:
                raise SchemaError(
                    f"{place}: required names {name[:64]!r}, which is not in properties; it would not be enforced",
                    schema,
                    "required",
                )
        if schema.get("additionalProperties", True) is not False:
            # For the names of other properties xgrammar takes these for the text that spells them in JSON.
            for name in properties:
                if json.dumps(name, ensure_ascii=False)[1:-1] != name:
                    raise SchemaError(
                        f"{place}/properties: {name[:64]!r} needs escapes in JSON, which is supported where "
                        "additionalProperties is false",
                        schema,
                        "additionalProperties",
                    )
        if not isinstance(schema.get("additionalProperties", True), bool):
            self.schema(schema["additionalProperties"], f"{place}/additionalProperties", depth + 1)

    # One of several, and no more than one

    def _disjoint(self, options: list[Any], place: str) -> None:
        """xgrammar takes oneOf for anyOf, which is the same where no value is valid for two of them."""
        for index, one in enumerate(options):
            for other in options[index + 1 :]:
                if not self._apart(one, other, place):
                    raise SchemaError(
                        f"{place}: oneOf is supported where the types of its schemas differ, or a required property "
                        "has another const in each; otherwise use anyOf"
                    )

    def _apart(self, one: Any, other: Any, place: str) -> bool:
        one, other = self._resolved(one, place), self._resolved(other, place)
        mine, others = self._values_of(one), self._values_of(other)
        if mine is not None and others is not None:
            return not any(_same(a, b) for a in mine for b in others)
        kinds, other_kinds = self._kinds(one, place), self._kinds(other, place)
        if kinds is not None and other_kinds is not None and not kinds & other_kinds:
            return True
        if kinds != frozenset(("object",)) or other_kinds != kinds:
            return False
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            a = self._values_of(self._resolved(one["properties"][name], place))
            b = self._values_of(self._resolved(other["properties"][name], place))
            if a is not None and b is not None and not any(_same(x, y) for x in a for y in b):
                return True
        return False

    def _resolved(self, schema: Any, place: str) -> Any:
        for _ in range(self._most_nested):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self.target(schema["$ref"], place)
        raise SchemaError(f"{place}: a reference leads back to itself")

    @staticmethod
    def _values_of(schema: Any) -> list[Any] | None:
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        return schema["enum"] if isinstance(schema.get("enum"), list) else None

    def _kinds(self, schema: Any, place: str) -> frozenset[str] | None:
        if not isinstance(schema, dict):
            return None
        if (values := self._values_of(schema)) is not None:
            return frozenset("number" if type_of(value) == "integer" else type_of(value) for value in values)
        types = self.types(schema, place)
        return None if types is None else frozenset("number" if name == "integer" else name for name in types)


def _counts(schema: dict[str, Any], least: str, most: str, place: str) -> None:
    for name in (least, most):
        _count(schema, name, place)
    if least in schema and most in schema and schema[least] > schema[most]:
        raise SchemaError(f"{place}: {least} is more than {most}", schema, least)


def _count(schema: dict[str, Any], name: str, place: str) -> None:
    value = schema.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaError(f"{place}: {name} must be a whole number, 0 or more", schema, name)


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "nothing that JSON has")


def _is(value: Any, name: str) -> bool:
    own = type_of(value)
    return own == name or (own == "integer" and name == "number")


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: to Python false is 0 and true is 1."""
    return bool(one == other) and (isinstance(one, bool) == isinstance(other, bool))
