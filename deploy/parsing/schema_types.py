"""What a schema says of a value that a model wrote without saying whether it is a string."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_TYPES: Final = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array", dict: "object"}
_ALL: Final = frozenset((*_TYPES.values(), "null"))
_MOST_DEPTH: Final = 16


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that `schema` allows, all of them where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return _ALL
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_TYPES.get(type(value), "null") for value in values)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,)) & _ALL or _ALL
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str)) & _ALL or _ALL
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            return frozenset[str]().union(*(types_of(option, depth + 1) for option in options))
    return _ALL


def types_of_argument(schema: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """The JSON types of a tool's argument by the schema of all its arguments."""
    properties = (schema or {}).get("properties")
    return types_of(properties.get(name)) if isinstance(properties, Mapping) else _ALL


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: `text` itself where it is JSON of one of `types`, else `text` as a string."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if _type(value) in types or (type(value) is int and "number" in types):
            return text.strip()
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
