"""What a format of tool calls allows, as structural tags (https://xgrammar.mlc.ai says what these are): the grammar
beside each parser. Whatever it allows, the parser reads as calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deploy.parsing.parser import is_name

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
    """Of its arguments, which are valid for it; None: they are any JSON object."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise CannotBind(f"the name {self.name[:64]!r} could not be told from what stands around it in a call")


def text(value: str) -> Tag:
    """Exactly this."""
    return {"type": "const_string", "value": value}


def sequence(*parts: Tag) -> Tag:
    """One after the other."""
    return {"type": "sequence", "elements": list(parts)}


def either(options: Sequence[Tag]) -> Tag:
    """One of these."""
    return options[0] if len(options) == 1 else {"type": "or", "elements": list(options)}


def optional(part: Tag) -> Tag:
    """This or nothing."""
    return {"type": "optional", "content": part}


def several(part: Tag, separator: str) -> Tag:
    """This, once or more often."""
    again = sequence(text(separator), part) if separator else part
    return sequence(part, {"type": "star", "content": again})


def free_until(end: str) -> Tag:
    """Any text up to `end`, which comes with it."""
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
    """The arguments of a tool as one JSON object."""
    return json_of({"type": "object", "additionalProperties": True} if tool.schema is None else tool.schema)


def within_text(calls: Mapping[str, Tag], never: Sequence[str] = ()) -> Tag:
    """Free text in which each key of `calls` begins a call, whose rest its value is. `never`: not in the free text."""
    return {"type": "dispatch", "rules": [[*rule] for rule in calls.items()], "loop": True, "excludes": list(never)}
