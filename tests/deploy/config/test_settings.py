"""Description of a setting by its field, and that every setting is described well enough."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.config.application import ServeConfig
from deploy.config.settings import settings_of
from deploy.loadtest.load_spec import Load
from workers.config import Flag

ALL = {
    setting.name: setting for setting in (*settings_of(ServeConfig), *settings_of(Load)) if setting.name != "sessions"
}


class Inner(BaseModel):
    deep: int = 1
    """Deep down."""


class Drawn(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    needed: Annotated[str, Flag(metavar="NAME", default="nobody")]
    """Who. None: nobody."""
    whole: Annotated[int, Field(ge=1, le=9), Flag()] = 3
    """Count of `open_s`,
    and of `nothing`.

    More of `whole`."""
    open_s: Annotated[float, Field(gt=0), Flag("--open")] = 2.5
    above: Annotated[int | None, Field(ge=1)] = None
    inner_above: Annotated[float, Field(ge=0, lt=1)] | None = None
    size_bytes: int = Field(default=8, le=100)
    later_ms: float | None = None
    word: Literal["a", "b"] = "a"
    either: Literal["auto"] | Annotated[int, Field(ge=1, le=8)] = "auto"
    switch: bool = True
    names: tuple[str, ...] = ()
    place: Path | None = None
    inner: Inner = Inner()


DRAWN = {setting.name: setting for setting in settings_of(Drawn)}


@pytest.mark.parametrize(
    ("name", "kind", "value", "default"),
    [
        ("needed", str, "NAME", "nobody"),
        ("whole", int, "INT [1<=x<=9]", "3"),
        ("open_s", float, "SECONDS [x>0]", "2.5"),
        ("above", int, "INT [x>=1]", ""),
        ("inner_above", float, "FLOAT [0<=x<1]", ""),
        ("size_bytes", int, "BYTES [x<=100]", "8"),
        ("later_ms", float, "MS", ""),
        ("word", str, "a|b", "a"),
        ("either", object, "auto|1..8", "auto"),
        ("switch", bool, "", "True"),
        ("names", str, "TEXT", "()"),
        ("place", Path, "FILE", ""),
        ("inner.deep", int, "INT", "1"),
    ],
)
def test_a_field_says_what_may_be_given(name: str, kind: type, value: str, default: str) -> None:
    setting = DRAWN[name]
    assert (setting.scalar, setting.value, setting.default) == (kind, value, default)
    assert setting.many == (name == "names")


def test_texts_are_the_docstrings() -> None:
    assert DRAWN["whole"].text == "Count of `open_s`, and of `nothing`.\nMore of `whole`."
    assert DRAWN["whole"].help({"open_s": "--open"}) == "Count of --open, and of `nothing`."
    assert DRAWN["whole"].documented() == (
        "whole: 3",
        "--whole: Count of open_s, and of nothing. More of whole. [1<=x<=9]",
    )
    assert DRAWN["needed"].documented() == ("needed: nobody", "--needed: Who. null: nobody.")
    assert [DRAWN[name].option for name in ("open_s", "whole", "above")] == ["--open", "--whole", "above"]


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("1", 1), ("8", 8), (4, 4)])
def test_a_word_may_be_a_choice_or_a_number(text: str | int, value: str | int) -> None:
    assert DRAWN["either"].read(text) == value


@pytest.mark.parametrize("text", ["9", "0", "Auto", "1.5", ""])
def test_what_is_neither_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=f"^'{re.escape(text)}' is neither auto nor a number from 1 to 8$"):
        DRAWN["either"].read(text)


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_setting_is_described(name: str) -> None:
    """A description has the words of who reads help: what Python calls None is a default, which is told beside it."""
    setting = ALL[name]
    assert setting.text.endswith((".", ")."))
    assert setting.help({}).endswith(".")
    if setting.flag:
        assert "None" not in setting.help({})
        assert setting.scalar is bool or setting.default or setting.flag.panel is None


def refused(name: str, value: float) -> bool:
    """Whether the number is out of the setting's range."""
    data: dict = {}
    inner, (*path, leaf) = data, name.split(".")
    for part in path:
        inner = inner.setdefault(part, {})
    inner[leaf] = int(value) if ALL[name].scalar is int else value
    try:
        (Load if name in Load.model_fields else ServeConfig).model_validate(data)
    except ValidationError as error:
        told = error.errors()
        return any(".".join(map(str, each["loc"])) == name and "_than" in each["type"] for each in told)
    return False


@pytest.mark.parametrize("name", sorted(name for name, setting in ALL.items() if setting.range))
def test_the_range_that_is_told_is_the_one_that_is_checked(name: str) -> None:
    told = ALL[name].range
    if above := re.fullmatch(r"x(>=?)([\d.]+)", told):
        bounds = [(float(above[2]), -1, above[1] == ">=")]
    else:
        low, least, most, high = re.fullmatch(r"(?:([\d.]+)(<=?))?x(?:(<=?)([\d.]+))?", told).groups()
        bounds = [(float(low), -1, least == "<=")] if low else []
        bounds += [(float(high), 1, most == "<=")] if high else []
    assert bounds
    step = 1 if ALL[name].scalar is int else 0.25
    for bound, outwards, included in bounds:
        assert refused(name, bound + outwards * step)
        assert refused(name, bound) != included
        assert not refused(name, bound - outwards * step)
