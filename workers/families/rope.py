"""Rotary position embedding as a config.json of Hugging Face describes it."""

from __future__ import annotations

from workers.families.fields import Fields
from workers.models.config import ConfigError, Rope, Yarn


def read_rope(fields: Fields, *, interleaved: bool) -> Rope:
    """`rope_parameters`, or what it was called before, `rope_scaling` and `rope_theta`."""
    given = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {given!r}")
    rope = Fields(given, "rope_scaling.")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.unsupported("partial_rotary_factor", given["partial_rotary_factor"], (1.0,))
    if value := given.get("llama_4_scaling_beta"):  # queries are scaled by their position
        raise rope.unsupported("llama_4_scaling_beta", value, (None,))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return Rope(theta, interleaved)
    if kind != "yarn":
        raise rope.unsupported("type", kind, ("default", "yarn"))
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
