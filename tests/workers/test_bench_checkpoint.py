"""bench/checkpoint.py writes folders that load as published checkpoints do, in each format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.bench_shapes import SMALL
from workers.families.loading import load_model
from workers.parallel.group import Group
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP8, PLAIN
from workers.weights.formats.format import Format

pytestmark = pytest.mark.soak

CPU = torch.device("cpu")


SHAPES = ("v2-lite", "v3-slice", "v32-slice", "glm52-slice", "glm-flash")
CASES = [(shape, form) for shape in SHAPES for form in (PLAIN, FP8_BLOCKS, INT4_GROUPS)] + [("hy4-slice", MXFP8)]


@pytest.mark.parametrize(("shape", "form"), CASES)
def test_what_is_written_loads(shape: str, form: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import checkpoint
    import shapes

    values = {**shapes.SHAPES[shape][0], **SMALL, "n_group": 1, "topk_group": 1, "q_lora_rank": 32}
    if values.get("indexer_types"):
        values["indexer_types"] = values["indexer_types"][:2]
    written = checkpoint.write_folder(values, form, tmp_path, CPU)
    model = load_model(tmp_path, group=Group(), dtype=torch.float32, device=CPU, max_positions=64)
    assert model.drafter is not None or not values.get("num_nextn_predict_layers")
    files = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert 0 < files - written < 1 << 17  # the headers
    assert written > 4096
    for layer in model.layers:
        if (indexer := getattr(layer.attention, "indexer", None)) is not None:
            assert indexer.q_FA.format is (FP8_BLOCKS if form is FP8_BLOCKS else PLAIN)  # MXFP8 leaves them out
            assert bool((indexer.norm_I == 1).all())
            assert not bool(indexer.bias_I.any())
