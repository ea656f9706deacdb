"""The families of models, by the `model_type` of a config.json, and what a checkpoint's config.json says.

Nothing from the checkpoint is executed, and nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from workers.families.axk1 import AXK1
from workers.families.axk2 import AXK2
from workers.families.deepseek import DeepseekV2, DeepseekV3
from workers.families.deepseek_v4 import DeepseekV4
from workers.families.family import Family
from workers.families.glm import Glm4MoeLite
from workers.families.hyv4 import HYV4, HYV4VL
from workers.families.kimi import KimiK25
from workers.families.mistral import Mistral3, Mistral4
from workers.families.sarvam import SarvamMla
from workers.families.sparse import DeepseekV32, GlmMoeDsa
from workers.families.youtu import Youtu
from workers.model_folder import CONFIG, config_file, config_values
from workers.models.config import ConfigError, ModelConfig
from workers.models.fields import Fields, all_ids

FAMILIES: Final[dict[str, Family]] = {
    "AXK1": AXK1(),
    "axk1": AXK1(),
    "axk2": AXK2(),
    "deepseek_v2": DeepseekV2(),
    "deepseek_v3": DeepseekV3(),
    "deepseek_v32": DeepseekV32(),
    "deepseek_v4": DeepseekV4(),
    "glm4_moe_lite": Glm4MoeLite(),
    "glm_moe_dsa": GlmMoeDsa(),
    "hy_v4": HYV4(),
    "hy_v4_vl": HYV4VL(),
    "kimi_k2": DeepseekV3(),
    "kimi_k25": KimiK25(),
    "mistral3": Mistral3(),
    "mistral4": Mistral4(),
    "sarvam_mla": SarvamMla(),
    "youtu": Youtu(),
    "youtu_llm": Youtu(),
}


def load_config(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json, or params.json where there is none, and further end-of-sequence ids from a
    generation_config.json beside it: a text ends with those of either, as Kimi K2 ends chats with one and texts with
    the other. `ConfigError` says what is wrong with them."""
    path, generation = config_file(Path(folder)), Path(folder) / "generation_config.json"
    if path is None:
        raise ConfigError(f"there is no config.json in {folder}: give the folder of a Hugging Face checkpoint")
    try:
        values = config_values(Path(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if generation.exists() and (ids := _json_object(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = all_ids(values.get("eos_token_id"), ids)
    if path.name == CONFIG:
        return parse_config(values)
    try:
        return parse_config(values)
    except ConfigError as error:
        said = str(error).removeprefix("config.json: ")
        raise ConfigError(f"{path.name}, by the names that a config.json has for its fields: {said}") from None


def parse_config(values: dict[str, Any]) -> ModelConfig:
    """Read the values of a config.json; `ConfigError` names the field at fault."""
    fields = Fields(values)
    name = fields.text("model_type")
    if name not in FAMILIES:
        raise fields.unsupported("model_type", name, FAMILIES)
    return FAMILIES[name].read(fields)


def has_fp8_cache(config: ModelConfig) -> bool:
    """Whether such a model can have a cache in FP8."""
    return FAMILIES[config.model_type].fp8_cache


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return values
