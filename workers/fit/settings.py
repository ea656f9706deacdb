"""Checks of settings against a model's config.json alone, before anything is started.

Whatever else is wrong with a checkpoint is found by those who read it (`workers.models`), which takes torch and time.
"""

from __future__ import annotations

import math
import os
from typing import Any, Final

from kernels.page import PAGE_TOKENS
from workers.config import EngineConfig
from workers.families.draft_models import read_draft_model
from workers.families.registry import load_config
from workers.model_folder import config_values
from workers.models.config import ConfigError
from workers.parallel.mesh import INVARIANT_RANKS, AxisName
from workers.quantization import unsupported_quantization

SHARED: Final[dict[str, AxisName]] = {
    "num_attention_heads": "heads",
    "o_groups": "heads",
    "intermediate_size": "experts",
    "moe_intermediate_size": "experts",
}
"""Counts in config.json that the ranks divide among themselves, with the mesh axis of each."""
LEAST_CONTEXT: Final = 2
"""Tokens of the shortest request: one of prompt, and one of output."""
_MOST_NAMED = 8


class Unfit(ValueError):
    """The model cannot be served with these settings; the message names the values that work."""


def check_fit(config: EngineConfig, *, gpus: int | None = None) -> None:
    """Unfit, a line per cause. FileNotFoundError where there is no config.json. `gpus`: how many there are where the
    ranks will run; None if that is not known yet, and then ranks say what a GPU lacks."""
    try:
        values = config_values(config.folder)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise Unfit(f"cannot read {config.folder / 'config.json'}: {error}") from None
    text = values.get("text_config")
    model = {**values, **text} if isinstance(text, dict) else values  # of models that see, the part that writes
    causes = [_quantization(config, values), _ranks(config, model), _context(config, model), _drafter(config)]
    causes += [_cache_dtype(config, gpus), *_draft_model(config), *_tiers(config, model, gpus)]
    if found := [cause for cause in causes if cause]:
        raise Unfit("\n".join(found))


def _quantization(config: EngineConfig, values: dict[str, Any]) -> str:
    said = unsupported_quantization(values)
    return f"{config.folder / 'config.json'}: {said}" if said else ""


def _ranks(config: EngineConfig, values: dict[str, Any]) -> str:
    counts = {name: values[name] for name in SHARED if type(values.get(name)) is int and values[name] > 0}
    ranks, mesh = config.tensor_parallel, config.mesh()
    rest = [f"{name} = {count}" for name, count in counts.items() if count % mesh.axis(SHARED[name]).size]
    if not rest:
        return ""
    most = math.gcd(*counts.values())
    works = [n for n in range(1, most + 1) if most % n == 0 and (n in INVARIANT_RANKS or not config.invariant)]
    named = f"{', '.join(map(str, works[:_MOST_NAMED]))}{', ...' if len(works) > _MOST_NAMED else ''}"
    return (
        f"tensor_parallel = {ranks} (--tensor-parallel): ranks share the model equally, and {' and '.join(rest)} of "
        f"{config.folder / 'config.json'} cannot be divided by {ranks}; values that work: {named}"
    )


def _context(config: EngineConfig, values: dict[str, Any]) -> str:
    made_for = values.get("max_position_embeddings")
    if config.max_context is not None and config.max_context < LEAST_CONTEXT:
        return (
            f"max_context = {config.max_context} (--max-context): a request has a token of prompt and one of output at "
            f"least; give {LEAST_CONTEXT} or more"
        )
    if config.max_context is None or type(made_for) is not int or config.max_context <= made_for:
        return ""
    return (
        f"max_context = {config.max_context} (--max-context), but the model was made for {made_for} tokens "
        f"(max_position_embeddings in {config.folder / 'config.json'}); give {made_for} or less"
    )


def _dtype(config: EngineConfig, gpus: int | None) -> str:
    """The dtype in which the model runs. bfloat16 is what ranks take by themselves on GPUs alone."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and gpus == 0)
    return config.dtype if config.dtype != "auto" else "float32" if on_cpu else "bfloat16"


def _tiers(config: EngineConfig, values: dict[str, Any], gpus: int | None) -> list[str]:
    """What is too small for a single page behind the GPU's cache, or too large for the machine, where that is known.
    Ranks know the size of a page to the byte; here it is what the latents of all layers take at the least."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if gpus is not None and config.host_cache_bytes > memory:
        return [
            f"host_cache_bytes = {config.host_cache_bytes} (--host-cache-bytes), but this machine has {memory} bytes "
            "of memory: give less"
        ]
    counts = [values.get(name) for name in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")]
    known = [count for count in counts if type(count) is int]
    if len(known) < len(counts):
        return []
    layers, latent, roped = known
    width = 1 if config.kv_cache_dtype == "fp8" else 4 if _dtype(config, gpus) == "float32" else 2
    least = PAGE_TOKENS * layers * (latent + roped) * width
    return [
        f"{name} = {size} (--{name.replace('_', '-')}) is less than one page of latent cache, which takes at least "
        f"{least}: give more, or 0 for none"
        for name, size in (("host_cache_bytes", config.host_cache_bytes), ("disk_cache_bytes", config.disk_cache_bytes))
        if 0 < size < least
    ]


def _cache_dtype(config: EngineConfig, gpus: int | None) -> str:
    named = _dtype(config, gpus)
    if config.kv_cache_dtype != "bf16" or named == "bfloat16":
        return ""
    return (
        f"kv_cache_dtype = bf16 (--kv-cache-dtype), but the model runs in {named}, and its cache can be in that or in "
        "FP8: give --dtype bfloat16, --kv-cache-dtype auto or --kv-cache-dtype fp8"
    )


def _drafter(config: EngineConfig) -> str:
    if config.drafter != "mtp" or config.most_width == 1:
        return ""
    try:
        if load_config(config.folder).draft_layers:
            return ""
    except ConfigError:
        return ""  # a start says what is wrong with it
    return (
        f"drafter = mtp (--drafter): {config.folder / 'config.json'} declares no draft layer "
        "(num_nextn_predict_layers); give --drafter ngram, which needs none, or --drafter none"
    )


def _draft_model(config: EngineConfig) -> list[str]:
    if config.draft_folder is None:
        return []
    try:
        target = load_config(config.folder)
    except ConfigError:
        return []  # a start says what is wrong with it
    try:
        read_draft_model(config, target, config.mesh())
    except ConfigError as error:
        return [f"draft_model = {config.draft_folder} (--draft-model): {error}"]
    return []
