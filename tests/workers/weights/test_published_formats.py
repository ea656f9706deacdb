"""Quantized tensors as the libraries of those who publish them write and read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from paged import CPU
from quantized_checkpoints import INT4_CONFIG, fp8
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import Checkpoint
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS
from workers.weights.loading_progress import LoadingProgress
from workers.weights.part import Part
from workers.weights.reader import CheckpointReader
from workers.weights.weight import Weight


def load(folder: Path, tensors: dict[str, torch.Tensor], part: Part) -> tuple[Weight, torch.Tensor]:
    """The matrix as it is kept, and as it is dequantized while it is loaded, in fp32."""
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        reader = CheckpointReader(checkpoint, Mesh(), torch.float32, CPU, LoadingProgress(0, None))
        return reader.matrix(part), reader.plain(part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_what_transformers_makes_of_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of whole blocks: it takes the sides of blocks from the shapes, which is wrong where a block is cut."""
    tensors, meant = fp8("a.weight", 256, 384, seed=5)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["a.weight"], tensors["a.weight_scale_inv"], dtype)
    kept, plain = load(tmp_path, tensors, Part("a.weight", 256, 384))
    assert kept.format is FP8_BLOCKS
    assert torch.equal(kept.dequantized(dtype), theirs)
    assert torch.equal(plain.to(dtype), theirs)
    assert np.array_equal(kept.dequantized(torch.float32).numpy(), meant)


def test_int4_is_what_compressed_tensors_writes_and_reads(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="make setup installs it")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    group = INT4_CONFIG["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=group["targets"], weights=group["weights"])
    # Numbers that this format holds, so that they are written as they are: a bf16 scale times an integer.
    scale = torch.from_numpy(np.random.default_rng(8).uniform(0.5, 1.5, (48, 5))).bfloat16()
    number = torch.from_numpy(np.random.default_rng(9).integers(-8, 8, (48, 160))).float()
    weight = number * scale.float().repeat_interleave(32, dim=1)
    written = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    assert set(written) == {"weight_packed", "weight_scale", "weight_shape"}
    read = PackedQuantizationCompressor.decompress(dict(written), scheme)["weight"]
    tensors = {f"a.{name}": tensor for name, tensor in written.items()}
    kept, plain = load(tmp_path, tensors, Part("a.weight", 48, 160))
    assert kept.format is INT4_GROUPS
    assert torch.equal(kept.dequantized(torch.float32), weight)
    assert torch.equal(plain, weight)
    assert torch.equal(kept.dequantized(read.dtype), read)
