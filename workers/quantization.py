"""The quantization that a config.json describes, and whether it is supported.

How each tensor is stored, the tensors themselves say (`workers.weights.formats`). This finds what cannot be read at all
before anything is started, and says so in the words of those who publish it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from workers.weights.formats.registry import FORMATS, difference, stated

_NAMES: Final = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}
"""Names of formats that are recognized by the beginning of `format`, `quant_method` or `quant_algo`."""


def unsupported_quantization(values: dict[str, Any]) -> str:
    """Return why the weights of a checkpoint with this config.json cannot be read; empty if they can."""
    text = values.get("text_config")
    for prefix, place in (("", values), ("text_config.", text if isinstance(text, dict) else {})):
        if place.get("quantization_config") is None:
            continue
        given = stated(place["quantization_config"] if isinstance(place["quantization_config"], dict) else {})
        if why := difference(given):
            return (
                f"{prefix}quantization_config: quantized weights of this kind ({_kind(given)}) are not supported: "
                f"{why}. Supported are {_supported()}; docs/models.md names checkpoints under Checkpoints"
            )
    return ""


def _supported() -> str:
    formats = "; ".join(format.published for format in FORMATS if format.published)
    return f"{formats}; and bfloat16, float16 and float32 without a quantization_config"


def _kind(given: Mapping[str, Any]) -> str:
    """A name that people know."""
    method = str(given.get("quant_method", "of unknown method"))
    for name in (given.get("format"), given.get("quant_algo"), method):
        for begin, known in _NAMES.items():
            if str(name).lower().startswith(begin):
                return known if method == begin else f"{known}, {method}"
    if algorithm := given.get("quant_algo"):
        return f"{algorithm}, {method}"
    for group in _groups(given):
        weights = group.get("weights")
        if isinstance(weights, dict) and weights.get("num_bits") in (4, 8):
            return f"{'FP' if weights.get('type') == 'float' else 'INT'}{weights['num_bits']}, {method}"
    return "FP8" if method == "fp8" else method


def _groups(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = given.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
