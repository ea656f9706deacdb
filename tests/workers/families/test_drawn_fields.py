"""Every field of published configs, and of those that transformers writes, with other values than it has: the config is
read as another one, or refused by a field's name, or the field is one that means nothing to the model's logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from published_configs import AXK1, AXK2, HY4, LARGE3_PARAMS, SARVAM, SMALL4, SMALL4_PARAMS, YOUTU
from transformers import AXK1Config, AXK2Config, HYV4Config, Mistral4Config, SarvamMLAConfig, YoutuConfig

from workers.families.registry import load_config
from workers.models.config import ConfigError

OF_TRAINING = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "embedding_initializer_range",
    "ep_size",
    "expert_model_parallel",
    "expert_parallel",
    "initializer_range",
    "learnable_sink_init",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Of training, of other programs, or of texts before they are ids."""
RESTATED = {"head_dim", "q_head_dim", "qk_head_dim"}
"""Say what other fields say, or nothing: transformers computes the first, and the makers' code of Sarvam none."""
MEANINGLESS: dict[str, set[str]] = {
    "AXK1": {"topk_method", "num_nextn_predict_layers"},  # the router's bias and the layer are what the files have
    "AXK2": {"num_nextn_predict_layers"},
    "HY4": {"num_key_value_heads"},
    "SARVAM": {"use_qk_norm"},
    # Without `apply_scale` nothing is corrected; what stands outside of text_config counts.
    "SMALL4": {"mscale", "mscale_all_dim", "max_position_embeddings", "tie_word_embeddings"},
}
PUBLISHED = {
    "YOUTU": YOUTU,
    "SARVAM": SARVAM,
    "AXK1": AXK1,
    "SMALL4": {name: value for name, value in SMALL4.items() if name != "vision_config"},
    "AXK2": AXK2,
    "HY4": HY4,
}
CLASSES = {
    "YOUTU": (YoutuConfig, YOUTU),
    "SARVAM": (SarvamMLAConfig, SARVAM),
    "AXK1": (AXK1Config, AXK1),
    "SMALL4": (Mistral4Config, {"rope_parameters": SMALL4["text_config"]["rope_parameters"]}),
    "AXK2": (AXK2Config, AXK2),
    "HY4": (HYV4Config, HY4),
}
PARAMS = {"small 4": SMALL4_PARAMS, "large 3": LARGE3_PARAMS}
OF_FILES = {
    "format",
    "ignore",
    "input_activations",
    "output_activations",
    "quantization_status",
    "targets",
    "vision_encoder",
}
"""In a params.json: how what sees is made, and what its files say themselves of each tensor, or what is not read."""


def others(value: object) -> list[Any]:
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2, value // 2]
    if isinstance(value, float):
        return [2 * value + 1, value + 0.5]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, list):
        return [["other"] * len(value), [*value, "other"]]
    return [2, True, "other"]


def fields(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from fields(value, (*path, name))
        else:
            yield (*path, name), value


def without_effect(values: dict[str, Any], read: Callable[[dict[str, Any]], object], skipped: set[str]) -> set[str]:
    """Names of the fields none of whose other values changes anything; every error names a field of the config."""
    known, found, unnamed = {name for path, _ in fields(values) for name in path} | {"rope_scaling"}, set(), []
    want = read(values)
    for path, value in fields(values):
        if skipped & {*path}:
            continue
        effects = 0
        for other in others(value):
            changed = deepcopy(values)
            inner = changed
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = other
            try:
                effects += read(changed) != want
            except ConfigError as error:
                effects += 1
                unnamed += [] if any(name in str(error) for name in known) else [(path, other, str(error))]
        if not effects:
            found.add(path[-1])
    assert not unnamed
    return found


def reader(folder: Path, file: str) -> Callable[[dict[str, Any]], object]:
    def read(values: dict[str, Any]) -> object:
        (folder / file).write_text(json.dumps(values))
        return load_config(folder)

    return read


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_configs(name: str, tmp_path: Path) -> None:
    values = PUBLISHED[name]
    found = without_effect(values, reader(tmp_path, "config.json"), OF_TRAINING | RESTATED)
    assert found == MEANINGLESS.get(name, set()) & {path[-1] for path, _ in fields(values)}


@pytest.mark.parametrize("name", CLASSES)
def test_fields_that_transformers_writes(name: str, tmp_path: Path) -> None:
    kind, given = CLASSES[name]
    kind(**given).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    found = without_effect(values, reader(tmp_path, "config.json"), OF_TRAINING | RESTATED)
    assert found <= MEANINGLESS.get(name, set())


@pytest.mark.parametrize("name", PARAMS)
def test_fields_of_a_params_json(name: str, tmp_path: Path) -> None:
    """An error has the names that a config.json has, and says so."""
    values, read, errors = PARAMS[name], reader(tmp_path, "params.json"), list[str]()

    def said(changed: dict[str, Any]) -> object:
        try:
            return read(changed)
        except ConfigError as error:
            errors.append(str(error))
            return str(error)

    assert without_effect(values, said, OF_TRAINING | RESTATED | OF_FILES) == set()
    assert errors
    assert not [error for error in errors if "params.json" not in error]
