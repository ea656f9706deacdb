"""Tools as declarations in TypeScript, as Kimi K2.5 and later models were trained to read them.

The form is that of the file `tool_declaration_ts.py` which Moonshot publishes with these models: a namespace with a
type for each function, whose argument is the JSON schema of its parameters as a type. Required fields stand before
optional ones, and each kind by name; descriptions, bounds and defaults are comments above what they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_INDENT: Final = "  "
_BOUNDS: Final[dict[str, tuple[str, ...]]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
"""Keywords of a type that are told besides its description, in this order."""
_IN_UNIONS: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_OF_ENUMS: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}
_ROOT: Final = "parameters"
"""Name of a schema that refers to itself."""


def declarations(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The text that declares `tools`, each as OpenAI has it. None where a schema has no such form: these models' chat
    templates then write the tools as JSON."""
    try:
        functions = [_function(tool["function"]) for tool in tools]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(functions) + "\n}\n"


@dataclass(frozen=True)
class _Type:
    """TypeScript type, to be written at any depth."""

    write: Callable[[str], str]
    """Writes its text behind an indentation."""
    told: tuple[str, ...] = ()
    """Comment lines about the type; empty lines of a description have no comment mark."""

    def comment(self, indent: str) -> str:
        """Return the comment's lines."""
        return _comment(self.told, indent)


@dataclass
class _Names:
    """Names that the schema of one function may refer to."""

    defined: dict[str, Any] = field(default_factory=dict)
    itself: bool = False
    """Whether it refers to itself."""


def _comment(lines: Sequence[str], indent: str) -> str:
    return "".join((f"{indent}// {line}" if line else "") + "\n" for line in lines)


def _lines(schema: Mapping[str, Any]) -> tuple[str, ...]:
    description: str = schema.get("description") or ""
    return tuple(description.split("\n")) if description else ()


def _function(function: Mapping[str, Any]) -> str:
    names = _Names()
    fields, whole = _object(function.get("parameters") or {}, names)
    named = names.itself
    blocks = []
    if named:
        inside = ",\n".join(one.write(_INDENT) for one in fields)
        blocks.append(f"interface {_ROOT} " + (f"{{\n{inside}\n}}" if inside else "{}") + "\n")
    for name, schema in dict(names.defined).items():
        written = _type(schema, names).write("")
        blocks.append(f"{_comment(_lines(schema), '')}interface {name} {written}\n")
    argument = _ROOT if named else whole.write("")
    return "".join(blocks) + _comment(_lines(function), "") + f"type {function['name']} = (_: {argument}) => any;"


def _type(schema: Any, names: _Names) -> _Type:
    """ValueError and the like for what has no form."""
    if isinstance(schema, bool):
        return _plain("any" if schema else "null")
    if "$ref" in schema:
        return _reference(schema, names)
    if "anyOf" in schema:
        return _alternatives([_type(option, names) for option in schema["anyOf"]], schema)
    if "enum" in schema:
        return _enumeration(schema)
    if "type" not in schema:
        if schema == {}:
            return _plain("any")
        raise ValueError("a schema without a type")
    kind = schema["type"]
    if isinstance(kind, list):
        return _plain(" | ".join(_IN_UNIONS[one] for one in kind), _lines(schema))
    if kind == "object":
        return _object(schema, names)[1]
    if kind == "array":
        return _array(schema, names)
    if not isinstance(kind, str):
        raise TypeError("a type that is no name")
    return _plain("number" if kind == "integer" else kind, _told(schema, kind))


def _plain(text: str, told: tuple[str, ...] = ()) -> _Type:
    return _Type(lambda indent: text, told)


def _told(schema: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    bounds = ", ".join(f"{name}: {schema[name]}" for name in _BOUNDS.get(kind, ()) if name in schema)
    return (*_lines(schema), *((bounds,) if bounds else ()))


def _reference(schema: Mapping[str, Any], names: _Names) -> _Type:
    name = schema["$ref"]
    if name == "#":
        names.itself = True
        return _plain(_ROOT, _lines(schema))
    last = name.split("/")[-1]
    if not name.startswith("#/$defs/") or not isinstance(names.defined.get(last), Mapping):
        raise ValueError(f"a reference to {name}")
    return _plain(last, _lines(schema))


def _alternatives(options: Sequence[_Type], schema: Mapping[str, Any]) -> _Type:
    return _Type(lambda indent: " | ".join(option.write(indent) for option in options), _lines(schema))


def _enumeration(schema: Mapping[str, Any]) -> _Type:
    values = schema["enum"]
    kind = schema.get("type")
    if isinstance(kind, list):
        rest = [one for one in kind if one != "null"] or kind
        if len(kind) > 2 or len(rest) != 1:
            raise ValueError("an enumeration of several types")
        [kind] = rest
    wanted = _OF_ENUMS.get(kind) if isinstance(kind, str) else None
    if wanted is not None and not all(value is None or isinstance(value, wanted) for value in values):
        raise ValueError("an enumeration with a value of another type")
    # Other values are spelled as Python spells them, True and None: the published code is in Python.
    return _plain(
        " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values), _lines(schema)
    )


def _array(schema: Mapping[str, Any], names: _Names) -> _Type:
    item = _type(schema["items"], names) if schema.get("items") else _plain("any")

    def write(indent: str) -> str:
        inner = indent + _INDENT
        if comment := item.comment(inner):
            return f"Array<\n{comment}{inner}{item.write(inner)}\n{indent}>"
        return f"Array<{item.write(indent)}>"

    return _Type(write, _told(schema, "array"))


def _object(schema: Mapping[str, Any], names: _Names) -> tuple[list[_Type], _Type]:
    """Return its fields as the schema has them, and the type."""
    names.defined |= schema.get("$defs") or {}
    others = schema.get("additionalProperties")
    if isinstance(others, bool):
        others = _plain("any" if others else "never")
    elif others is not None:
        others = _type(others, names)
    required = schema.get("required", []) if "properties" in schema else []
    fields = {name: _field(name, one, name in required, names) for name, one in schema.get("properties", {}).items()}

    def write(indent: str) -> str:
        inner = indent + _INDENT
        written = [fields[name].write(inner) for name in sorted(fields, key=lambda name: (name not in required, name))]
        if others is not None:
            written.append(f"{inner}[k: string]: {others.write(inner)}")
        return "{\n" + ",\n".join(written) + f"\n{indent}}}" if written else "{}"

    return [*fields.values()], _Type(write, _lines(schema))


def _field(name: str, schema: Any, required: bool, names: _Names) -> _Type:
    """A field with its comments, as it stands in an object."""
    kind = _type(schema, names)
    default = None if isinstance(schema, bool) else schema.get("default")
    if default is not None:
        is_number = isinstance(default, int | float)
        default = repr(default) if is_number else json.dumps(default, ensure_ascii=False)

    def write(indent: str) -> str:
        comment = kind.comment(indent) + ("" if default is None else f"{indent}// Default: {default}\n")
        return f"{comment}{indent}{name}{'' if required else '?'}: {kind.write(indent)}"

    return _Type(write)
