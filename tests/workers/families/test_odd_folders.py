"""Folders as people have them: other names for the same tensors, a config.json written by another version, half a
download. Each is served as it is meant, or refused in words that say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import Paged, load_fp32
from safetensors.torch import load_file, save_file
from test_mistral_layouts import as_mistral
from tiny_models import VOCAB, YARN, random_tokens, write_tiny

from workers.families import load_config, parse_config
from workers.models.config import ConfigError
from workers.weights.checkpoint import WeightsError

TOKENS = random_tokens(40, 11, VOCAB)


def logits(folder: Path) -> torch.Tensor:
    model = load_fp32(folder)
    paged = Paged(model, [TOKENS])
    return model.logits(paged.forward(paged.plan([], 1, [(0, len(TOKENS))]))[0])


def rename(folder: Path, *rules: tuple[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for pattern, instead in rules:
        tensors = {re.sub(pattern, instead, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


BY_TRANSFORMERS = (
    (r"^(vision_tower|multi_modal_projector|mm_projector|vit)\.", r"model.\1."),
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("mistral3", BY_TRANSFORMERS),
        ("kimi", BY_TRANSFORMERS),
        ("hyv4-vl", ((r"^model\.", "model.language_model."), (r"^vit\.", "model.vision_tower."))),
        ("mistral3", ((r"^language_model\.", ""),)),
        ("mistral4", ((r"^", "language_model."),)),
    ],
    ids=["mistral3", "kimi", "hy4", "the text part's own", "with a prefix"],
)
def test_the_text_part_has_any_of_its_names(kind: str, rules: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    """Those that publishers, and those that transformers has in memory, where text, head and sight are apart."""
    want = logits(write_tiny(tmp_path, kind, seed=6))
    rename(tmp_path, *rules)
    assert torch.equal(logits(tmp_path), want)


def test_a_config_of_hugging_face_with_the_makers_own_files(tmp_path: Path) -> None:
    """Both layouts are published side by side, and one of them is enough."""
    want = logits(write_tiny(tmp_path, "mistral3", seed=6))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    text = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items() if "language" in name}
    save_file(as_mistral(text) | {"vision_encoder.ln_pre.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(logits(tmp_path), want)


def test_a_tensor_that_is_there_by_two_names_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "mistral3", seed=6)
    tensors = load_file(tmp_path / "model.safetensors")
    again = "model.language_model.norm.weight"
    tensors[again] = tensors["language_model.model.norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"1 unexpected:\s+{re.escape(again)}"):
        load_fp32(tmp_path)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OTHER = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["v3-yarn", "sarvam", "youtu", "axk1", "axk2", "hyv4", "mistral4"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": PLAIN, "rope_scaling": OTHER}, ["rope_scaling", "differ", "remove one of them"]),
        ({"rope_parameters": {"full_attention": YARN}}, ["rope_parameters.full_attention", "into rope_parameters"]),
        ({"rope_parameters": {"factor": 8.0, "rope_theta": 1e4}}, ["rope_", "supported|lacks"]),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e4}, "rope_scaling": {**YARN, "rope_theta": 1e6}},
            ["rope_scaling", "differ", "remove one of them"],
        ),
        ({"rope_parameters": {**YARN, "type": "default"}}, ["rope_type = 'yarn'", "type = 'default' differ"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor = 0.25"]),
    ],
    ids=["two ropes", "a rope of a kind of layers", "a factor of nothing", "two bases", "two types", "a part"],
)
def test_ropes_that_would_be_misread_are_refused(
    kind: str, change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    """Before, all but the last were plain rope, or one of two; transformers 5.24 takes `rope_scaling` of both."""
    write_tiny(tmp_path, kind)
    rope = {} if "partial_rotary_factor" in change else {"rope_scaling": None}
    rewritten(tmp_path, lambda config: {**config, **rope, **change})
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path)
    for word in words:
        assert re.search(word, str(raised.value))


@pytest.mark.parametrize("kind", ["v3-yarn", "axk1-no-bias", "mistral4"])
def test_both_names_of_one_rope(kind: str, tmp_path: Path) -> None:
    """As those write it who want older versions to read it, too: the base outside, and `type`."""
    want = load_config(write_tiny(tmp_path, kind))

    def change(config: dict[str, Any]) -> dict[str, Any]:
        rope = dict(config["rope_parameters"])
        theta, name = rope.pop("rope_theta"), rope.pop("rope_type")
        return {**config, "rope_theta": theta, "rope_scaling": {**rope, "type": name}}

    rewritten(tmp_path, change)
    assert load_config(tmp_path) == want


@pytest.mark.parametrize("kind", ["v3-yarn", "axk1-no-bias", "mistral4"])
def test_both_names_of_one_rope_in_other_types_of_numbers(kind: str, tmp_path: Path) -> None:
    """transformers 5 writes a factor of 40 as 40.0 into `rope_parameters`; beside it may stand what the maker wrote."""
    want = load_config(write_tiny(tmp_path, kind))

    def change(config: dict[str, Any]) -> dict[str, Any]:
        rope = config["rope_parameters"]
        whole = {name: int(value) for name, value in rope.items() if isinstance(value, float) and value.is_integer()}
        assert "factor" in whole
        return {**config, "rope_scaling": {**rope, **whole}}

    rewritten(tmp_path, change)
    assert load_config(tmp_path) == want


def test_a_params_json_speaks_of_both_names_of_one_rope(tmp_path: Path) -> None:
    write_tiny(tmp_path, "mistral4")

    def change(config: dict[str, Any]) -> dict[str, Any]:
        rope = {name: value for name, value in config["rope_parameters"].items() if name != "apply_scale"}
        return {**config, "rope_parameters": rope, "rope_scaling": rope}

    want = load_config(tmp_path)
    rewritten(tmp_path, change)
    assert load_config(tmp_path) != want
    (tmp_path / "params.json").write_text(json.dumps({"yarn": {"apply_scale": True}}))
    assert load_config(tmp_path) == want


@pytest.mark.parametrize(
    ("kind", "change", "word"),
    [
        ("mistral4", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("mistral4", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("youtu", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("youtu", {"layer_types": 3}, "layer_types"),
    ],
)
def test_what_would_compute_otherwise_is_refused(kind: str, change: dict[str, Any], word: str, tmp_path: Path) -> None:
    config = json.loads((write_tiny(tmp_path, kind) / "config.json").read_text())
    assert parse_config(config | {"layer_types": ["full_attention"] * 3}) == parse_config(config)
    with pytest.raises(ConfigError, match=word):
        parse_config(config | change)


def test_files_may_be_in_a_folder_of_their_own(tmp_path: Path) -> None:
    write_tiny(tmp_path, "youtu")
    want = logits(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "weights" / "all.safetensors")
    index = {"weight_map": {"model.norm.weight": "weights/all.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(tmp_path), want)


@pytest.mark.parametrize("file", [3, "../elsewhere.safetensors", "/elsewhere.safetensors", "", None])
def test_an_index_names_files_of_its_folder(file: Any, tmp_path: Path) -> None:
    write_tiny(tmp_path, "youtu")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(WeightsError, match=r"names .* no file of this folder"):
        load_fp32(tmp_path)


def test_a_model_without_an_output_head_is_told_of_the_field_for_that(tmp_path: Path) -> None:
    write_tiny(tmp_path, "youtu-no-q-lora", seed=6)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing:\s+lm_head\.weight\s+.*tie_word_embeddings: true"):
        load_fp32(tmp_path)
    rewritten(tmp_path, lambda config: {**config, "tie_word_embeddings": True})
    assert logits(tmp_path).isfinite().all()


KV = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
FLOAT_QUANTIZED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", r"re:.*self_attn\.(q|kv)_.*", r"re:.*mlp\.gate$"],
    "kv_cache_scheme": KV,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": KV,
            "weights": {**KV, "actorder": None, "block_structure": None, "group_size": None, "scale_dtype": None},
        }
    },
}


@pytest.mark.parametrize("kind", ["youtu", "axk1", "mistral3", "hyv4"])
def test_fp8_of_compressed_tensors_beside_matrices_that_it_ignores(kind: str, tmp_path: Path) -> None:
    """One scale for a matrix, beside scales of what goes into it and of the cache, which nothing reads; which matrices
    are not in FP8 the files say. Stacked experts have theirs as single ones do."""
    write_tiny(tmp_path, kind, seed=6)
    meant, written = load_file(tmp_path / "model.safetensors"), {}
    for name, values in meant.items():
        ignored = re.search(r"self_attn\.(q|kv)_|eh_proj|projector|vision|indexer", name)
        if ignored or not re.search(r"_proj(\.weight)?$", name):
            written[name] = values
            continue
        stem, scale = name.removesuffix(".weight"), values.abs().max() / 448
        written[name] = (values / scale).to(torch.float8_e4m3fn)
        meant[name] = written[name].float() * scale
        between = "." if name.endswith(".weight") else "_"
        written |= {f"{stem}{between}weight_scale": scale.view(1), f"{stem}{between}input_scale": torch.tensor(3.0)}
    save_file(meant, tmp_path / "model.safetensors", metadata={"format": "pt"})
    want = logits(tmp_path)
    attention = next(
        name.removesuffix("o_proj.weight") for name in meant if name.endswith("layers.0.self_attn.o_proj.weight")
    )
    written |= {f"{attention}{end}": torch.tensor(2.0) for end in ("k_scale", "v_scale", "kv_b_proj.k_scale")}
    save_file(written, tmp_path / "model.safetensors")
    rewritten(tmp_path, lambda config: {**config, "quantization_config": FLOAT_QUANTIZED})
    torch.testing.assert_close(logits(tmp_path), want, atol=1e-4, rtol=0)
