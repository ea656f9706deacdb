"""Typed access to the values of a config.json, and the rotary position embedding as Hugging Face describes it there."""

from __future__ import annotations

from typing import Any

from workers.models.config import ConfigError, Rope, Yarn


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
        """Read a field that has one id, a list of ids, or none."""
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
        """Make the error for a field with a value that would change the computation and is not understood."""
        return ConfigError(
            f"config.json: {self.prefix}{name} = {value!r} is not supported; supported: "
            f"{', '.join(map(repr, supported))}"
        )


def rope_values(fields: Fields) -> tuple[str, dict[str, Any]]:
    """`rope_parameters`, or what it was called before, `rope_scaling`: its name, and its fields, of which there are
    none where the config.json has neither. `ConfigError` where there are both and they are not the same, and for ropes
    of several kinds of layers: transformers reads the older name first, others the newer one."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if not (given := fields.values.get(name)):
            continue
        if not isinstance(given, dict):
            raise ConfigError(f"config.json: {fields.prefix}{name} must be an object, not {given!r}")
        if (several := next((key for key, value in given.items() if isinstance(value, dict)), None)) is not None:
            raise ConfigError(
                f"config.json: {fields.prefix}{name}.{several} is an object, as if kinds of layers had ropes of their "
                f"own, which is not supported; if all have this one, put its fields into {name} itself"
            )
        found[name] = given
    if len(found) > 1 and _differ([*found.values()], fields.values.get("rope_theta")):
        raise ConfigError(
            f"config.json: {fields.prefix}rope_parameters = {found['rope_parameters']!r} and rope_scaling = "
            f"{found['rope_scaling']!r} differ, and mean the same; remove one of them"
        )
    newest = next(iter(found), "rope_parameters")
    older_first = [item for given in reversed(found.values()) for item in given.items()]
    return newest, {name: value for name, value in older_first if value is not None}


def _differ(ropes: list[dict[str, Any]], base: object) -> bool:
    """Whether two descriptions of a rope say something else, in the newer words: transformers writes 40 as 40.0. `base`
    is the one that stands outside, for those that name none; None if none does."""
    said = []
    for rope in ropes:
        given = {{"type": "rope_type"}.get(name, name): value for name, value in rope.items() if value is not None}
        said.append(given if base is None else {"rope_theta": base, **given})
    one, other = said
    unnamed = {"rope_theta"} - (one.keys() & other.keys())
    return any(one.get(name) != other.get(name) for name in (one.keys() | other.keys()) - unnamed)


def read_rope(fields: Fields, *, interleaved: bool) -> Rope:
    """The rope, of `rope_values` and `rope_theta`."""
    name, given = rope_values(fields)
    rope = Fields(given, f"{fields.prefix}{name}.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.unsupported("partial_rotary_factor", given["partial_rotary_factor"], (1.0,))
    if value := given.get("llama_4_scaling_beta"):  # queries are scaled by their position
        raise rope.unsupported("llama_4_scaling_beta", value, (None,))
    if given.get("factor") is not None and given.get("rope_type") is None and given.get("type") is None:
        raise ConfigError(
            f"config.json lacks {rope.prefix}rope_type, which says what its factor of {given['factor']!r} is of"
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.text("type", kind) != kind:
        raise ConfigError(
            f"config.json: {rope.prefix}rope_type = {kind!r} and type = {given['type']!r} differ, and mean the same; "
            "remove one of them"
        )
    if kind == "default":
        return Rope(theta, interleaved)
    if kind != "yarn":
        raise rope.unsupported("rope_type" if given.get("rope_type") else "type", kind, ("default", "yarn"))
    limit = fields.count("max_position_embeddings")
    original = fields.count("original_max_position_embeddings", rope.count("original_max_position_embeddings", limit))
    yarn = Yarn(
        factor=rope.number("factor"),
        original_positions=original,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        attention_factor=rope.number("attention_factor") if given.get("attention_factor") is not None else None,
        truncate=rope.flag("truncate", True),
    )
    return Rope(theta, interleaved, yarn)
