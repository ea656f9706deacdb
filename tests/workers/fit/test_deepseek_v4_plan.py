"""What `latentserve fit` counts of a DeepSeek V4: weights as they are stored, pages, and rings of slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_layout import DSPARK, QUANTIZATION, dspark_v4, published_v4, quantized_v4, tiny_v4, write_v4
from published_configs import V4_FLASH, V4_FLASH_DSPARK, V4_PRO

from workers.config import EngineConfig
from workers.fit.memory_plan import MemoryPlan, memory_plan
from workers.fit.settings import Unfit, check_fit
from workers.fit.smallest_change import smallest_change

GIB = 2**30
QUANTIZED: dict[str, Any] = {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}


def plan_of(folder: Path, total: int = 8 * GIB, **settings: Any) -> MemoryPlan:
    return memory_plan(EngineConfig(model=str(folder), **settings), total)


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": QUANTIZATION}))
    return folder


def of_entries(layers: tuple[int, int]) -> int:
    """Bytes a token of Flash or Pro, by its numbers of layers with and without indexer: 512 features of an entry, 128
    of an index key, in bf16; one for 4 tokens, and of the others one a page, though two pages have but one."""
    indexed, others = layers
    return indexed * (512 + 128) * 2 // 4 + others * 512 * 2 // 64


@pytest.mark.parametrize(
    ("values", "gigabytes", "layers"),
    [
        (V4_FLASH, 156.0 + 3.6, (21, 20)),
        (V4_FLASH_DSPARK, 156.0 + 11.0, (21, 20)),
        (V4_PRO, 851.0 + 14.0, (30, 31)),
    ],
    ids=["flash", "flash-dspark", "pro"],
)
def test_published_models_take_what_their_files_take(
    values: dict[str, Any], gigabytes: float, layers: tuple[int, int], tmp_path: Path
) -> None:
    plan = plan_of(write(tmp_path, values), 2000 * GIB, max_rows=16, max_context=65536)
    assert plan.weights / 1e9 == pytest.approx(gigabytes, abs=0.5)
    assert plan.page_bytes == 64 * of_entries(layers)
    assert plan.graphs > GIB
    assert plan.fits


def test_graphs_are_estimated_a_little_above_what_was_measured(tmp_path: Path) -> None:
    """Flash on two H200, in MiB, as docs/figures.md has it. Drafts take more: of the layer for multi-token prediction
    the streams of a step's tokens, of DSpark a block for each row."""
    measured, sizes = 1486, {"tensor_parallel": 2, "max_rows": 64, "max_context": 16384}
    plan = plan_of(write(tmp_path, V4_FLASH), 140 * GIB, width=1, drafter="none", **sizes)
    assert measured < plan.graphs / 2**20 < 1.2 * measured
    assert plan_of(tmp_path, 140 * GIB, width=1, drafter="none", graphs=False, **sizes).graphs == 0
    streams, block = 2048 * 5 * 4096 * 2, 64 * 5 * 4 * 4096 * 2
    alone = plan_of(tmp_path, 140 * GIB, width=2, drafter="none", **sizes)
    drafting = plan_of(tmp_path, 140 * GIB, width=2, **sizes)
    assert drafting.graphs > alone.graphs + streams
    blocks = plan_of(write(tmp_path, V4_FLASH_DSPARK), 140 * GIB, width=2, **sizes)
    assert alone.graphs + block < blocks.graphs < drafting.graphs


