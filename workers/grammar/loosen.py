"""A schema without what is not enforced of it: whatever is valid for the schema, and was not ruled out by a narrower
reading, stays valid, and what is left out is named.

For calls of tools that are not strict: a model follows most of what a schema says by itself, and a client that does not
ask for more than that is not refused for a keyword that few grammars could keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from workers.grammar.schema import ANNOTATIONS, SchemaError, check_schema, type_of, work_of_form

__all__ = ["loosened", "total_work"]

MOST_LEFT_OUT: Final = 128
"""Keywords of one schema: each takes another look at all of it. A schema with more is left to the model as a whole."""
_BY_NAME: Final = ("properties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties")
_OF_OBJECTS: Final = frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties"))
_OF_ARRAYS: Final = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_WHOLE: Final = frozenset(("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "not", "if"))


def loosened(
    schema: Any,
    most_nested: int,
    *,
    within_text: bool = False,
    arguments: bool = False,
    most_work: int | None = None,
) -> tuple[Any, list[tuple[str, str]]]:
    """The part of a schema that `check_schema` passes, and what is not in it: paths, such as `filters.items`, and
    keywords. Annotations are left out silently. `arguments`: of a function, which are an object, and true stands for
    any; other schemas may become true, which any value is valid for. `most_work`: `form_work` of one string, of which a
    form that takes more is left out."""
    reader = _Reader(most_nested)
    found = reader.schema(schema, (), 0)
    if arguments and isinstance(found, dict):
        reader.make_object(found)
    for _ in range(MOST_LEFT_OUT):
        try:
            check_schema(found, most_nested, within_text=within_text)
        except SchemaError as error:
            if error.within is None:
                break
            reader.mend(error)
        else:
            if most_work is not None:
                reader.cut_work(most_work)
            return found, reader.left_out
    return True, [("", "schema")]


def total_work(schema: Any) -> int:
    """`form_work` of all strings of a schema that was loosened."""
    if isinstance(schema, list):
        return sum(map(total_work, schema))
    if not isinstance(schema, dict):
        return 0
    return form_work(schema) + sum(total_work(value) for name, value in schema.items() if name not in ("enum", "const"))


def form_work(schema: Mapping[str, Any]) -> int:
    """Return the cost of compiling the pattern or the lengths of a string; a character that is counted costs at least
    4."""
    named = schema.get("type")
    if named != "string" and not (isinstance(named, list) and "string" in named):
        return 0
    return work_of_form(schema)


class _Reader:
    def __init__(self, most_nested: int) -> None:
        self._most_nested = most_nested
        self._places: dict[int, tuple[str, ...]] = {}
        """Place of every schema that was made, by its `id`."""
        self._made: list[dict[str, Any]] = []
        self.left_out: list[tuple[str, str]] = []

    def schema(self, schema: Any, place: tuple[str, ...], depth: int) -> Any:
        """A copy that is well-formed as far as schemas within schemas go."""
        if schema is True:
            return True
        if not isinstance(schema, Mapping) or depth > self._most_nested:
            self._note(place, "depth" if isinstance(schema, Mapping) else f"{str(schema)[:8]}")
            return True
        made: dict[str, Any] = {}
        self._places[id(made)] = place
        self._made.append(made)
        for name, value in schema.items():
            if name in ANNOTATIONS or name == "$id" or name.startswith("x-"):
                continue
            if name in _BY_NAME:
                if isinstance(value, Mapping):
                    inside = place if name == "properties" else (*place, name)
                    made[name] = {key: self.schema(item, (*inside, key), depth + 1) for key, item in value.items()}
                else:
                    self._note(place, name)
            elif name in _LISTS and isinstance(value, list):
                made[name] = [self.schema(item, (*place, name, str(n)), depth + 1) for n, item in enumerate(value)]
            elif name in _SINGLE and not isinstance(value, bool):
                made[name] = self.schema(value, (*place, name), depth + 1)
            else:
                made[name] = value
        self._name_type(made)
        return made

    @staticmethod
    def _name_type(schema: dict[str, Any]) -> None:
        """Most schemas with properties mean objects, whether they say so or not."""
        if "type" in schema or not _WHOLE.isdisjoint(schema):
            return
        for kind, keywords in (("object", _OF_OBJECTS), ("array", _OF_ARRAYS)):
            if not keywords.isdisjoint(schema):
                schema["type"] = kind
                return

    def make_object(self, schema: dict[str, Any]) -> None:
        """Arguments are an object, whether the schema says so or not."""
        named = schema.get("type")
        if ("type" not in schema and _WHOLE.isdisjoint(schema)) or (isinstance(named, list) and "object" in named):
            schema["type"] = "object"

    def cut_work(self, most: int) -> None:
        """Leave out forms of strings that take more than that."""
        for schema in self._made:
            if form_work(schema) > most:
                for name in ("pattern", "minLength", "maxLength"):
                    if name in schema:
                        self._drop(schema, name)

    def mend(self, error: SchemaError) -> None:
        """Take out what an error names, or write it as what is enforced where that allows no more."""
        schema, name = error.within, error.keyword
        assert isinstance(schema, dict)
        value = schema.get(name)
        if name == "type" and isinstance(value, list) and {"integer", "number"} <= {*map(str, value)}:
            schema["type"] = [kind for kind in value if kind != "integer"]
        elif name == "additionalProperties":  # beside names that JSON writes with escapes
            schema[name] = False
        elif name == "required" and isinstance(value, list):
            known = schema.get("properties", {})
            schema[name] = [one for one in value if isinstance(one, str) and one in known]
            self._note(self._places[id(schema)], name)
        elif name == "enum" and isinstance(value, list) and (kept := _of_type(value, schema.get("type"))):
            schema[name] = kept
        elif name == "oneOf" and isinstance(value, list) and value and "anyOf" not in schema:
            schema["anyOf"] = schema.pop(name)
            self._note(self._places[id(schema)], name)
        else:
            self._drop(schema, name)

    def _drop(self, schema: dict[str, Any], name: str) -> None:
        schema.pop(name, None)
        self._note(self._places[id(schema)], name)

    def _note(self, place: tuple[str, ...], keyword: str) -> None:
        self.left_out.append((".".join(place), keyword))


def _of_type(values: list[Any], named: Any) -> list[Any]:
    """Return the values that have a type which a schema names; none if that would be all of them, or none."""
    types = {named} if isinstance(named, str) else set(map(str, named)) if isinstance(named, list) else set[str]()
    kept = [value for value in values if type_of(value) in types or (type_of(value) == "integer" and "number" in types)]
    return kept if len(kept) < len(values) else []
