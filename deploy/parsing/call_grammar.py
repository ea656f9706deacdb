"""The grammar beside each parser: everything that a format of tool calls allows, as structural tags (explained at
https://xgrammar.mlc.ai). Whatever it allows, the parser reads as calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.parsing.parser import is_name
from workers.grammar.text_grammar import TextGrammar, TextGrammarError

Tag = dict[str, Any]
"""A format of a structural tag."""
MOST_SPACE: Final = 16
"""Characters of white space in a row in JSON. Without a limit a model may write nothing else."""


class CannotBind(ValueError):
    """Calls of a tool cannot be bound in this format; the message says why."""


@dataclass(frozen=True)
class AllowedTool:
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any] | None
    """JSON Schema of the arguments, valid for them; None: they are any JSON object."""
    others: tuple[str, ...] = ()
    """Names of tools with the same arguments."""
    held_to: TextGrammar | None = None
    """Grammar of the text of its one argument, which `schema` says is a string."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise CannotBind(f"the name {self.name[:64]!r} could not be told from what stands around it in a call")


def together(tools: Sequence[AllowedTool]) -> list[AllowedTool]:
    """Tools with those of any arguments as one: what these are takes long to compile."""
    bound = [tool for tool in tools if tool.schema is not None]
    first, *others = [tool.name for tool in tools if tool.schema is None] or [""]
    return [*bound, AllowedTool(first, None, tuple(others))] if first else bound


def name_of(tool: AllowedTool) -> Tag:
    """The name, or one of the names, of a tool."""
    return either([text(name) for name in (tool.name, *tool.others)])


def text(value: str) -> Tag:
    """Exactly this."""
    return {"type": "const_string", "value": value}


def sequence(*parts: Tag) -> Tag:
    """One after the other; texts side by side become one, as there are many in the grammar of many tools."""
    flat: list[Tag] = []
    for part in parts:
        for one in part["elements"] if part["type"] == "sequence" else (part,):
            if flat and flat[-1]["type"] == one["type"] == "const_string":
                flat[-1] = text(flat[-1]["value"] + one["value"])
            else:
                flat.append(one)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def either(options: Sequence[Tag]) -> Tag:
    """Allow one of these options."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Tag) -> Tag:
    """Allow the part or nothing."""
    return {"type": "optional", "content": part}


def several(part: Tag, separator: str) -> Tag:
    """Allow the part once or more often. Behind the last one the separator may come, too: to write `part` twice would
    double the grammar of many tools."""
    return {"type": "plus", "content": sequence(part, optional(text(separator))) if separator else part}


def free_until(end: str) -> Tag:
    """Allow any text up to `end`, which comes with it."""
    return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}


def json_of(schema: Mapping[str, Any], without: Sequence[str] = ()) -> Tag:
    """JSON that is valid for a schema. `without`: what its strings do not hold."""
    return {
        "type": "json_schema",
        "json_schema": dict(schema),
        "max_whitespace_cnt": MOST_SPACE,
        "excludes": list(without),
    }


def json_object(tool: AllowedTool) -> Tag:
    """The arguments of a tool as one JSON object. CannotBind."""
    if tool.held_to is not None and tool.schema is not None:
        [name] = tool.schema["properties"]
        head, tail = rf'\{{ ?"{name}" ?: ?"', r'" ?\}'
        return sequence({"type": "regex", "pattern": head}, text_of(tool.held_to), {"type": "regex", "pattern": tail})
    return json_of({"type": "object", "additionalProperties": True} if tool.schema is None else tool.schema)


def text_of(held_to: TextGrammar, end: str | None = None) -> Tag:
    """A text of a grammar: within a string in JSON, or as it is with `end` behind it. CannotBind."""
    try:
        ebnf = held_to.ebnf(in_json=end is None, never=(end or "")[:1])
    except TextGrammarError as error:
        raise CannotBind(f"the grammar of a text cannot be kept in the calls of this model: {error}") from None
    return {"type": "grammar", "grammar": ebnf}


def within_text(calls: Mapping[str, Tag], never: Sequence[str] = ()) -> Tag:
    """Free text in which each key of `calls` begins a call, whose rest its value is. `never`: not in the free text."""
    return {"type": "dispatch", "rules": [[*rule] for rule in calls.items()], "loop": True, "excludes": list(never)}