def test_what_is_looked_up_of_experts_is_counted(tmp_path: Path) -> None:
    """Of MXFP4 a byte for each row of a rank's experts, of the layer that drafts, too."""
    sizes: dict[str, Any] = {"tensor_parallel": 2, "max_rows": 16, "max_context": 16384, "width": 2}
    plain = {name: value for name, value in V4_FLASH.items() if name != "expert_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    without = plan_of(tmp_path, 400 * GIB, **sizes)
    found = plan_of(write(tmp_path, V4_FLASH), 400 * GIB, **sizes)
    assert found.rest - without.rest == 44 * 256 * (2048 + 4096)


def test_rings_of_slots_and_snapshots_are_counted(tmp_path: Path) -> None:
    """Windows in bf16, and in fp32 what compressors make of a token, of which overlapping ones make twice as much. A
    snapshot has windows without the token that is their last, and the four tokens that take part in the next entry."""
    entry, made = 512 * 2, 2 * 2 * (512 + 128) * 4
    window, states = 43 * 128 * entry, 21 * 8 * made + 20 * 128 * 2 * 512 * 4
    kept = 43 * 127 * entry + 21 * 4 * made
    sizes: dict[str, Any] = {"max_rows": 16, "max_context": 65536, "prefix_snapshots": 100}
    plan = plan_of(write(tmp_path, V4_FLASH), 400 * GIB, drafter="none", **sizes)
    assert plan.rings == 17 * (window + states)
    assert plan.snapshots == 100 * kept
    assert window == pytest.approx(5.6e6, rel=0.01)
    assert states == pytest.approx(12e6, rel=0.03)
    # A step's tokens beside that, and the window of the layer that drafts.
    drafting = plan_of(tmp_path, 400 * GIB, width=2, **sizes)
    more = 43 * entry + 21 * made + 20 * 2 * 512 * 4
    assert drafting.rings == plan.rings + 17 * (more + (128 + 2 * 2) * entry)
    assert drafting.snapshots == plan.snapshots + 100 * 127 * entry
    # Or those of the layers of DSpark, whose entries are no token ahead.
    blocks = plan_of(write(tmp_path, V4_FLASH_DSPARK), 400 * GIB, width=2, **sizes)
    assert blocks.rings == plan.rings + 17 * (more + 3 * (128 + 1) * entry)
    assert blocks.snapshots == plan.snapshots + 100 * 3 * 127 * entry
    with pytest.raises(ValueError, match="give --width 6 or less"):
        plan_of(tmp_path, 400 * GIB, width=7, **sizes)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drafts", [{}, {**DSPARK, "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0]}], ids=["", "dspark"])
@pytest.mark.parametrize("form", [{}, QUANTIZED], ids=["plain", "quantized"])
def test_config_and_files_say_the_same(
    form: dict[str, Any], drafts: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    config, model = tiny_v4(**form)
    tensors = published_v4(model)
    config |= drafts
    if drafts:
        tensors |= dspark_v4(config, seed=3)
    if form:
        tensors, _ = quantized_v4(tensors)
    wide = ("hc_", "ape", "attn_sink", "bias")
    tensors = {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 and not any(part in name for part in wide) else tensor
        for name, tensor in tensors.items()
    }
    write_v4(tmp_path, config, tensors)
    plan = plan_of(tmp_path, tensor_parallel=ranks)
    (tmp_path / "model.safetensors").unlink()
    alone = plan_of(tmp_path, tensor_parallel=ranks)
    assert plan.from_files
    assert not alone.from_files
    assert plan.weights == alone.weights
    if ranks == 1:
        # The table of the first layers has 8 bytes an id in files, and 4 here.
        files = sum(tensor.nbytes for tensor in tensors.values())
        assert plan.weights == files - 2 * 131 * 2 * 4 + _wider(tensors)


def _wider(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes by which scales of blocks grow, a byte each in files, and a confidence head in bf16: fp32 here."""
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".scale") and ".experts." not in name]
    heads = [tensor for name, tensor in tensors.items() if "confidence_head" in name]
    return 3 * sum(tensor.numel() for tensor in scales) + 2 * sum(tensor.numel() for tensor in heads)


def test_the_smallest_change_is_more_ranks(tmp_path: Path) -> None:
    """A cache in FP8 is none: there is no such cache of this family yet."""
    config = EngineConfig(model=str(write(tmp_path, V4_FLASH)), max_rows=16, max_context=65536)
    plan = memory_plan(config, 140 * GIB)
    assert not plan.fits
    change = smallest_change(config, plan, {})
    assert change is not None
    assert change.words == "--tensor-parallel 2"
    with pytest.raises(ValueError, match="kv_cache_dtype fp8"):
        memory_plan(config.model_copy(update={"kv_cache_dtype": "fp8"}), 140 * GIB)


def test_ranks_share_groups_of_heads(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write(tmp_path, V4_FLASH)), tensor_parallel=16)
    with pytest.raises(Unfit, match="o_groups = 8"):
        check_fit(config)
