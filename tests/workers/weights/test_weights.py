"""Reading checkpoints: indexed files, slices, and one clear error for everything that does not fit."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import CPU, load_fp32
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from kernels.matrix import MicroScaled4
from tests.deepseek_v4_layout import QUANTIZATION, published_v4, quantized_v4, tiny_v4, write_v4
from workers.families import load_model
from workers.memory.scratch import Scratch
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.general import GeneralOps
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights import checkpoint, loading_progress, memory_check
from workers.weights.checkpoint import WeightsError
from workers.weights.formats.mxfp4 import Mxfp4


def load(folder: Path, **options: Any) -> Model:
    return load_model(
        folder, **{"group": Group(), "dtype": torch.float32, "device": CPU, "max_positions": 64, **options}
    )


def rewrite(folder: Path, change: Any) -> None:
    """Apply `change` to the dictionary of tensors on the disk."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def split(folder: Path, parts: int) -> None:
    """Spread the tensors over several files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_indexed_files_are_read(tmp_path: Path) -> None:
    one, several = write_tiny(tmp_path / "one"), write_tiny(tmp_path / "several")
    split(several, 3)
    a, b = load_fp32(one), load_fp32(several)
    assert torch.equal(a.head_YE.plain, b.head_YE.plain)
    assert torch.equal(a.layers[2].attention.down_FE.plain, b.layers[2].attention.down_FE.plain)
    assert torch.equal(a.layers[1].feed_forward.mixture.down_XEI.plain, b.layers[1].feed_forward.mixture.down_XEI.plain)


def test_each_rank_reads_only_its_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path)
    read: dict[str, torch.Size] = {}
    original = checkpoint.Checkpoint.read

    def recorded(self: checkpoint.Checkpoint, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        tensor = original(self, name, index)
        read[name] = tensor.shape
        return tensor

    monkeypatch.setattr(checkpoint.Checkpoint, "read", recorded)
    monkeypatch.setattr("workers.families.loading.check_memory", lambda *_: None)  # collective
    load(folder, group=Group(Mesh.of(1, 2)))
    full = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    assert read.keys() == full.keys()
    for name, shape in read.items():
        halved = [ours * 2 == whole for ours, whole in zip(shape, full[name], strict=True)]
        if any(part in name for part in ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj")):
            assert halved == [True, False], name
        elif any(part in name for part in ("o_proj", "down_proj")):
            assert halved == [False, True], name
        elif name == "lm_head.weight":
            assert shape[0] == 131 - 66
        else:
            assert shape == full[name], name


def test_matrices_of_experts_are_made_when_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of MXFP4 that waits for the device, and most layers are multiplied by for the first time in a graph."""
    config, tiny = tiny_v4(expert_dtype="fp4", quantization_config=QUANTIZATION)
    write_v4(tmp_path, config, quantized_v4(published_v4(tiny))[0])
    made, matrix = [], Mxfp4.matrix
    monkeypatch.setattr(Mxfp4, "matrix", lambda self, *given: made.append(given) or matrix(self, *given))
    model = load(tmp_path)
    assert isinstance(model, CompressedModel)
    assert len(made) == 2 * len(model.blocks)
    for block in model.blocks:
        kept = block.experts.gate_up_XFE.matrix, block.experts.down_XEI.matrix
        assert all(isinstance(one, MicroScaled4) for one in kept)
    assert len(made) == 2 * len(model.blocks)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_a_router_is_kept_as_it_is_stored(stored: torch.dtype, tmp_path: Path) -> None:
    """A router in the model's dtype has half the bytes and half the time of its products; in another one it may not be
    rounded."""

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
            tensors[name] = tensors[name].bfloat16().to(stored)

    rewrite(write_tiny(tmp_path, seed=3), narrow)
    experts = load(tmp_path, dtype=torch.bfloat16).layers[1].feed_forward
    assert experts.mixture.router_XE.plain.dtype == stored
    torch.manual_seed(1)
    x_TE = torch.randn(50, experts.mixture.router_XE.shape[1]).bfloat16()
    want = load(tmp_path, dtype=torch.float32).layers[1].feed_forward
    assert want.mixture.router_XE.plain.dtype == torch.float32
    ops, memory = GeneralOps(Group()), Scratch(CPU)
    ours, theirs = ops.route(x_TE, experts.mixture, memory), ops.route(x_TE.float(), want.mixture, memory)
    for got, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(got, wanted)


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(4)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(7)

    rewrite(folder, change)
    with pytest.raises(WeightsError) as error:
        load(folder)
    text = str(error.value)
    assert "2 missing" in text
    assert "model.norm.weight" in text
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in text
    assert "1 unexpected" in text
    assert "model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.2.input_layernorm.weight is [7], config.json wants [48]" in text


