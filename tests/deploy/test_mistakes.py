"""Messages about wrong settings are for people who never saw the code."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.config.application import ServeConfig
from deploy.mistakes import explain

WHOLE = ServeConfig.model_validate({"engine": {"model": "demo"}}).model_dump(mode="json")
WRONG = ("", "x", -1, 1e400, 10**30, [], ["x", 3], [None], {}, {"x": 1}, {1: 2}, None, True, "null")
PYTHONS = re.compile(r"[A-Z][a-z]+[A-Z]\w+|NoneType|\bNone\b|tuple|dict|instance|Error|pydantic|Value error")


def places(values: dict[str, Any], path: tuple[str, ...] = ()):
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


@pytest.mark.parametrize("place", sorted(places(WHOLE)), ids=".".join)
def test_no_message_speaks_of_classes(place: tuple[str, ...]) -> None:
    wrong = 0
    for value in WRONG:
        data: Any = copy.deepcopy(WHOLE)
        inner = data
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value
        try:
            ServeConfig.model_validate(data)
        except ValidationError as error:
            wrong += 1
            for line in explain(error, settings=ServeConfig).splitlines():
                shown = line.replace(repr(value), "")
                assert not PYTHONS.search(shown), line
    assert wrong


def known(values: dict[str, Any]) -> list[str]:
    return [".".join(place) for place in places(values)]


@pytest.mark.parametrize("name", known(WHOLE))
def test_a_name_with_a_letter_left_out_is_recognized(name: str) -> None:
    section, _, leaf = name.rpartition(".")
    wrong = leaf[:-2] + leaf[-1]
    if f"{section}.{wrong}".lstrip(".") in known(WHOLE):
        pytest.skip("that is a name, too")
    data: Any = {"engine": {"model": "demo"}}
    inner = data.setdefault(section, {}) if section else data
    inner[wrong] = 1
    with pytest.raises(ValidationError) as found:
        ServeConfig.model_validate(data)
    lines = explain(found.value, settings=ServeConfig, source="y.yaml").splitlines()
    asked = f"{section}.{wrong}".lstrip(".")
    assert f"unknown setting {asked} in y.yaml, did you mean {name}?" in lines


def test_a_number_out_of_range_is_told_unless_it_is_among_keys() -> None:
    keys = [{"key": "secret", "name": "app", "weight": 123456}]
    with pytest.raises(ValidationError) as found:
        ServeConfig.model_validate({"engine": {"model": "demo"}, "port": 70000, "api": {"api_keys": keys}})
    lines = explain(found.value, settings=ServeConfig).splitlines()
    assert "port: Input should be less than or equal to 65535, not 70000" in lines
    assert "api.api_keys.0.weight: Input should be less than or equal to 1000" in lines
