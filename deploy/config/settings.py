"""Settings as their models state them: what the command line and the documentation are made from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from workers.config import Flag

UNITS: Final = {"_s": "SECONDS", "_ms": "MS", "_bytes": "BYTES"}
"""Units by the end of a setting's name."""
TYPES: Final[dict[type, str]] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "FILE"}
"""Placeholder for the value of an option that has neither choices nor a unit."""


@dataclass(frozen=True)
class Setting:
    """A field of a model, with all that is told of it."""

    name: str
    """Dotted, as in a settings file."""
    field: FieldInfo

    @cached_property
    def flag(self) -> Flag | None:
        """Its command-line flag; None for a setting that has none."""
        return next((each for each in self.field.metadata if isinstance(each, Flag)), None)

    @property
    def panel(self) -> str | None:
        """Heading under which help lists it."""
        return self.flag.panel if self.flag else None

    @property
    def option(self) -> str:
        """Name on the command line; the dotted name for a setting that is not there."""
        if self.flag is None:
            return self.name
        return self.flag.name or "--" + self.name.rpartition(".")[2].replace("_", "-")

    @cached_property
    def types(self) -> list[tuple[Any, list[Any]]]:
        """Types that its value may have, without None: a class or a Literal each, with its bounds."""
        return list(_types(self.field.annotation, self.field.metadata))

    @property
    def scalar(self) -> type:
        """The class that a word on a command line becomes. `object` where several are possible: `read` decides."""
        known = {str if get_origin(kind) is Literal else kind for kind, _ in self.types}
        if len(known) > 1:
            return object
        (kind,) = known
        return str if self.many else kind

    @property
    def many(self) -> bool:
        """Whether it is a list."""
        return get_origin(self.types[0][0]) is tuple

    def read(self, text: Any) -> Any:
        """The value of a word on a command line. ValueError that says what may be given."""
        try:
            kind: Any = self.field.annotation
            return TypeAdapter(kind).validate_python(text)
        except ValueError:
            words = [re.sub(r"^(\d+)\.\.(\d+)$", r"a number from \1 to \2", choice) for choice in self.choices]
            raise ValueError(f"{str(text)!r} is neither {' nor '.join(words)}") from None

    @property
    def choices(self) -> list[str]:
        """Words that may be given, and ranges such as `1..8` where numbers may be as well; empty if it is no choice."""
        found: list[str] = []
        for kind, bounds in self.types:
            if get_origin(kind) is Literal:
                found += map(str, get_args(kind))
            elif found:
                least, most = (_bound(bounds, name) for name in ("ge", "le"))
                found.append(TYPES[kind] if least is None or most is None else f"{least}..{most}")
        return found

    @property
    def range(self) -> str:
        """Range in words, such as `1<=x<=1024`; empty without bounds."""
        ((_, bounds), *others) = self.types
        if others:
            return ""
        low = [f"{_bound(bounds, name)}{sign}" for name, sign in (("gt", "<"), ("ge", "<=")) if _has(bounds, name)]
        high = [f"{sign}{_bound(bounds, name)}" for name, sign in (("lt", "<"), ("le", "<=")) if _has(bounds, name)]
        if low and not high:  # as people read it
            return "x" + (">=" if low[0].endswith("=") else ">") + low[0].rstrip("<=")
        return "".join(low) + "x" + "".join(high) if low or high else ""

    @property
    def value(self) -> str:
        """Placeholder for its value: its choices, or its unit or type with the range; empty for a switch."""
        if self.flag and self.flag.metavar:
            return self.flag.metavar
        if self.choices:
            return "|".join(self.choices)
        if self.scalar is bool:
            return ""
        unit = next((unit for end, unit in UNITS.items() if self.name.endswith(end)), TYPES[self.scalar])
        return f"{unit} [{self.range}]" if self.range else unit

    @property
    def default(self) -> str:
        """Its default, in words; empty where there is nothing to say."""
        if self.flag and self.flag.default:
            return self.flag.default
        default = None if self.field.is_required() else self.field.default
        return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)

    @property
    def text(self) -> str:
        """The docstring under the field, a line for each of its paragraphs."""
        paragraphs = (self.field.description or "").split("\n\n")
        return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def help(self, options: dict[str, str]) -> str:
        """The first paragraph, with the settings in it called as on the command line: `options` has their names."""
        first = self.text.partition("\n")[0]
        return re.sub(r"`([\w.]+)`", lambda found: options.get(found[1], found[0]), first)

    def documented(self) -> tuple[str, str]:
        """A line of a settings file that gives its default, and what is said of it."""
        default = self.default if self.field.is_required() else self.field.get_default()
        shown = default if isinstance(default, str) else json.dumps(default)
        first, _, more = self.text.partition("\n")
        meaning = f"null: {self.default}." if default is None and self.default else ""
        allowed = "" if self.flag and self.flag.metavar else self.range or "|".join(self.choices)
        words = (f"{self.option}:" if self.flag else "", first, meaning, more, f"[{allowed}]" if allowed else "")
        said = " ".join(" ".join(words).split())
        return f"{self.name.rpartition('.')[2]}: {shown}", said.replace("None:", "null:").replace("`", "")


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield all settings of a model and of the models in it, in their order."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_of(field.annotation, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, field)


def _types(annotation: Any, metadata: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _types(inner, [*metadata, *more])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _types(each, metadata)
    elif annotation is not type(None):
        yield annotation, [bound for each in metadata for bound in (each.metadata if _is_field(each) else [each])]


def _is_field(each: Any) -> bool:
    return isinstance(each, FieldInfo)


def _has(bounds: list[Any], name: str) -> bool:
    return any(hasattr(each, name) for each in bounds)


def _bound(bounds: list[Any], name: str) -> Any:
    found = next((getattr(each, name) for each in bounds if hasattr(each, name)), None)
    return f"{found:g}" if isinstance(found, float) else found
