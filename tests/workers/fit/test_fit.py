"""Checks by config.json alone, held against what a rank says about the same when it loads."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from quantized_checkpoints import (
    FP8_CONFIG,
    FP8_MODELOPT_CONFIG,
    FP8_MODELOPT_NESTED,
    INT4_CONFIG,
    MXFP8_CONFIG,
    MXFP8_NESTED,
)

from workers.config import EngineConfig
from workers.families.registry import load_config
from workers.fit.cache_budget import fp8_cache
from workers.fit.settings import SHARED, Unfit, check_fit
from workers.models.config import ConfigError

DEMO: dict[str, Any] = json.loads((EngineConfig(model="demo").folder / "config.json").read_text())


def compressed(**changes: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with these fields, wherever they have their place."""
    given = copy.deepcopy(INT4_CONFIG)
    group = given["config_groups"]["group_0"]
    for name, value in changes.items():
        place = group["weights"] if name in group["weights"] else group if name in group else given
        place[name] = value
    return given


OF_A_CACHE = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def float_quantized(**changes: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors in FP8 with one scale for a matrix, with these fields likewise."""
    of_weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "group_size": None}
    given = compressed(**{"format": "float-quantized", "input_activations": OF_A_CACHE, **of_weights})
    group = given["config_groups"]["group_0"]
    for name, value in changes.items():
        (group["weights"] if name in group["weights"] else given)[name] = value
    return given


def nested(**changes: Any) -> dict[str, Any]:
    """A quantization_config of modelopt with these fields in its object `quantization`."""
    return {**MXFP8_NESTED, "quantization": {**MXFP8_NESTED["quantization"], **changes}}


def of_modelopt(**changes: Any) -> dict[str, Any]:
    """A quantization_config of modelopt's FP8 with these fields of its weights."""
    given = copy.deepcopy(FP8_MODELOPT_CONFIG)
    given["config_groups"]["group_0"]["weights"] |= changes
    return given


def model(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**DEMO, **changes}))
    return str(folder)


def fit(**settings: Any) -> str:
    """Return what is wrong; empty when nothing is."""
    try:
        check_fit(EngineConfig(**settings))
    except Unfit as error:
        return str(error)
    return ""


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("heads", [4, 12, 60, 7])
def test_values_are_named_that_work_and_only_those(tmp_path: Path, heads: int, invariant: bool) -> None:
    folder = model(tmp_path, num_attention_heads=heads, intermediate_size=480, moe_intermediate_size=240)
    ranks = (1, 2, 4, 8) if invariant else range(1, 65)
    said = {n: fit(model=folder, tensor_parallel=n, invariant=invariant) for n in ranks}
    works = {n for n in ranks if all(count % n == 0 for count in (heads, 480, 240))}
    assert {n for n in ranks if not said[n]} == works
    for n, text in said.items():
        if text:
            assert text.startswith(f"tensor_parallel = {n} (--tensor-parallel): ")
            named = text.rpartition("values that work: ")[2]
            assert {int(value) for value in re.findall(r"\d+", named)} <= works | set(range(65, 1000))
            assert (f"num_attention_heads = {heads}" in text) == bool(heads % n)


def test_a_context_that_the_model_was_not_made_for(tmp_path: Path) -> None:
    folder = model(tmp_path, max_position_embeddings=4096)
    assert not fit(model=folder, max_context=4096)
    said = fit(model=folder, max_context=4097)
    assert said.startswith("max_context = 4097 (--max-context)")
    assert said.endswith("give 4096 or less")


def test_a_context_without_room_for_an_answer() -> None:
    assert fit(model="demo", max_context=1).startswith("max_context = 1 (--max-context): ")
    assert not fit(model="demo", max_context=2)


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"dtype": "float32"}, {"device": "cpu"}])
def test_a_cache_in_another_type_than_the_model(settings: dict[str, Any]) -> None:
    """The cache is refused as `fp8_cache` says on a rank."""
    said = fit(model="demo", kv_cache_dtype="bf16", **settings)
    assert said.startswith("kv_cache_dtype = bf16 (--kv-cache-dtype), but the model runs in float")
    dtype = torch.float16 if "float16" in settings.values() else torch.float32
    with pytest.raises(ValueError, match="kv_cache_dtype = bf16, but the model runs in float"):
        fp8_cache(EngineConfig(model="demo", kv_cache_dtype="bf16", **settings), dtype)
    assert not fit(model="demo", kv_cache_dtype="bf16", dtype="bfloat16")
    assert not fit(model="demo", kv_cache_dtype="bf16")


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (1, True), (None, True)])
def test_a_cache_in_another_type_than_the_model_has_without_a_gpu(gpus: int | None, fits: bool) -> None:
    config = EngineConfig(model="demo", kv_cache_dtype="bf16")
    with nullcontext() if fits else pytest.raises(Unfit, match=r"--kv-cache-dtype.*the model runs in float32"):
        check_fit(config, gpus=gpus)
    check_fit(EngineConfig(model="demo", kv_cache_dtype="bf16", dtype="bfloat16"), gpus=gpus)
    check_fit(EngineConfig(model="demo", kv_cache_dtype="fp8"), gpus=gpus)