def test_long_lists_are_cut(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts." in name])
    with pytest.raises(WeightsError, match=r"and \d+ more"):
        load(folder)


def test_well_known_extras_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    rewrite(folder, change)
    assert load(folder).drafter is not None


def test_unreadable_dtype_is_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    rewrite(
        folder,
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48).to(torch.float8_e4m3fn)}),
    )
    with pytest.raises(WeightsError, match=r"(?s)unsupported dtype.*model\.norm\.weight is F8_E4M3"):
        load(folder)


def test_a_declared_draft_layer_may_be_absent_but_not_partial(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    rewrite(folder, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with pytest.raises(WeightsError, match=r"(?s)1 missing.*model\.layers\.3\.eh_proj\.weight"):
        load(folder)
    rewrite(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.3.")])
    assert load(folder).drafter is None


@pytest.mark.parametrize("said", [0, None])
def test_a_draft_layer_that_is_not_declared_is_left_out_with_a_line(tmp_path: Path, said: int | None) -> None:
    folder = write_tiny(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    assert values.pop("num_nextn_predict_layers") == 1
    values |= {} if said is None else {"num_nextn_predict_layers": said}
    (folder / "config.json").write_text(json.dumps(values))
    lines: list[str] = []
    model = load_model(folder, group=Group(), dtype=torch.float32, device=CPU, max_positions=64, progress=lines.append)
    assert model.drafter is None
    [line] = [line for line in lines if "left out" in line]
    assert "model.layers.3.*" in line
    assert "num_nextn_predict_layers" in line
    rewrite(folder, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with pytest.raises(WeightsError, match=r"unexpected"):  # an ordinary layer that config.json has forgotten
        load(folder)


def test_a_draft_layer_that_is_not_supported_is_left_out_with_a_line(tmp_path: Path) -> None:
    """Declared as it is, too."""
    folder = write_tiny(tmp_path, "axk1")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}))
    lines: list[str] = []
    model = load_model(folder, group=Group(), dtype=torch.float32, device=CPU, max_positions=64, progress=lines.append)
    assert model.drafter is None
    [line] = [line for line in lines if "left out" in line]
    assert "not supported for model_type 'axk1'" in line
    assert "declare" not in line


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"model\.safetensors, is the download complete"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match=r"model-00001-of-00002\.safetensors"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(WeightsError, match=r"index\.json"):
        load(folder)


def test_too_little_memory_is_said_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path)
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    lines: list[str] = []
    monkeypatch.setattr(memory_check, "_free_host_bytes", lambda: size - 1)
    with pytest.raises(MemoryError, match="the weights need"):
        load(folder, progress=lines.append)
    assert not lines
    monkeypatch.setattr(memory_check, "_free_host_bytes", lambda: size)
    load(folder, progress=lines.append)
    assert lines[-1].startswith("0.00 GiB of weights loaded in ")
    monkeypatch.setattr(memory_check, "_free_host_bytes", lambda: size * 2 // 3)
    load(folder, dtype=torch.bfloat16)


def test_progress_says_where_how_much_and_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every three seconds of a load that takes a second for every tensor."""
    clock = itertools.count()
    monkeypatch.setattr(loading_progress.time, "perf_counter", lambda: float(next(clock)))
    lines: list[str] = []
    load(write_tiny(tmp_path), progress=lines.append)
    patterns = [
        rf"{where}: 0\.00 of 0\.00 GiB of weights, about \d+ s left" for where in ("layer 3 of 3", "draft layer")
    ]
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    assert re.fullmatch(r"0\.00 GiB of weights loaded in \d+\.0 s", lines[-1])
    seconds = next(clock)
    assert len(lines) <= seconds / loading_progress.PERIOD_S + 2


def test_progress_estimates_from_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loading_progress.time, "perf_counter", lambda: now[0])
    lines: list[str] = []
    progress = loading_progress.LoadingProgress(100 << 30, lines.append)
    progress.at("layer 1 of 9")
    for seconds in range(1, 11):
        now[0] = float(seconds)
        progress.add(4 << 30)
    assert lines == [
        "layer 1 of 9: 0.00 of 100.00 GiB of weights",
        "layer 1 of 9: 12.00 of 100.00 GiB of weights, about 22 s left",
        "layer 1 of 9: 24.00 of 100.00 GiB of weights, about 19 s left",
        "layer 1 of 9: 36.00 of 100.00 GiB of weights, about 16 s left",
    ]


def test_free_memory_is_positive_and_not_more_than_there_is() -> None:
    import psutil

    assert 0 < memory_check._free_host_bytes() <= psutil.virtual_memory().total
