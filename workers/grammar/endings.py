"""References within a JSON schema of which no value ever ends: those that lead to nothing but each other, and those to
objects and lists in which another of the same must stand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["endless"]


def endless(root: Any, most_nested: int) -> frozenset[str]:
    """The references by themselves. What leads nowhere is none of them, nor is what is nested deeper than
    `most_nested`."""
    targets: dict[str, Any] = {}
    left = [root]
    while left:
        schema = left.pop()
        for name, value in schema.items() if isinstance(schema, dict) else ():
            if name == "$ref" and isinstance(value, str) and value not in targets:
                targets[value] = _target(root, value)
        left += schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    users: defaultdict[str, set[str]] = defaultdict(set)
    for reference, target in targets.items():
        for other in _mentioned(target, most_nested):
            users[other].add(reference)
    known: set[str] = set()
    waiting = [*targets]
    while waiting:
        reference = waiting.pop()
        if reference not in known and _ends(targets[reference], known, most_nested):
            known.add(reference)
            waiting += users[reference]
    at_once = {name: [*_at_once(target, most_nested)] for name, target in targets.items()}
    return frozenset(targets.keys() - known) | _on_circles(at_once)


def _at_once(schema: Any, depth: int) -> Iterator[str]:
    """The references that a value of a schema is held to as it is, rather than something within it."""
    if not isinstance(schema, Mapping) or depth < 0:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference
    for name in ("allOf", "anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            for option in options:
                yield from _at_once(option, depth - 1)


def _on_circles(after: Mapping[str, list[str]]) -> set[str]:
    """Return the names that lead back to themselves, or lie between two that do."""
    before: defaultdict[str, list[str]] = defaultdict(list)
    for name, others in after.items():
        for other in others:
            before[other].append(name)
    left = {*after}
    for ahead, behind in ((after, before), (before, after)):
        open_ends = {name: sum(other in left for other in ahead[name]) for name in left}
        ends = [name for name, count in open_ends.items() if not count]
        while ends:
            end = ends.pop()
            left.discard(end)
            for name in behind[end]:
                if name in left:
                    open_ends[name] -= 1
                    if not open_ends[name]:
                        ends.append(name)
    return left


def _target(root: Any, reference: str) -> Any:
    found = root
    for name in reference.split("/")[1:]:
        if not isinstance(found, Mapping) or name not in found:
            return True
        found = found[name]
    return found


def _mentioned(schema: Any, depth: int) -> Iterator[str]:
    """The references in what a value of a schema may have to hold."""
    if not isinstance(schema, Mapping) or depth < 0:
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield reference
    for part in _must_hold(schema):
        yield from _mentioned(part, depth - 1)
    for options in _choices(schema):
        for option in options:
            yield from _mentioned(option, depth - 1)


def _ends(schema: Any, known: set[str], depth: int) -> bool:
    """Whether there is a value of a schema that ends, if there is one of each of these references."""
    if not isinstance(schema, Mapping) or depth < 0:
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in known:
        return False
    return all(_ends(part, known, depth - 1) for part in _must_hold(schema)) and all(
        any(_ends(option, known, depth - 1) for option in options) for options in _choices(schema)
    )


def _choices(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            yield options


def _must_hold(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Schemas of which each has a value in every value of this one."""
    if isinstance(all_of := schema.get("allOf"), list):
        yield from all_of
    named = schema.get("type")
    properties, required = schema.get("properties"), schema.get("required")
    if named == "object" and isinstance(properties, Mapping) and isinstance(required, list):
        yield from (properties[name] for name in required if isinstance(name, str) and name in properties)
    least = schema.get("minItems")
    if named == "array" and isinstance(least, int) and least > 0:
        first = schema.get("prefixItems")
        given = first if isinstance(first, list) else []
        yield from given[:least]
        if least > len(given):
            yield schema.get("items", True)
