"""Quantized tensors as the libraries of those who publish them write and read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged import CPU
from quantized_checkpoints import E2M1, INT4_CONFIG, fp8, fp8_exponents, mxfp4, mxfp8
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kernels.matrix import e2m1
from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import Checkpoint, WeightsError
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP4, MXFP8
from workers.weights.loading_progress import LoadingProgress
from workers.weights.part import Part, Shard
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
    """Matrices have whole blocks: transformers takes the sides of blocks from the shapes, which is wrong where a block
    is cut."""
    tensors, meant = fp8("a.weight", 256, 384, seed=5)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["a.weight"], tensors["a.weight_scale_inv"], dtype)
    kept, plain = load(tmp_path, tensors, Part("a.weight", 256, 384))
    assert kept.format is FP8_BLOCKS
    assert torch.equal(kept.dequantized(dtype), theirs)
    assert torch.equal(plain.to(dtype), theirs)
    assert np.array_equal(kept.dequantized(torch.float32).numpy(), meant)


def stored(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 numbers with one scale, and the scale."""
    scale = values.abs().max() / 448
    return (values / scale).to(torch.float8_e4m3fn), scale


SCALARS = {"no dimension": (), "one": (1,), "two": (1, 1)}


@pytest.mark.parametrize("suffix", [".weight_scale_inv", ".weight_scale", ".qscale_weight"])
@pytest.mark.parametrize("shape", SCALARS.values(), ids=SCALARS)
def test_fp8_with_one_scale_for_a_matrix(shape: tuple[int, ...], suffix: str, tmp_path: Path) -> None:
    """Weights are stored as Mistral publishes them in both layouts, and as compressed-tensors does; on any rank's
    share."""
    number, scale = stored(torch.randn(320, 384, generator=torch.Generator().manual_seed(3)))
    tensors = {"a.weight": number, f"a{suffix}": scale.view(shape)}
    meant = number.float() * scale
    kept, plain = load(tmp_path, tensors, Part("a.weight", 320, 384))
    assert kept.format is FP8_BLOCKS
    assert torch.equal(kept.dequantized(torch.float32), meant)
    assert torch.equal(plain, meant)
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = CheckpointReader(checkpoint, Mesh.of(1, 2), torch.float32, CPU, LoadingProgress(0, None))
        own = reader.matrix(Part("a.weight", 320, 384, shard=Shard(1, "heads")))
    assert torch.equal(own.dequantized(torch.float32), meant[:, 192:])


