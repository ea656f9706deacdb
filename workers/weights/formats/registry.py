"""The formats in which a checkpoint may store matrices besides as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from workers.weights.formats.format import Format
from workers.weights.formats.fp8_blocks import FP8_BLOCKS, FP8_COMPRESSED_TENSORS, FP8_MODELOPT
from workers.weights.formats.int4_groups import INT4_GROUPS
from workers.weights.formats.mxfp4 import MXFP4
from workers.weights.formats.mxfp8 import MXFP8
from workers.weights.formats.plain import PLAIN

_SUBDIVIDED: Final = {"algorithm": "quant_algo", "layout": "format"}
"""What `Format` has beside a method, and the field of a quantization_config that it is of."""
FORMATS: list[Format] = [FP8_BLOCKS, INT4_GROUPS, FP8_COMPRESSED_TENSORS, FP8_MODELOPT, MXFP8, MXFP4]
"""Formats of checkpoints. At most one of them says of a matrix that it is stored so."""


def stored_format(name: str, dtype_of: Callable[[str], str | None]) -> Format:
    """Return the format of matrix `name` in files whose tensors have these dtypes; None for a tensor that is not
    there."""
    return next((format for format in FORMATS if format.stores(name, dtype_of)), PLAIN)


def stated(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a quantization_config, those included that modelopt has in an object `quantization` within it, as
    in its hf_quant_config.json."""
    inner = given.get("quantization")
    if given.get("quant_method") != "modelopt" or not isinstance(inner, dict):
        return given
    return {**{name: value for name, value in given.items() if name != "quantization"}, **inner}


def difference(given: Mapping[str, Any]) -> str:
    """Return what in a quantization_config is not supported, as the first format of its method has it that the config
    names; "" if one of the formats is the checkpoint's."""
    told, method = stated(given), given.get("quant_method")
    if not (alike := [format for format in FORMATS if format.method == method]):
        return f"quant_method = {method!r}"
    for name, field in _SUBDIVIDED.items():
        said = told.get(field)
        if not (named := [format for format in alike if getattr(format, name) in (None, said)]):
            return f"{field} = {said!r}, supported: {', '.join(repr(getattr(format, name)) for format in alike)}"
        alike = named
    found = [format.difference(told) for format in alike]
    return "" if "" in found else found[0]


def assumed_dtypes(given: Mapping[str, Any] | None) -> Callable[[str], str | None]:
    """The dtype of a tensor by its name, in safetensors' words, in checkpoints with this quantization_config: as far as
    a config.json tells, for those who do not have the files yet. None: there is no such tensor."""
    told = stated(given or {})
    alike = [
        format
        for format in FORMATS
        if format.method == told.get("quant_method")
        and all(getattr(format, name) in (None, told.get(field)) for name, field in _SUBDIVIDED.items())
    ]
    own = next((format for format in alike if not format.difference(told)), alike[0] if alike else None)
    endings = {suffix for format in FORMATS for suffix in format.suffixes if suffix}

    def dtype_of(name: str) -> str | None:
        for suffix in endings:
            if name.endswith(f".weight{suffix}"):  # others are called `_scale`, too, such as Hy4's `hc_scale`
                there = own is not None and own.publishes(name.removesuffix(suffix))
                return own.suffixes.get(suffix) if own is not None and there else None
        return own.suffixes.get("") if own is not None and own.publishes(name) else "BF16"

    return dtype_of
