"""Types that a schema allows for a value that a model wrote without saying whether it is a string."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any, Final

from deploy.text.mending import whole_json

_TYPES: Final = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
_ALL: Final = frozenset((*_TYPES.values(), "null"))
_INTEGER: Final = frozenset(("integer",))
_STRING: Final = frozenset(("string",))
_NULL: Final = frozenset(("null",))
_MOST_DEPTH: Final = 16
_MOST_PARTS: Final = 1000
"""Parts of a schema that are looked at: references may lead anywhere, and back."""
_MOST_PYTHON: Final = 10_000
"""Characters of a value that is read as Python writes it."""
_PARTS: Final = frozenset(("anyOf", "oneOf", "allOf", "$ref"))
"""Keywords whose schemas hold besides."""
_SAYS_MORE: Final = _PARTS | {"enum", "const", "nullable"}
"""Keywords that say something of a value's types besides `type`."""
_BY_TYPE: Final = {name: frozenset((name, "integer") if name == "number" else (name,)) for name in _ALL}
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}

Types = frozenset[str]


def types_of(schema: Any) -> Types:
    """The JSON types that `schema` allows, all of them where it does not say."""
    return _Reader(schema).types(schema)


def types_of_argument(schema: Mapping[str, Any] | None, name: str) -> Types:
    """The JSON types of a tool's argument by the schema of all its arguments."""
    if schema is not None and _PARTS.isdisjoint(schema):  # the common case, made short
        properties = schema.get("properties")
        one = properties.get(name) if type(properties) is dict else None
        if type(one) is dict and _SAYS_MORE.isdisjoint(one) and type(kind := one.get("type")) is str and kind in _ALL:
            return _BY_TYPE[kind]
    said = _Reader(schema).argument(schema, name)
    return _ALL if said is None else said


def properties_of(schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schemas of a tool's arguments by name; None if the tool's schema gives none."""
    properties = (schema or {}).get("properties")
    return properties if isinstance(properties, Mapping) else None


class _Reader:
    """Reads the parts of one schema, in which their references are looked up."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_PARTS

    def types(self, schema: Any, depth: int = 0) -> Types:
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or self._left < 0:
            return _ALL
        types = _ALL
        if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            types &= frozenset(_type(value) for value in values)
        kind = schema.get("type")
        if isinstance(kind, str | list):
            named = frozenset((kind,) if isinstance(kind, str) else (name for name in kind if isinstance(name, str)))
            types &= (named & _ALL or _ALL) | (_INTEGER if "number" in named else frozenset())
            types |= _NULL if schema.get("nullable") is True else frozenset()
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                types &= frozenset[str]().union(*(self.types(option, depth + 1) for option in options))
        for part in self._also(schema):
            types &= self.types(part, depth + 1)
        return types or _ALL

    def argument(self, schema: Any, name: str, depth: int = 0) -> Types | None:
        """Return the types that a schema of all arguments allows for one of them; None if it does not restrict it."""
        self._left -= 1
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or self._left < 0:
            return None
        properties, beyond = schema.get("properties"), schema.get("additionalProperties")
        said: list[Types] = []
        if isinstance(properties, Mapping) and name in properties:
            said.append(self.types(properties[name]))
        for kind in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(kind), list):
                some = [types for option in options if (types := self.argument(option, name, depth + 1)) is not None]
                said += [frozenset[str]().union(*some)] if some else []
        for part in self._also(schema):
            if (types := self.argument(part, name, depth + 1)) is not None:
                said.append(types)
        if not said and isinstance(beyond, Mapping):
            said.append(self.types(beyond))
        return (_ALL.intersection(*said) or _ALL) if said else None

    def _also(self, schema: Mapping[str, Any]) -> list[Any]:
        """Schemas that hold besides."""
        parts = schema.get("allOf")
        target = target_of(schema, self._root)
        return [*(parts if isinstance(parts, list) else ()), *(() if target is None else (target,))]


def target_of(schema: Mapping[str, Any], root: Any) -> Any:
    """Follow the reference in `schema`, a part of `root`. None if it has none, or one that leads nowhere."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    target = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            return None
        target = target[key]
    return target


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


_decoded: Final = json.JSONDecoder(parse_constant=_refuse).decode
"""The value of a JSON text; ValueError for what JSON does not have."""


def as_json(text: str, types: Types, is_json: bool = False) -> str:
    """The JSON of a value: `text` itself where it is JSON of one of `types`, else what it is as Python writes such a
    value, else `text` as a string. `is_json`: JSON of other types is kept, too."""
    return whole_json(_as_json(text, types, is_json))


def _as_json(text: str, types: Types, is_json: bool) -> str:
    try:
        value = _decoded(text)
    except (ValueError, RecursionError):
        value = _python(text, types - _STRING if is_json or (types == _ALL and text.lstrip()[:1] in "[{") else types)
        return json.dumps(text, ensure_ascii=False) if value is None else value
    if _type(value) in types or (type(value) is int and "number" in types):
        return text.strip()
    if type(value) is float and "integer" in types and value.is_integer():
        return str(int(value))
    if type(value) is str and "string" not in types and (inner := _of_types(value, types)) is not None:
        return inner
    return text.strip() if is_json else json.dumps(text, ensure_ascii=False)


def _of_types(text: str, types: Types) -> str | None:
    """The JSON of a value of one of `types` that was written as a string within a string."""
    try:
        value = _decoded(text)
    except (ValueError, RecursionError):
        return _python(text, types)
    return text.strip() if _type(value) in types else None


def _python(text: str, types: Types) -> str | None:
    """The JSON of a value of one of `types` as Python writes it."""
    text = text.strip()
    if (word := _PYTHON_WORDS.get(text)) is not None:
        return word if _type(json.loads(word)) in types else None
    if "string" in types or len(text) > _MOST_PYTHON:
        return None
    try:
        value = ast.literal_eval(expression_of(text))
        known = type(value) in _TYPES and _type(value) in types
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if known else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def expression_of(text: str) -> ast.expr:
    """The expression that `text` is in Python. SyntaxError and others for what is none. Python's own warnings about it
    are for whoever wrote it, which nobody did here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")
