"""A new family of models is one file, here toy_family.py, and one line of the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import InlineEngine
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from toy_family import Toy

from workers.config import EngineConfig
from workers.families import load_config, load_model
from workers.families.registry import FAMILIES
from workers.models.config import ConfigError
from workers.models.model import Model
from workers.parallel.group import Group
from workers.protocol.plan import SamplingParams
from workers.weights.checkpoint import WeightsError

FIELDS = {
    "vocab_size": "vocabulary",
    "num_hidden_layers": "depth",
    "hidden_size": "width",
    "intermediate_size": "inner_width",
    "num_attention_heads": "heads",
    "kv_lora_rank": "latent",
    "qk_nope_head_dim": "head",
    "qk_rope_head_dim": "roped",
    "v_head_dim": "value",
    "rms_norm_eps": "eps",
    "max_position_embeddings": "context",
    "eos_token_id": "end",
}


def dense_v2(folder: Path) -> Path:
    return write_tiny(folder, "v2-no-q-lora", first_k_dense_replace=3)


def as_toy(source: Path, folder: Path) -> Path:
    """The checkpoint `source`, of a model of DeepSeek V2 without experts, as its toy twin would be published."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    toy = {ours: config[theirs] for theirs, ours in FIELDS.items()}
    theta = config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", "theta": theta, **toy}))
    tensors = {Toy().tensor(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    for prefix in {name.removesuffix("mlp.gate_proj.weight") for name in tensors if name.endswith("gate_proj.weight")}:
        gate, up = (tensors.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
        tensors[f"{prefix}w13"] = torch.cat([gate, up])
        tensors[f"{prefix}w2"] = tensors.pop(f"{prefix}mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "toy", Toy())


def test_a_family_nobody_registered_is_refused_by_name(tmp_path: Path) -> None:
    toy = as_toy(dense_v2(tmp_path / "v2"), tmp_path / "toy")
    with pytest.raises(ConfigError, match=r"model_type = 'toy' is not supported; supported: .*'deepseek_v2'"):
        load_config(toy)


@pytest.mark.usefixtures("registered")
def test_a_new_family_computes_what_its_twin_computes(tmp_path: Path) -> None:
    twin = dense_v2(tmp_path / "v2")
    toy = as_toy(twin, tmp_path / "toy")
    theirs, ours = load_fp32(twin), load_fp32(toy)
    for name, own in vars(theirs.layers[1].attention).items():
        if isinstance(own, torch.Tensor):
            assert torch.equal(own, getattr(ours.layers[1].attention, name)), name
    assert tokens_of(toy) == tokens_of(twin)


def load_fp32(folder: Path) -> Model:
    return load_model(folder, group=Group(), dtype=torch.float32, device=torch.device("cpu"), max_positions=512)


def tokens_of(folder: Path) -> list[list[int]]:
    """Return the tokens that a whole rank generates, through prefill, decode steps and sampling."""
    engine = InlineEngine(EngineConfig(model=str(folder), device="cpu", max_rows=4, cache_pages=32, token_budget=64))
    return engine.generate([[1, 2, 3, 4, 5], list(range(7, 90))], SamplingParams(12, temperature=0.0))


@pytest.mark.usefixtures("registered")
def test_errors_speak_of_the_names_that_the_checkpoint_has(tmp_path: Path) -> None:
    toy = as_toy(dense_v2(tmp_path / "v2"), tmp_path / "toy")
    tensors = load_file(toy / "model.safetensors")
    del tensors["blocks.1.w13"]
    save_file(tensors, toy / "model.safetensors")
    with pytest.raises(WeightsError, match=r"(?s)1 missing:\s+blocks\.1\.w13"):
        load_fp32(toy)