@pytest.mark.parametrize("place", ["", "text_config"])
def test_quantized_checkpoints_that_can_be_read(tmp_path: Path, place: str) -> None:
    fp8 = (FP8_CONFIG, {**FP8_CONFIG, "scale_fmt": "ue8m0"}, FP8_MODELOPT_CONFIG, FP8_MODELOPT_NESTED)
    block = float_quantized(strategy="block", block_structure=[128, 128])
    # What they say of the cache is not asked for.
    cached = (compressed(kv_cache_scheme=OF_A_CACHE), float_quantized(kv_cache_scheme=OF_A_CACHE))
    cached = (*cached, nested(kv_cache_quant_algo="FP8"), {**MXFP8_CONFIG, "kv_cache_scheme": OF_A_CACHE})
    for given in (*fp8, INT4_CONFIG, MXFP8_CONFIG, MXFP8_NESTED, block, *cached):
        changes = {"quantization_config": given}
        assert not fit(model=model(tmp_path, **({place: changes} if place else changes)))


@pytest.mark.parametrize("place", ["", "text_config"])
@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        ({}, "of unknown method", "quant_method = None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "FP8", "weight_block_size = [64, 64]"),
        ({**FP8_CONFIG, "weight_block_size": [1, 128]}, "FP8", "weight_block_size = [1, 128]"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "FP8", "fmt = 'e5m2'"),
        ({**FP8_CONFIG, "activation_scheme": "token"}, "FP8", "activation_scheme = 'token'"),
        ({"quant_method": "awq", "bits": 4}, "awq", "quant_method = 'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "quant_method = 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes", "quant_method"),
        ({"quant_method": "mxfp4"}, "MXFP4", "quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4, modelopt", "quant_algo = 'NVFP4'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "FP8_PB_WO, modelopt", "'FP8', 'MXFP8'"),
        (of_modelopt(strategy="channel"), "FP8, modelopt", "weights.strategy = 'channel'"),
        (of_modelopt(dynamic=True), "FP8, modelopt", "weights.dynamic = True"),
        (of_modelopt(num_bits=4), "FP8, modelopt", "weights.num_bits = 4"),
        (of_modelopt(group_size=128), "FP8, modelopt", "weights.group_size = 128"),
        ({**MXFP8_CONFIG, "group_size": 16}, "MXFP8, modelopt", "group_size = 16"),
        (nested(quant_algo="NVFP4"), "NVFP4, modelopt", "quant_algo = 'NVFP4'"),
        (nested(quant_algo=None), "modelopt", "quant_algo = None"),
        ({**MXFP8_NESTED, "quantization": "MXFP8"}, "modelopt", "quant_algo = None"),
        (compressed(format="nvfp4-pack-quantized"), "NVFP4, compressed-tensors", "format"),
        (compressed(num_bits=8, type="float"), "FP8, compressed-tensors", "weights.num_bits = 8"),
        (compressed(num_bits=8), "INT8, compressed-tensors", "weights.num_bits = 8"),
        (compressed(group_size=128), "INT4, compressed-tensors", "weights.group_size = 128"),
        (compressed(symmetric=False), "INT4, compressed-tensors", "weights.symmetric = False"),
        (compressed(actorder="group"), "INT4, compressed-tensors", "weights.actorder = 'group'"),
        (compressed(strategy="channel"), "INT4, compressed-tensors", "weights.strategy = 'channel'"),
        (compressed(dynamic=True), "INT4, compressed-tensors", "weights.dynamic = True"),
        (compressed(format="marlin-24"), "INT4, compressed-tensors", "format = 'marlin-24'"),
        (compressed(config_groups={}), "compressed-tensors", "exactly one group"),
        (compressed(config_groups={"a": {}, "b": {}}), "compressed-tensors", "exactly one group"),
        (float_quantized(strategy="channel"), "FP8, compressed-tensors", "weights.strategy = 'channel'"),
        (float_quantized(num_bits=4), "FP4, compressed-tensors", "weights.num_bits = 4"),
        (float_quantized(block_structure=[64, 64]), "FP8, compressed-tensors", "weights.block_structure = [64, 64]"),
        (float_quantized(config_groups={}), "compressed-tensors", "config_groups has no group"),
        (float_quantized(transform_config={"a": 1}), "FP8, compressed-tensors", "transform_config"),
        (float_quantized(sparsity_config={"format": "sparse-24"}), "FP8, compressed-tensors", "'sparse-24'"),
        (
            float_quantized(format="mixed-precision"),
            "FP8, compressed-tensors",
            "format = 'mixed-precision', supported: 'pack-quantized', 'float-quantized'",
        ),
        (compressed(transform_config={"a": 1}), "INT4, compressed-tensors", "transform_config"),
        (compressed(sparsity_config={"format": "sparse-24"}), "INT4, compressed-tensors", "sparsity_config"),
        (compressed(input_activations={"num_bits": 8}), "INT4, compressed-tensors", "input_activations"),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, given: dict, kind: str, why: str, place: str) -> None:
    """Others are refused before anything starts, and, in the same words, by whoever reads the model."""
    changes = {"quantization_config": given}
    said = fit(model=model(tmp_path, **({place: changes} if place else changes)))
    prefix = f"{place}." if place else ""
    for expected in (f"{prefix}quantization_config: ", f"({kind})", why, "128 x 128", "groups of 32", "docs/models.md"):
        assert expected in said
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert str(error.value).removeprefix("config.json: ") == said.removeprefix(f"{tmp_path / 'config.json'}: ")


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    folder = model(tmp_path, quantization_config={"quant_method": "gptq"}, max_position_embeddings=8)
    assert len(fit(model=folder, tensor_parallel=977, max_context=9).splitlines()) == 3


@pytest.mark.parametrize(
    "strange",
    [
        {name: value}
        for name in (*SHARED, "max_position_embeddings", "text_config", "quantization_config")
        for value in (None, "x", 0, 1.5, [])
    ],
)
def test_strange_values_are_left_to_who_reads_the_model(tmp_path: Path, strange: dict) -> None:
    said = fit(model=model(tmp_path, **strange), max_context=1)
    assert ("quantized" in said) == (strange.get("quantization_config") is not None)


def test_a_file_that_is_no_config(tmp_path: Path) -> None:
    for text, said in (("{", "cannot read"), ("[]", "does not hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        assert said in fit(model=str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"is a file, not a model folder: give its folder, {tmp_path}")
    ):
        check_fit(EngineConfig(model=str(tmp_path / "config.json")))


@pytest.mark.parametrize(
    ("name", "more"), [("host_cache_bytes", {}), ("disk_cache_bytes", {"host_cache_bytes": 2**30})]
)
def test_less_than_a_page_behind_the_cache(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    """The size of a page is told as ranks count it: the demo model has no other caches."""
    config = EngineConfig(model="demo", device="cpu", width=1, host_cache_bytes=2**30)
    described = json.loads((config.folder / "config.json").read_text())
    least = 64 * 4 * described["num_hidden_layers"] * (described["kv_lora_rank"] + described["qk_rope_head_dim"])
    given: dict[str, Any] = {"model": "demo", "device": "cpu", **more}
    if name == "disk_cache_bytes":
        given["disk_cache_dir"] = str(tmp_path)
    for size in (1, least - 1):
        said = fit(**given, **{name: size})
        assert said.startswith(f"{name} = {size} (--{name.replace('_', '-')}) is less than one page of latent cache, ")
        assert said.endswith(f"takes at least {least}: give more, or 0 for none")
    assert not fit(**given, **{name: least})
    assert not fit(**given, kv_cache_dtype="fp8", **{name: least // 4})


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (1, False), (None, True)])
def test_more_host_memory_than_the_machine_has(gpus: int | None, fits: bool) -> None:
    """Where the ranks will run on other machines nobody knows."""
    config = EngineConfig(model="demo", host_cache_bytes=psutil.virtual_memory().total + 1)
    says = rf"host_cache_bytes = {config.host_cache_bytes} .* this machine has {config.host_cache_bytes - 1} bytes"
    with nullcontext() if fits else pytest.raises(Unfit, match=says):
        check_fit(config, gpus=gpus)
