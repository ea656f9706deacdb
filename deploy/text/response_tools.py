"""Tools of the Responses API as the functions that a model is told of. Routers and replicas share this: equal tools
must give equal prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

INPUT: Final = "input"
"""Argument of the function that a custom tool becomes; it has no other."""
ADDING: Final = ("additional_tools", "tool_search_output")
"""Types of items that bring tools along."""
_UNSAFE: Final = re.compile(r"[^\w.\-]", re.ASCII)


@dataclass(frozen=True)
class Origin:
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Calls have a text as their input, and no arguments."""


@dataclass(frozen=True)
class AskedTools:
    """Tools of a request, taken apart."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Functions in the form that chats have."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Origins of those functions that stand for another tool, by name of the function."""
    grammars: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The syntax and the definition of the grammar that a custom tool has as its format, by the function's name."""
    left_out: list[str] = field(default_factory=list)
    """Requirements that the model is not told of or not held to: types of tools, and `NAME.format` of custom tools
    whose grammar is only described to it."""


def named(kind: str) -> str:
    """A type of tools, or a name, in characters that a header can hold."""
    return _UNSAFE.sub("_", kind[:64])


def format_of(name: str) -> str:
    """The grammar of the custom tool `name`, as the header has it."""
    return f"{named(name)}.format"


def qualified(name: str, namespace: Any) -> str:
    """The name of a tool within a namespace, in characters that every format of calls can write."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def read_tools(tools: Sequence[Any]) -> AskedTools:
    """The field `tools`. ValueError for what is no tool, and for a name that does not say which tool is meant."""
    asked = AskedTools()
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError("a tool should be an object with a type")
        if kind in ("function", "custom"):
            _add(asked, tool, None)
        elif kind == "namespace":
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
                raise ValueError("a namespace should have a name and a list of tools")
            for inner in tool["tools"]:
                of = inner.get("type") if isinstance(inner, Mapping) else None
                if not isinstance(of, str):
                    raise ValueError("a namespace should hold tools, each an object with a type")
                if of in ("function", "custom"):
                    _add(asked, inner, tool)
                else:
                    asked.left_out.append(named(f"{tool['name']}.{of}"))
        else:
            asked.left_out.append(named(kind))
    named_so = (tool["function"].get("name") for tool in asked.functions)
    names = Counter(name for name in named_so if isinstance(name, str))
    if twice := next((name for name in asked.origins if names[name] > 1), None):
        raise ValueError(f"two tools have the name {twice[:64]!r}")
    return asked


def with_added(tools: Sequence[Any], items: Sequence[Any]) -> list[Any]:
    """The field `tools`, and the tools that items of the input add to it. A later one replaces those of its name."""
    added = [
        tool
        for item in items
        if isinstance(item, Mapping) and item.get("type") in ADDING and isinstance(item.get("tools"), list)
        for tool in item["tools"]
        if item["type"] == ADDING[0] or _is_known(tool)
    ]
    return _merged([*tools, *added]) if added else [*tools]


def _is_known(tool: Any) -> bool:
    """Whether this is a tool of a kind that the model can be told of: what was found once may be anything."""
    try:
        return bool(read_tools([tool]).functions)
    except ValueError:
        return False


def _merged(tools: Sequence[Any]) -> list[Any]:
    """Tools of different names; a namespace has those of all of its name. Functions and custom tools share their names,
    as both are functions for the model."""
    merged: dict[Any, Any] = {}
    inner: dict[Any, list[list[Any]]] = {}
    """The lists of tools within namespaces, by what they have in `merged`."""
    for place, tool in enumerate(tools):
        name = tool.get("name") if isinstance(tool, Mapping) else None
        key: Any = place
        if isinstance(name, str):
            kind = str(tool.get("type"))
            key = ("function" if kind == "custom" else kind, name)
            if kind == "namespace" and isinstance(tool.get("tools"), list):
                inner.setdefault(key, []).append(tool["tools"])
        merged[key] = tool
    for key, lists in inner.items():
        if len(lists) > 1:
            merged[key] = {**merged[key], "tools": _merged([tool for tools in lists for tool in tools])}
    return [*merged.values()]


def _add(asked: AskedTools, tool: Mapping[str, Any], namespace: Mapping[str, Any] | None) -> None:
    custom = tool["type"] == "custom"
    name, within = tool.get("name"), None if namespace is None else namespace["name"]
    if not isinstance(name, str):
        raise ValueError(f"a {tool['type']} tool should have a name, which is a string")
    function = _of_custom(tool) if custom else {key: tool[key] for key in tool if key != "type"}
    if custom or within is not None:
        function["name"] = qualified(name, within)
        asked.origins[function["name"]] = Origin(name, within, custom)
        if custom and (grammar := _grammar_of(tool)) is not None:
            asked.grammars[function["name"]] = grammar
    asked.functions.append({"type": "function", "function": function})


def _grammar_of(tool: Mapping[str, Any]) -> tuple[str, str] | None:
    """The syntax and the definition of the grammar that a custom tool has as its format."""
    form = tool.get("format")
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return None
    # Some clients have syntax and definition in an object of their own.
    held = form["grammar"] if isinstance(form.get("grammar"), Mapping) else form
    syntax, definition = held.get("syntax"), held.get("definition")
    if not isinstance(syntax, str) or not isinstance(definition, str):
        raise ValueError("a grammar should have a syntax and a definition")
    return syntax, definition


def _of_custom(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function whose one argument is the text that a custom tool takes."""
    described = [tool["description"]] if isinstance(tool.get("description"), str) else []
    text: dict[str, Any] = {"type": "string"}
    if (grammar := _grammar_of(tool)) is not None:
        syntax, definition = grammar
        described.append(f"The {INPUT} follows this grammar ({syntax[:64]}):\n{definition}")
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    function: dict[str, Any] = {"name": tool["name"], "parameters": parameters}
    if described:
        function["description"] = "\n\n".join(described)
    return function


_BEGUN: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WHOLE_CHARACTERS: Final = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"
)
_LONGEST_CHARACTER: Final = len(r"\ud83d\ude80")


class InputStream:
    """The text that a custom tool is called with, piece by piece, while the arguments of its function come. Where their
    first field is not that text nothing comes, and behind half a surrogate pair nothing more."""

    def __init__(self) -> None:
        self._head = ""
        """JSON before the text."""
        self._rest: str | None = None
        """Part of the text that makes no whole character yet; None before the text begins."""

    def push(self, arguments: str) -> str:
        """Take more of the arguments; returns what more of the text is certain."""
        if self._rest is None:
            self._head += arguments
            if (begun := _BEGUN.match(self._head)) is None:
                return ""
            arguments, self._rest = self._head[begun.end() :], ""
        if self._rest[:1] == '"' or len(self._rest) >= _LONGEST_CHARACTER:
            return ""  # the end of the text, or something that is none
        text = self._rest + arguments
        found = _WHOLE_CHARACTERS.match(text)
        assert found is not None, "it matches nothing at least"
        self._rest = text[found.end() :]
        given: str = json.loads(f'"{found.group()}"', strict=False)
        return given


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with, of the arguments of its function; the arguments themselves where the
    model wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = value.get(INPUT) if isinstance(value, dict) else value
    return given if isinstance(given, str) else arguments