@pytest.mark.parametrize("scales", ["an expert", "a projection", "all", "blocks"])
def test_experts_in_one_tensor(scales: str, tmp_path: Path) -> None:
    """Gate rows, then up rows, of each expert, as Mistral Small 4 has them for Hugging Face."""
    experts, width, hidden = 3, 128, 256
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(experts, 2 * width, hidden, generator=generator).to(torch.float8_e4m3fn)
    down = torch.randn(experts, hidden, width, generator=generator).to(torch.float8_e4m3fn)
    shape = {"an expert": (experts, 1, 1), "a projection": (experts, 2, 1), "all": (1,), "blocks": (experts, 2, 2)}[
        scales
    ]
    scale = torch.rand(shape, generator=generator) + 0.5
    down_scale = torch.rand((experts, 2, 1) if scales == "blocks" else (experts, 1, 1), generator=generator) + 0.5
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.gate_up_proj": gate_up,
        f"{prefix}.gate_up_proj_scale_inv": scale,
        f"{prefix}.gate_up_proj_activation_scale": torch.ones(experts),
        f"{prefix}.down_proj": down,
        f"{prefix}.down_proj_scale_inv": down_scale,
    }
    save_file(tensors, tmp_path / "model.safetensors")
    spread = scale.view(1, 1, 1) if scales == "all" else scale
    wide = spread.repeat_interleave(2 * width // spread.shape[1], 1)
    wide = wide.repeat_interleave(hidden // spread.shape[2], 2) * gate_up.float()
    low = down_scale.repeat_interleave(hidden // down_scale.shape[1], 1) * down.float()
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = CheckpointReader(checkpoint, Mesh(), torch.float32, CPU, LoadingProgress(0, None))
        for expert in range(experts):
            parts = [Part(f"{prefix}.{expert}.{name}_proj.weight", width, hidden) for name in ("gate", "up")]
            assert torch.equal(reader.matrix(*parts).dequantized(torch.float32), wide[expert])
            part = Part(f"{prefix}.{expert}.down_proj.weight", hidden, width)
            assert torch.equal(reader.matrix(part).dequantized(torch.float32), low[expert])


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2), (3, 2, 1), (3, 1, 1), (1, 1)])
def test_one_scale_for_each_of_stacked_experts(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Or for gate and up of each, or for all, in as many dimensions as a publisher likes."""
    prefix, generator = "model.layers.0.mlp.experts", torch.Generator().manual_seed(4)
    gate_up = torch.randn(3, 2 * 96, 160, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(shape, generator=generator) + 0.5
    save_file(
        {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.gate_up_proj_weight_scale": scale},
        tmp_path / "model.safetensors",
    )
    each = scale.flatten(1) if len(shape) > 1 else scale.unsqueeze(1)
    meant = gate_up.float() * each.expand(3, 2).repeat_interleave(96, 1).unsqueeze(2)
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = CheckpointReader(checkpoint, Mesh(), torch.float32, CPU, LoadingProgress(0, None))
        for expert in range(3):
            parts = [Part(f"{prefix}.{expert}.{name}_proj.weight", 96, 160) for name in ("gate", "up")]
            assert torch.equal(reader.matrix(*parts).dequantized(torch.float32), meant[expert])


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 4), (3, 2, 2, 2)])
def test_scales_that_are_no_experts_are_found_out(shape: tuple[int, ...], tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"
    gate_up = torch.ones(3, 256, 256).to(torch.float8_e4m3fn)
    tensors = {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.gate_up_proj_scale_inv": torch.ones(shape)}
    save_file(tensors, tmp_path / "model.safetensors")
    name = f"{prefix}.1.up_proj.weight"
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(WeightsError, match=re.escape(str(list(shape)))):
        checkpoint.verify(FP8_BLOCKS.tensors(name, 128, 256), [r"\.(0|2)\.|gate_proj"])


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv", "_weight_scale"])
def test_mxfp8_experts_in_one_tensor(suffix: str, dtype: str, tmp_path: Path) -> None:
    """Scales of 32 numbers as torch reads them, whatever they are called, beside those of a matrix that is none of
    theirs."""
    experts, width, hidden, prefix = 3, 64, 96, "model.layers.0.mlp.experts"
    tensors, meant = {}, {}
    for name, shape in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width))):
        made = [mxfp8("w", *shape, seed=10 * len(name) + expert) for expert in range(experts)]
        tensors[f"{prefix}.{name}"] = torch.stack([written["w"] for written, _ in made])
        scale = torch.stack([written["w_scale"] for written, _ in made])
        tensors[f"{prefix}.{name}{suffix}"] = scale if dtype == "U8" else scale.view(torch.float8_e8m0fnu)
        factor = scale.view(torch.float8_e8m0fnu).float().repeat_interleave(32, 2)
        meant[name] = tensors[f"{prefix}.{name}"].float() * factor
        assert np.array_equal(meant[name].numpy(), np.stack([numbers for _, numbers in made]))
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint:
        reader = CheckpointReader(checkpoint, Mesh.of(1, 2), torch.float32, CPU, LoadingProgress(0, None))
        for expert in range(experts):
            shard = Shard(0, "experts")
            halves = [Part(f"{prefix}.{expert}.{half}_proj.weight", width, hidden, shard) for half in ("gate", "up")]
            weight = reader.matrix(*halves)
            gate, up = meant["gate_up_proj"][expert].chunk(2)
            assert weight.format is MXFP8
            assert torch.equal(weight.dequantized(torch.float32), torch.cat([gate[width // 2 :], up[width // 2 :]]))
            down = reader.matrix(Part(f"{prefix}.{expert}.down_proj.weight", hidden, width, Shard(1, "experts")))
            assert torch.equal(down.dequantized(torch.float32), meant["down_proj"][expert][:, width // 2 :])


@pytest.mark.parametrize("write", [mxfp4, fp8_exponents, mxfp8])
def test_scales_as_deepseek_v4_names_them(write: Any, tmp_path: Path) -> None:
    """Every kind of scales is `X.scale` there; shapes tell them apart. What numbers mean, transformers says, too."""
    tensors, meant = write("a.weight", 256, 384, seed=6)
    (scale,) = (tensors.pop(name) for name in list(tensors) if name != "a.weight")
    tensors["a.scale"] = scale.view(torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors["a.weight"], tensors["a.scale"].float(), torch.float32)
    kept, plain = load(tmp_path, tensors, Part("a.weight", 256, 384))
    assert kept.format is {mxfp4: MXFP4, fp8_exponents: FP8_BLOCKS, mxfp8: MXFP8}[write]
    assert torch.equal(kept.dequantized(torch.float32), theirs)
    assert torch.equal(kept.matrix.float(), theirs)
    assert torch.equal(plain, theirs)
    assert np.array_equal(theirs.numpy(), meant)


def test_every_number_of_mxfp4() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    want = np.stack([np.where(half & 8, -1, 1) * E2M1[half & 7] for half in (np.arange(256) & 15, np.arange(256) >> 4)])
    assert np.array_equal(e2m1(byte.unsqueeze(1)).numpy().T, want.astype(np.float32))


@pytest.mark.parametrize(("byte", "message"), [(255, "that are NaN"), (129, "above 2")])
def test_scales_of_mxfp4_that_are_not_numbers_or_too_large_are_refused(byte: int, message: str, tmp_path: Path) -> None:
    tensors, _ = mxfp4("a.weight", 64, 64, seed=1)
    tensors["a.weight_scale"].view(torch.uint8)[3, 1] = byte
    with pytest.raises(WeightsError, match=rf"a\.weight_scale has scales {message}"):
        load(tmp_path, tensors, Part("a.weight", 64, 64))


def test_scales_of_fp8_blocks_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    tensors, _ = fp8_exponents("a.weight", 256, 256, seed=1)
    tensors["a.weight_scale_inv"].view(torch.uint8)[1, 1] = 255
    with pytest.raises(WeightsError, match=r"a\.weight_scale_inv has scales that are NaN"):
        load(tmp_path, tensors, Part("a.weight", 256, 256))


def test_scales_of_mxfp8_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    tensors, _ = mxfp8("a.weight", 64, 64, seed=1)
    tensors["a.weight_scale"][3, 1] = 255
    with pytest.raises(WeightsError, match=r"a\.weight_scale has scales that are NaN"):
        load(tmp_path, tensors, Part("a.weight", 64, 64))


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
