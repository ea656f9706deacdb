"""What a config.json says about how its weights are quantized, and which of that is supported.

How each tensor is stored, the tensors themselves say (`workers.weights.stored`). This finds what cannot be read at all
before anything is started, and says so in the words of those who publish it.
"""

from __future__ import annotations

from typing import Any, Final

SUPPORTED: Final = (
    "FP8 (e4m3) in blocks of 128 x 128 with dynamic activation scales, as DeepSeek publishes it; INT4 in groups of 32, "
    "symmetric, without reordering, as compressed-tensors packs it (pack-quantized); and bfloat16, float16 and float32 "
    "without a quantization_config"
)
_NAMES: Final = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}
"""Of formats that are known by what `format`, `quant_method` or `quant_algo` begins with."""


def unsupported_quantization(values: dict[str, Any]) -> str:
    """What to say of the weights of a checkpoint with this config.json; empty where they can be read."""
    text = values.get("text_config")
    for prefix, place in (("", values), ("text_config.", text if isinstance(text, dict) else {})):
        if place.get("quantization_config") is None:
            continue
        given = place["quantization_config"] if isinstance(place["quantization_config"], dict) else {}
        if why := _why(given):
            return (
                f"{prefix}quantization_config: quantized weights of this kind ({_kind(given)}) are not supported: "
                f"{why}. Supported are {SUPPORTED}; docs/models.md names checkpoints under Checkpoints"
            )
    return ""


def _kind(given: dict[str, Any]) -> str:
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


def _groups(given: dict[str, Any]) -> list[dict[str, Any]]:
    groups = given.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _why(given: dict[str, Any]) -> str:
    """What is not supported; empty where all is."""
    match given.get("quant_method"):
        case "fp8":
            return _differences(
                given,
                "",
                {
                    "weight_block_size": ([128, 128],),
                    "fmt": (None, "e4m3"),
                    "activation_scheme": (None, "dynamic"),
                },
            )
        case "compressed-tensors":
            return _compressed(given)
        case method:
            return f"quant_method = {method!r}"


def _compressed(given: dict[str, Any]) -> str:
    nothing: tuple[Any, ...] = (None, {}, [])
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1 or len(_groups(given)) != 1:
        return "config_groups has not exactly one group"
    group = _groups(given)[0]
    weights = group.get("weights")
    return (
        _differences(given, "", {"format": ("pack-quantized",)})
        or _differences(
            weights if isinstance(weights, dict) else {},
            "weights.",
            {
                "num_bits": (4,),
                "type": ("int",),
                "strategy": ("group",),
                "group_size": (32,),
                "symmetric": (True,),
                "actorder": (None, False),
                "dynamic": (None, False),
            },
        )
        or _differences(
            group,
            "",
            {"input_activations": nothing, "output_activations": nothing, "format": (None, "pack-quantized")},
        )
        or _differences(given, "", {"kv_cache_scheme": nothing, "transform_config": nothing})
        or _sparsity(given)
    )


def _sparsity(given: dict[str, Any]) -> str:
    sparsity = given.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    return "" if form in (None, "dense") else f"sparsity_config.format = {form!r}"


def _differences(values: dict[str, Any], prefix: str, supported: dict[str, tuple[Any, ...]]) -> str:
    """The first of these fields that has another value."""
    for name, choices in supported.items():
        value = values.get(name)
        # True is no 1.
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            return f"{prefix}{name} = {value!r}, supported: {choices[-1]!r}"
    return ""
