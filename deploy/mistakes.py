"""Errors that end a command in one line, and mistakes in settings as people call them who write flags and YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError


class UsageMistake(Exception):
    """The command was called wrongly; the text says what to do instead. Exit code 2."""


class CommandFailure(Exception):
    """The command was right but could not be carried out; the text is the cause. Exit code 1."""


def first_line(error: Exception) -> str:
    """The first line of an error's text that says anything, where the rest is a traceback of another process; the
    error's name where it has no text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


_PLAINER = {
    "tuple_type": "Input should be a list",
    "model_type": "Input should hold settings by name",
    "dict_type": "Input should hold values by name",
    "missing": "must be given",
    "invalid_key": "Names should be text",
}
"""Pydantic's messages in Python's terms, put into those of a settings file."""
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""Mistakes that are told with the number that was given."""
_NO_NAMES = ("[key]", "[plain]", "[named]")
"""Parts of a mistake's place that no settings file has: pydantic's own, and the kinds of API keys."""


def explain(
    error: ValidationError,
    label: Callable[[str], str] = str,
    settings: type[BaseModel] | None = None,
    source: str = "the settings",
) -> str:
    """A line a mistake. `label` gives what the user calls a field (its dotted name), `source` what the settings were
    read from. A name that is none of `settings` is told which one is close to it."""
    lines = []
    for item in error.errors(include_url=False):
        message = _PLAINER.get(item["type"]) or item["msg"].removeprefix("Value error, ")
        name = ".".join(str(part) for part in item["loc"] if part not in _NO_NAMES)
        if item["type"] in _OUT_OF_RANGE and not {*item["loc"]} & {*_NO_NAMES}:  # which hold keys, and these are secret
            message += f", not {item['input']}"
        if item["type"] == "extra_forbidden":
            lines.append(_unknown(name, settings, source))
        else:
            # A mistake between fields is reported on what holds them, and its text names them.
            lines.append(message if not name or item["type"] == "value_error" else f"{label(name)}: {message}")
    return "\n".join(lines)


def _unknown(name: str, settings: type[BaseModel] | None, source: str) -> str:
    section, _, leaf = name.rpartition(".")
    known = dict(_names(settings)) if settings is not None else {}
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(leaf, beside, n=1):
        meant = f"{section}.{close[0]}" if section else close[0]
    else:  # right by itself, but in another section
        meant = next((each for each in known if each.rpartition(".")[2] == leaf), "")
    hint = f", did you mean {meant}?" if meant else "; docs/command-line.md lists all there are"
    return f"unknown setting {name} in {source}{hint}"


def _names(settings: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all fields, those of sections included."""
    for name, field in settings.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _names(field.annotation, f"{prefix}{name}.")
