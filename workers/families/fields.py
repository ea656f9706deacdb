"""Typed access to the values of a config.json."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigError


def all_ids(*given: object) -> list[object]:
    """The ids of several fields, each of which is an id, a list of them or null, without repetitions."""
    ids = [index for value in given if value is not None for index in (value if isinstance(value, list) else [value])]
    return [index for place, index in enumerate(ids) if (type(index), index) not in [(type(i), i) for i in ids[:place]]]


class Fields:
    """Values of a config.json, each of the type that is asked for.

    A field that is missing or null has the `default`; where there is none, or the value has another type, `ConfigError`
    names the field.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"config.json lacks {self.prefix}{name}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"config.json: {self.prefix}{name} must be a string, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"config.json: {self.prefix}{name} must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"config.json: {self.prefix}{name} must be a number, not {value!r}")
        return float(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, a list of them, or none."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ConfigError(
                f"{self.prefix}{name} must be token ids below vocab_size = {vocab_size}, not {value!r} (in "
                "config.json, or generation_config.json where that has it)"
            )
        return tuple(ids)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {self.prefix}{name} must be true or false, not {value!r}")
        return value

    def unsupported(self, name: str, value: object, supported: Any) -> ConfigError:
        """To raise where a field has a value that would change the computation, and is not understood."""
        return ConfigError(
            f"config.json: {self.prefix}{name} = {value!r} is not supported; supported: "
            f"{', '.join(map(repr, supported))}"
        )
